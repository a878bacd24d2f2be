"""Flower's SuperLink behind a gate: the network reaches what nodes need, this machine alone reaches the rest.

    python -m fedprophet.deploy.superlink --registered KEYS [what flower-superlink takes …]

Flower 1.41 serves three interfaces on one port. Nodes prove who they are on one of them (fleet). The other two (control
and runtime) ask nobody who they are: whoever reaches the port could register a key of their own, or start a run, which
is code on the server and on every node. So these two answer only those who come from the server's own machine.
"""

import ipaddress
import os
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedprophet.deploy import DeployError
from fedprophet.deploy.keys import REGISTERED, by_key
from fedprophet.errors import FedProphetError

FLEET, HEALTH = "/v1/fleet/", "/health"
"""What the network may reach: Flower checks a node's signature on everything below the first, the second is a bare
yes."""
REFUSAL = b"Only the server's own machine may ask for this.\n"
MOST_BYTES = 32 * 2**20
"""Of one request of a node. Flower sends arrays in pieces of 5 MiB, and holds a whole request in memory before it looks
at its signature."""
TOO_LARGE = f"A request says how long it is, and has at most {MOST_BYTES} bytes.\n".encode()

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]


class Gate:
    """An ASGI application that hands a request on if its path is open or its sender is this machine.

    What everybody may ask for has a bounded length.
    """

    def __init__(self, inside: Application) -> None:
        self._inside = inside

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "http" and is_open(scope["path"]) and not is_short(scope):
            await _refuse(send, 413, TOO_LARGE)
        elif scope["type"] == "lifespan" or is_open(scope["path"]) or comes_from_here(scope):
            await self._inside(scope, receive, send)
        elif scope["type"] == "http":
            await _refuse(send, 403, REFUSAL)
        else:
            await send({"type": "websocket.close", "code": 1008})


async def _refuse(send: Send, status: int, text: bytes) -> None:
    # What is left of the request is not read: the connection ends with the answer.
    lengths = [(b"content-length", str(len(text)).encode()), (b"connection", b"close")]
    headers = [(b"content-type", b"text/plain"), *lengths]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text})


def is_open(path: str) -> bool:
    """Whether everybody may ask for a path."""
    return path.startswith(FLEET) or path == HEALTH


def is_short(scope: Scope) -> bool:
    """Whether a request says that it is short enough; one that comes in pieces does not say how long it will be."""
    headers = dict(scope["headers"])
    length = headers.get(b"content-length", b"0")
    plain = b"transfer-encoding" not in headers and length.isdigit() and len(length) < 20
    return plain and int(length) <= MOST_BYTES


def comes_from_here(scope: Scope) -> bool:
    """Whether a connection began on this machine: over loopback, or from the very address at which it arrived."""
    client, server = scope.get("client"), scope.get("server")
    if not client:
        return False
    with suppress(ValueError):
        address = ipaddress.ip_address(client[0])
        mapped = getattr(address, "ipv4_mapped", None)
        return (mapped or address).is_loopback or bool(server and client[0] == server[0])
    return False


def register(state: Any, keys: Path) -> None:
    """Make the server know the public keys in a folder and no others: who is not there is refused from now on."""
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
            text = "A removed key never comes back: give the device a new one with fedprophet deploy add-node"
            raise DeployError(f"{keys / wanted[key]}.pub was registered here before and then removed. {text}") from None


def end_runs(state: Any) -> None:
    """End the runs that an earlier server left: their processes went with it.

    Flower would take a minute to find out, and until then they would be in the way of whoever resumes them.
    """
    from flwr.common.constant import Status

    for run in state.get_run_info(statuses=[Status.PENDING, Status.STARTING, Status.RUNNING]):
        state.stop_run(run.run_id)


def _arguments(given: list[str]) -> tuple[Path, list[str]]:
    """Return the folder of public keys and what is left for Flower."""
    if given[:1] != ["--registered"] or len(given) < 2:
        raise DeployError("the first argument is --registered FOLDER, the folder with the nodes' public keys")
    folder = Path(given[1])
    if not folder.is_dir():
        raise DeployError(f"--registered {folder}: there is no such folder. It holds the nodes' public keys")
    return folder, given[2:]


def main() -> None:
    """Serve until a signal ends it."""
    try:
        keys, rest = _arguments(sys.argv[1:])
        serve(keys, rest)
    except FedProphetError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def _allow_blanks() -> None:
    """Let Flower be installed in a folder whose path has a blank, at which it would cut the path to its tables."""
    from flwr.supercore.state.alembic import utils

    made = utils.build_alembic_config

    def build(engine: Any) -> Any:
        config = made(engine)
        config.set_main_option("path_separator", "os")
        return config

    utils.build_alembic_config = build


def serve(keys: Path, arguments: list[str]) -> None:
    """Start Flower's SuperLink as its own command does, with the nodes registered and the gate in front."""
    import uvicorn
    from flwr.supercore.http_logging import get_uvicorn_log_config
    from flwr.supercore.logger import console_handler
    from flwr.superlink.cli.flower_superlink import SuperLinkLifespan, _parse_superlink_lifespan_config
    from flwr.superlink.main import create_app

    _allow_blanks()
    sys.argv = ["flower-superlink", *arguments]
    config = _parse_superlink_lifespan_config()
    if config.insecure or not config.enable_supernode_auth:
        raise DeployError("the server is not started without TLS and --enable-supernode-auth")
    os.environ[REGISTERED] = str(keys.absolute())  # for the runs, whose processes are started from this one
    app = create_app(config, SuperLinkLifespan)
    state = app.state.linkstate_factory.state()
    register(state, keys)
    end_runs(state)
    uvicorn.run(
        app=Gate(app),
        host=config.host,
        port=config.port,
        access_log=False,  # every node asks every few seconds
        log_config=get_uvicorn_log_config(console_handler.level),
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
        # A proxy on this machine must not lend its address to those behind it.
        proxy_headers=True,
        forwarded_allow_ips="127.0.0.1,::1",
    )


if __name__ == "__main__":
    main()
