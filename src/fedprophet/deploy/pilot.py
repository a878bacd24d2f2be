"""A pilot's folder on the server: configuration, certificates, registered keys, the nodes' folders, runs.

config.toml  deploy.toml  README.md
app/         what `flwr run` sends to the server and the nodes: names, no code, no keys
ca/          the authority: ca.pem is public, ca.key is secret
server/      certificate and key, keys/ with the public keys that may connect, Flower's state
nodes/       one folder per device, to be copied there
runs/        one folder per run, as `fedprophet train` writes it
"""

import ipaddress
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import tomlkit
from pydantic import Field

from fedprophet.config.config import Config
from fedprophet.config.load import load_config
from fedprophet.config.reference import to_toml
from fedprophet.deploy import DeployError, certificates, node, page
from fedprophet.deploy.keys import HOW, by_key, make_key_pair, registered_form
from fedprophet.deploy.settings_file import read_settings
from fedprophet.errors import ConfigError, unknown
from fedprophet.going_on import PILOT
from fedprophet.settings.describe import as_toml
from fedprophet.settings.section import Section
from fedprophet.settings.values import CUSTOM, Allowed
from fedprophet.storage.files import write_atomic

PORT = 9092
CONNECTION = "pilot"
"""The server's name in Flower's own configuration."""
_NODE = re.compile(r"node-(0|[1-9][0-9]*)")
Hosts = Annotated[list[str], Allowed("list", 'a list of names and addresses, such as ["10.0.0.1"]')]


class PilotFile(Section):
    """The settings of a pilot."""

    server: str = Field(description="The name or address at which nodes reach the server.")
    names: Hosts = Field(default_factory=list, description="Other names of the server, for its certificate.")
    port: int = Field(default=PORT, ge=1, le=65535, description="The server's port, the only one that nodes need.")
    listen: str = Field(default="0.0.0.0", description="The address on which the server listens.")

    @property
    def address(self) -> str:
        """Where nodes reach the server: host:port."""
        return _joined(self.server, self.port)

    @property
    def here(self) -> str:
        """Where this machine reaches the server: over loopback if it listens there."""
        loopback = {"0.0.0.0": "127.0.0.1", "::": "::1"}
        return _joined(loopback.get(self.listen, self.listen), self.port)


@dataclass(frozen=True)
class Pilot:
    """A pilot's folder and its deploy.toml."""

    path: Path
    file: PilotFile

    @property
    def typed(self) -> str:
        """The folder as it is typed in a shell: paths may have blanks."""
        return shlex.quote(str(self.path))

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def authority(self) -> Path:
        """The certificate of the authority that all nodes trust."""
        return self.path / "ca" / "ca.pem"

    @property
    def certificate(self) -> Path:
        return self.path / "server" / "server.pem"

    @property
    def keys(self) -> Path:
        """The public keys of the nodes that may connect: NODE.pub."""
        return self.path / "server" / "keys"

    @property
    def flower(self) -> Path:
        """Flower's own files on the server."""
        return self.path / "server" / "flower"

    @property
    def runs(self) -> Path:
        return self.path / "runs"

    def nodes(self) -> dict[str, Path]:
        """Return the public keys of the nodes that may connect, by name, in the order of the clients."""
        return _node_keys(self.keys)

    def folder(self, name: str) -> Path:
        return self.path / "nodes" / name

    def expiry(self) -> datetime:
        return certificates.expiry(self.certificate)

    def command(self) -> list[str]:
        """Return the plain command that starts the server."""
        server = self.path / "server"
        return [
            *(sys.executable, "-m", "fedprophet.deploy.superlink"),
            *("--registered", str(self.keys)),
            *("--ssl-certfile", str(self.certificate)),
            *("--ssl-keyfile", str(server / "server.key")),
            *("--ssl-ca-certfile", str(self.authority)),
            "--enable-supernode-auth",
            "--disable-runtime-dependency-installation",
            *("--database", str(server / "state.db")),
            *("--host", self.file.listen),
            *("--port", str(self.file.port)),
        ]


def client_of(name: str) -> int:
    return int(name.removeprefix("node-"))


def clients_of_keys(keys: Path) -> dict[bytes, int]:
    """Return which client each public key in a folder belongs to, by the key as the server knows it.

    A folder or key that cannot be read is an error: it must not make a node another client.
    """
    return {key: client_of(path.stem) for key, path in by_key(_node_keys(keys).values()).items()}


def _node_keys(keys: Path) -> dict[str, Path]:
    try:
        found = {path.stem: path for path in keys.iterdir() if path.suffix == ".pub" and _NODE.fullmatch(path.stem)}
    except OSError as error:
        raise DeployError(f"cannot read {keys}, the folder of the nodes' public keys: {error.strerror}") from None
    return {name: found[name] for name in sorted(found, key=client_of)}


def open_pilot(path: Path) -> Pilot:
    """Open a pilot's folder; raise DeployError if it is not one."""
    path = path.absolute()
    missing = f"{path} is not a pilot's folder; fedprophet deploy init makes one"
    return Pilot(path, read_settings(path / PILOT, PilotFile, missing))


def check_server(pilot: Pilot) -> None:
    """Raise DeployError if no node could trust the server, or no node may connect."""
    certificates.check_private(pilot.path / "server" / "server.key")
    certificates.check_issued(pilot.certificate, pilot.authority)
    if pilot.expiry() <= datetime.now(UTC):
        text = f"Renew it: fedprophet deploy renew {pilot.typed}"
        raise DeployError(f"the server's certificate expired on {pilot.expiry():%Y-%m-%d}. {text}")
    if not pilot.nodes():
        text = f"Add a node: fedprophet deploy add-node {pilot.typed}"
        raise DeployError(f"{pilot.keys} holds no key: no node may connect. {text}")


# Making --------------------------------------------------------------------------------------------------------------


def pilot_config(source: str | None, overrides: Sequence[str], nodes: int) -> Config:
    """Return a run's configuration for some devices; `overrides` may ask for more clients, to be added later."""
    chosen = [text for text in overrides if text.partition("=")[0].strip() == "method"]
    counts = load_config(source, chosen).client_counts()
    fitted = [f"{key}={min(count, nodes)}" for key, count in counts.items()]
    config = load_config(source, [f"population.clients={nodes}", *fitted, *overrides])
    if config.population.clients < nodes:
        given = f"population.clients is {config.population.clients}, for {nodes} nodes"
        raise ConfigError(f"{given}. Leave it out or set it to {nodes} or more; --nodes N makes fewer nodes")
    check_names(config)
    return config


def check_names(config: Config) -> None:
    """Raise ConfigError for a model or data that only Python can pass in: nodes know what the configuration names."""
    if CUSTOM in (config.model.name, config.data.name):
        raise ConfigError("a run on Flower's nodes needs a model and data that the configuration names")


def make_pilot(path: Path, config: Config, file: PilotFile, nodes: int, days: int = certificates.SERVER_DAYS) -> Pilot:
    """Write a pilot's folder; after an error nothing of it is left."""
    for host in (file.server, *file.names):
        certificates.general_name(host)
    try:
        pilot = Pilot(path.resolve(), file)
        existed = pilot.path.exists()
        if existed and (not pilot.path.is_dir() or any(pilot.path.iterdir())):
            raise ConfigError(f"{path} is not an empty folder. Give another one: keys in use are never overwritten")
        pilot.path.parent.mkdir(parents=True, exist_ok=True)
        pilot.path.mkdir(mode=0o700, exist_ok=True)
        try:
            _fill(pilot, config, nodes, days)
        except BaseException:
            _empty(pilot.path, remove=not existed)
            raise
    except (OSError, RuntimeError) as error:  # a loop of links is a RuntimeError
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"cannot make {path}: {reason}. Give another folder") from None
    return pilot


def _empty(folder: Path, remove: bool) -> None:
    """Empty a folder that could not be filled; an existing one stays, for a shell may be in it."""
    for child in folder.iterdir():
        if child.is_dir():
            shutil.rmtree(child, ignore_errors=True)
        else:
            child.unlink()
    if remove:
        folder.rmdir()


def _fill(pilot: Pilot, config: Config, nodes: int, days: int) -> None:
    authority = certificates.make_authority(f"FedProphet pilot at {pilot.file.server}")
    for folder in ("app", "ca", "server/keys", "server/flower", "nodes", "runs"):
        (pilot.path / folder).mkdir(parents=True)
    (pilot.path / "ca").chmod(0o700)
    write_atomic(pilot.authority, authority.certificate)
    certificates.write_private(pilot.path / "ca" / "ca.key", authority.key)
    renew(pilot, days)
    for client in range(nodes):
        _write_node(pilot, client, None)
    _write_script(pilot.path / "server" / "start.sh", page.SERVER_START)
    texts = {
        "config.toml": to_toml(config, comments=True),
        "app/pyproject.toml": page.app_text(),
        "README.md": page.readme_text(pilot, config, nodes),
        ".gitignore": page.IGNORED,
        PILOT: as_toml(pilot.file, comments=True),  # the last one: without it the folder is not a pilot's
    }
    for name, text in texts.items():
        write_atomic(pilot.path / name, text.encode())


def renew(pilot: Pilot, days: int) -> datetime:
    """Write a new server certificate of the same authority and return when it expires; nodes need no change."""
    authority = certificates.Pair(_read(pilot.authority), _read(pilot.path / "ca" / "ca.key"))
    pair = certificates.make_server(authority, [pilot.file.server, *pilot.file.names], days)
    # If this stops between the two, the next start reports that they do not match.
    certificates.write_private(pilot.path / "server" / "server.key", pair.key)
    write_atomic(pilot.certificate, pair.certificate)
    return pilot.expiry()


def add_node(pilot: Pilot, client: int | None = None, public_key: Path | None = None) -> str:
    """Make a folder for one more node and let its key connect; return its name.

    Without `client` it is the first one without a node. With a `public_key` the private key stays where it was made.
    """
    taken = {client_of(name) for name in pilot.nodes()}
    chosen = next(number for number in range(len(taken) + 1) if number not in taken) if client is None else client
    name = f"node-{chosen}"
    if chosen in taken:
        text = f"To give it another key, remove it first: fedprophet deploy remove-node {pilot.typed} {name}"
        raise ConfigError(f"client {chosen} already has a node, {name}. {text}")
    if pilot.folder(name).exists():
        raise ConfigError(f"{pilot.folder(name)} still exists. Move or delete it, then try again")
    _write_node(pilot, chosen, public_key)
    return name


def remove_node(pilot: Pilot, name: str) -> bytes:
    """Refuse a node from the server's next start; return its key as a running server knows it."""
    nodes = pilot.nodes()
    if name not in nodes:
        raise ConfigError(unknown("node", name, nodes))
    key = registered_form(nodes[name])
    removed = pilot.path / "server" / "removed"
    removed.mkdir(exist_ok=True)
    nodes[name].replace(removed / f"{name}-{datetime.now(UTC):%Y%m%d%H%M%S}.pub")
    return key


def raise_clients(pilot: Pilot, clients: int) -> bool:
    """Raise population.clients in config.toml to at least this number; return whether it had to be changed."""
    if load_config(pilot.config).population.clients >= clients:
        return False
    document = tomlkit.parse(pilot.config.read_text("utf-8"))
    document.setdefault("population", tomlkit.table())["clients"] = clients
    write_atomic(pilot.config, tomlkit.dumps(document).encode())
    if load_config(pilot.config).population.clients < clients:  # a [methods] table overrides it
        raise ConfigError(f"set population.clients in {pilot.config} to at least {clients}, for the new node")
    return True


def _write_node(pilot: Pilot, client: int, public_key: Path | None) -> None:
    name = f"node-{client}"
    if public_key is not None:
        there = by_key(pilot.nodes().values()).get(registered_form(public_key))
        if there is not None:
            raise DeployError(f"{public_key} is already the key of {there.stem}, but a node is one client. {HOW}")
    file = node.NodeFile(server=pilot.file.address, client=client, port=node.port_of(client))
    folder = pilot.folder(name)
    folder.mkdir(mode=0o700)
    try:
        write_atomic(folder / node.FILE, as_toml(file, comments=True).encode())
        write_atomic(folder / node.AUTHORITY, _read(pilot.authority))
        _write_script(folder / node.START, node.START_TEXT)
        if public_key is None:
            pair = make_key_pair(name)
            certificates.write_private(folder / node.KEY, pair.private)
        write_atomic(pilot.keys / f"{name}.pub", pair.public if public_key is None else _read(public_key))
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)  # it would be in the way of the next attempt
        raise


def _write_script(path: Path, text: str) -> None:
    write_atomic(path, text.encode())
    path.chmod(0o755)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DeployError(f"cannot read {path}: {error.strerror}") from None


# Flower's own configuration ------------------------------------------------------------------------------------------


def write_connection(pilot: Pilot) -> None:
    """Tell Flower's command line where the server is. Paths must be absolute, so this is written before each use."""
    connection = {"address": pilot.file.here, "root-certificates": str(pilot.authority)}
    table = {"superlink": {"default": CONNECTION, CONNECTION: connection}}
    write_atomic(pilot.flower / "config.toml", tomlkit.dumps(table).encode())


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"  # only an IPv6 address has colons


def listen_address(server: str) -> str:
    """Return where a server of this name listens: on loopback only if its name is a loopback address."""
    if server == "localhost":
        return "127.0.0.1"
    with suppress(ValueError):
        address = ipaddress.ip_address(server)
        if address.is_loopback:
            return server
        return "::" if address.version == 6 else "0.0.0.0"
    return "0.0.0.0"
