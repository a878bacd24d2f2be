"""Flower's server (SuperLink) behind the door and the gate, with the pilot's nodes registered.

    python -m fedprophet.deploy.superlink --registered KEYS [the options of flower-superlink …]

`flower-superlink` can neither put a gate in front of its port nor take a folder of keys, and Flower has no public
interface for either. So this file uses private parts of Flower's server: its parsed options, its web application and
its state. They are those of Flower 1.41, the release that the extra `flower` requires. Four other files use private
parts, each for one reason: `alembic_paths` (the server's migrations in a path with a blank), `control` (requests that
the `flwr` command does not answer in full), `signatures` (what nodes sign) and `flower.server_app` (`InMemoryGrid`, to
recognise a simulation).
"""

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedprophet.deploy import DeployError
from fedprophet.deploy.alembic_paths import allow_blanks
from fedprophet.deploy.gate import Gate
from fedprophet.deploy.keys import REGISTERED, by_key
from fedprophet.errors import FedProphetError


def main() -> None:
    """Serve until a signal ends it."""
    try:
        keys, rest = _arguments(sys.argv[1:])
        serve(keys, rest)
    except FedProphetError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def _arguments(given: list[str]) -> tuple[Path, list[str]]:
    """Return the folder of public keys, and Flower's own arguments."""
    if given[:1] != ["--registered"] or len(given) < 2:
        raise DeployError("the first argument must be --registered FOLDER, the folder with the nodes' public keys")
    folder = Path(given[1])
    if not folder.is_dir():
        raise DeployError(f"--registered {folder}: there is no such folder. It holds the nodes' public keys")
    return folder, given[2:]


def serve(keys: Path, arguments: list[str]) -> None:
    """Start the server as `flower-superlink` does, with the nodes registered and the gate in front."""
    import uvicorn
    from flwr.supercore.http_logging import get_uvicorn_log_config
    from flwr.supercore.logger import console_handler
    from flwr.superlink.cli.flower_superlink import SuperLinkLifespan, _parse_superlink_lifespan_config
    from flwr.superlink.main import create_app

    from fedprophet.deploy.door import DoorServer
    from fedprophet.deploy.signatures import registered_signer

    allow_blanks()
    sys.argv = ["flower-superlink", *arguments]
    config = _parse_superlink_lifespan_config()
    if config.insecure or not config.enable_supernode_auth:
        raise DeployError("the server is not started without TLS and --enable-supernode-auth")
    os.environ[REGISTERED] = str(keys.absolute())  # for the runs, whose processes are started from this one
    app = create_app(config, SuperLinkLifespan)
    state = app.state.linkstate_factory.state()
    register(state, keys)
    end_runs(state)
    settings = uvicorn.Config(
        app=Gate(app, registered_signer(app.state.linkstate_factory.state)),
        ws="none",
        host=config.host,
        port=config.port,
        access_log=False,  # every node asks every few seconds
        log_config=get_uvicorn_log_config(console_handler.level),
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
        # Requests through a proxy on this machine must not count as local.
        proxy_headers=True,
        forwarded_allow_ips="127.0.0.1,::1",
    )
    server = DoorServer(settings)
    with suppress(KeyboardInterrupt):
        server.run(sockets=[settings.bind_socket()])
    if not server.started:
        sys.exit(1)


def register(state: Any, keys: Path) -> None:
    """Let exactly the public keys in a folder connect; all others are refused from now on."""
    from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID
    from flwr.proto.control_pb2 import RegisterNodeRequest
    from flwr.supercore.auth.typing import AccountInfo
    from flwr.supercore.error import FlowerError
    from flwr.superlink.servicer.control import control_handlers

    wanted = {key: path.stem for key, path in by_key(sorted(keys.glob("*.pub"))).items()}
    account = AccountInfo(flwr_aid=NOOP_FLWR_AID, account_name=NOOP_ACCOUNT_NAME)
    known = {node.public_key: node for node in state.get_node_info() if node.status != "unregistered"}
    for key in known.keys() - wanted.keys():
        state.delete_node(known[key].owner_aid, known[key].node_id)
    for key in (key for key in wanted if key not in known):
        request = RegisterNodeRequest(public_key=key, name=wanted[key])
        try:
            control_handlers.register_node(request=request, account=account, state=state)
        except FlowerError:
            text = "A removed key cannot come back: give the device a new one with fedprophet deploy add-node"
            raise DeployError(f"{keys / wanted[key]}.pub was registered here before and then removed. {text}") from None


def end_runs(state: Any) -> None:
    """End the runs of an earlier server, whose processes ended with it.

    Flower would notice after a minute; until then they could not be resumed.
    """
    from flwr.common.constant import Status

    for run in state.get_run_info(statuses=[Status.PENDING, Status.STARTING, Status.RUNNING]):
        state.stop_run(run.run_id)


if __name__ == "__main__":
    main()
