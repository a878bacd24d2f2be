"""A pilot's folder on the server: configuration, certificates, registered keys, the nodes' folders, runs.

config.toml  deploy.toml  README.md
app/         what `flwr run` sends to the server and the nodes: names, no code, no keys
ca/          the authority: ca.pem for everybody, ca.key for nobody
server/      certificate and key, keys/ with the public keys that may connect, Flower's state
nodes/       one folder for each device, to be copied there whole
runs/        one folder for each run, as `fedprophet train` writes it
"""

import ipaddress
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from pydantic import Field

from fedprophet.config.config import Config, Section, load_config, to_toml
from fedprophet.data import find_dataset
from fedprophet.deploy import DeployError, certificates, node, page
from fedprophet.deploy.keys import HOW, by_key, make_key_pair, registered_form
from fedprophet.deploy.tables import read_settings
from fedprophet.errors import ConfigError, FedProphetError, unknown
from fedprophet.methods import find_method
from fedprophet.models import MODELS
from fedprophet.settings.describe import Allowed, as_toml
from fedprophet.settings.toml import toml_value
from fedprophet.storage.files import PILOT, write_atomic

PORT = 9092
CONNECTION = "pilot"
"""The server's name in Flower's own configuration."""
_NODE = re.compile(r"node-(0|[1-9][0-9]*)")
Hosts = Annotated[list[str], Allowed("list", 'a list of names and addresses, such as ["10.0.0.1"]')]


class PilotFile(Section):
    """What the commands of `fedprophet deploy` need to know of this pilot."""

    server: str = Field(description="The name or address by which the nodes reach the server.")
    names: Hosts = Field(default_factory=list, description="Other names of the server, in its certificate too.")
    port: int = Field(default=PORT, ge=1, le=65535, description="The server's port, the only one that nodes need.")
    listen: str = Field(default="0.0.0.0", description="The address at which the server listens.")

    @property
    def address(self) -> str:
        """Where nodes find the server: host:port."""
        return _joined(self.server, self.port)

    @property
    def here(self) -> str:
        """Where this machine finds the server: over loopback if it listens there."""
        loopback = {"0.0.0.0": "127.0.0.1", "::": "::1"}
        return _joined(loopback.get(self.listen, self.listen), self.port)


@dataclass(frozen=True)
class Pilot:
    """A pilot's folder and what its deploy.toml says."""

    path: Path
    file: PilotFile

    @property
    def config(self) -> Path:
        """The configuration of the next run."""
        return self.path / "config.toml"

    @property
    def authority(self) -> Path:
        """The certificate that everybody in the pilot trusts."""
        return self.path / "ca" / "ca.pem"

    @property
    def certificate(self) -> Path:
        """The server's certificate."""
        return self.path / "server" / "server.pem"

    @property
    def keys(self) -> Path:
        """The public keys of those who may connect: NODE.pub."""
        return self.path / "server" / "keys"

    @property
    def flower(self) -> Path:
        """Flower's own files on the server."""
        return self.path / "server" / "flower"

    @property
    def runs(self) -> Path:
        """The runs, one folder each."""
        return self.path / "runs"

    def nodes(self) -> dict[str, Path]:
        """Return the public keys of those who may connect, by the node's name, in the order of the clients."""
        return _node_keys(self.keys)

    def folder(self, name: str) -> Path:
        """Return where a node's folder was made."""
        return self.path / "nodes" / name

    def expiry(self) -> datetime:
        """Return when the server's certificate ends."""
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
    """Return which client a node is, from its name."""
    return int(name.removeprefix("node-"))


def clients_of_keys(keys: Path) -> dict[bytes, int]:
    """Return which client each public key in a folder was made for, by the key as the server knows it.

    A folder or a key that cannot be read is a sentence: who a node is must not depend on what happens to be there.
    """
    return {key: client_of(path.stem) for key, path in by_key(_node_keys(keys).values()).items()}


def _node_keys(keys: Path) -> dict[str, Path]:
    try:
        found = {path.stem: path for path in keys.iterdir() if path.suffix == ".pub" and _NODE.fullmatch(path.stem)}
    except OSError as error:
        raise DeployError(f"cannot read {keys}, the folder of the nodes' public keys: {error.strerror}") from None
    return {name: found[name] for name in sorted(found, key=client_of)}


def open_pilot(path: Path) -> Pilot:
    """Open a pilot's folder; a sentence where it is none."""
    path = path.absolute()
    otherwise = f"{path} is no pilot's folder; fedprophet deploy init makes one"
    return Pilot(path, read_settings(path / PILOT, PilotFile, otherwise))


def check_server(pilot: Pilot) -> None:
    """Refuse to start a server that no node could trust, or that would trust no node."""
    certificates.check_private(pilot.path / "server" / "server.key")
    certificates.check_issued(pilot.certificate, pilot.authority)
    if pilot.expiry() <= datetime.now(UTC):
        text = f"Do: fedprophet deploy renew {pilot.path}"
        raise DeployError(f"the server's certificate ended on {pilot.expiry():%Y-%m-%d}. {text}")
    if not pilot.nodes():
        raise DeployError(f"{pilot.keys} holds no key: nobody may connect. Do: fedprophet deploy add-node {pilot.path}")


# Making --------------------------------------------------------------------------------------------------------------


def pilot_config(source: str | None, overrides: Sequence[str], nodes: int) -> Config:
    """Return a run's configuration for so many devices; `overrides` may ask for more clients, to be added later."""
    chosen = [text for text in overrides if text.partition("=")[0].strip() == "method"]
    plain = load_config(source, chosen)
    counts = {
        "population.cohort": plain.population.cohort,
        "evaluate.clients": plain.evaluate.clients,
        "measure.clients": plain.measure.clients,
    }
    fitted = [f"{key}={min(count, nodes)}" for key, count in counts.items() if isinstance(count, int)]
    config = load_config(source, [f"population.clients={nodes}", *fitted, *overrides])
    if config.population.clients < nodes:
        given = f"population.clients is {config.population.clients}, for {nodes} nodes"
        raise ConfigError(f"{given}. Leave it out or set it to {nodes} or more; --nodes N makes fewer nodes")
    check_names(config)
    return config


def check_names(config: Config) -> None:
    """Refuse a method, a model or data that nobody knows: the server would find out only when the run starts."""
    find_method(config.method)
    find_dataset(config.data.name)
    if config.model.name not in MODELS:
        raise ConfigError(unknown("model", config.model.name, MODELS))


def make_pilot(path: Path, config: Config, file: PilotFile, nodes: int, days: int = certificates.SERVER_DAYS) -> Pilot:
    """Write a pilot's folder; it is there whole or not at all."""
    for host in (file.server, *file.names):
        certificates.general_name(host)
    with _about(path):
        whole = path.resolve()
        if whole.exists() and (not whole.is_dir() or any(whole.iterdir())):
            raise ConfigError(f"{path} is not an empty folder. Give another one: keys in use are never written over")
        # A folder that is there stays the same one: a shell may stand in it, and its parent may be somebody else's.
        parent = whole if whole.exists() else whole.parent
        parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{whole.name}-", dir=parent))
        try:
            _fill(Pilot(temporary, file), config, nodes, days, Pilot(whole, file))
            _put(temporary, whole)
        except BaseException as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if isinstance(error, FedProphetError):
                raise type(error)(str(error).replace(str(temporary), str(path))) from None
            raise
    return Pilot(whole, file)


@contextmanager
def _about(path: Path) -> Iterator[None]:
    """Let an error of the system be a sentence about the folder that was asked for."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # a circle of links is a RuntimeError
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"cannot make {path}: {reason}. Give another folder") from None


def _put(temporary: Path, path: Path) -> None:
    """Put a filled folder where it belongs; into a folder that is there, its file deploy.toml comes last."""
    if not path.exists():
        temporary.replace(path)
        return
    names = sorted((child.name for child in temporary.iterdir()), key=PILOT.__eq__)
    try:
        for name in names:
            (temporary / name).replace(path / name)
        temporary.rmdir()
    except BaseException:
        for name in names:
            if not (temporary / name).exists():
                (path / name).replace(temporary / name)
        raise


def _fill(pilot: Pilot, config: Config, nodes: int, days: int, final: Pilot) -> None:
    authority = certificates.make_authority(f"FedProphet pilot at {pilot.file.server}")
    for folder in ("app", "ca", "server/keys", "server/flower", "nodes", "runs"):
        (pilot.path / folder).mkdir(parents=True)
    (pilot.path / "ca").chmod(0o700)
    write_atomic(pilot.authority, authority.certificate)
    certificates.write_private(pilot.path / "ca" / "ca.key", authority.key)
    renew(pilot, days)
    for client in range(nodes):
        _write_node(pilot, client, None)
    texts = {
        PILOT: as_toml(pilot.file, comments=True),
        "config.toml": to_toml(config, comments=True),
        "app/pyproject.toml": page.app_text(),
        "README.md": page.readme_text(final, config, nodes, pilot.expiry()),
        ".gitignore": page.IGNORED,
    }
    for name, text in texts.items():
        write_atomic(pilot.path / name, text.encode())
    _write_script(pilot.path / "server" / "start.sh", page.SERVER_START)


def renew(pilot: Pilot, days: int) -> datetime:
    """Write a new server certificate of the same authority, and return when it ends; the nodes need nothing new."""
    authority = certificates.Pair(_read(pilot.authority), _read(pilot.path / "ca" / "ca.key"))
    pair = certificates.make_server(authority, [pilot.file.server, *pilot.file.names], days)
    # Should it stop between the two, a certificate without its key is told at the next start and renewed once more.
    certificates.write_private(pilot.path / "server" / "server.key", pair.key)
    write_atomic(pilot.certificate, pair.certificate)
    return pilot.expiry()


def add_node(pilot: Pilot, client: int | None = None, public_key: Path | None = None) -> str:
    """Make one more node's folder and let its key connect; return its name.

    Without `client` it is the first that has no node. With a `public_key` the private one stays where it was made.
    """
    taken = {client_of(name) for name in pilot.nodes()}
    chosen = next(number for number in range(len(taken) + 1) if number not in taken) if client is None else client
    name = f"node-{chosen}"
    if chosen in taken:
        text = f"To give it another key, remove it first: fedprophet deploy remove-node {pilot.path} {name}"
        raise ConfigError(f"client {chosen} has a node already, {name}. {text}")
    if pilot.folder(name).exists():
        raise ConfigError(f"{pilot.folder(name)} is still there. Move it away or delete it, then try again")
    _write_node(pilot, chosen, public_key)
    return name


def remove_node(pilot: Pilot, name: str) -> bytes:
    """Refuse a node from the server's next start on; return its key as the running server knows it."""
    nodes = pilot.nodes()
    if name not in nodes:
        raise ConfigError(f"{unknown('node', name, nodes)}")
    key = registered_form(nodes[name])
    removed = pilot.path / "server" / "removed"
    removed.mkdir(exist_ok=True)
    nodes[name].replace(removed / f"{name}-{datetime.now(UTC):%Y%m%d%H%M%S}.pub")
    return key


def raise_clients(pilot: Pilot, clients: int) -> bool:
    """Let the next run have at least so many clients; return whether config.toml had to be changed for that."""
    if load_config(pilot.config).population.clients >= clients:
        return False
    section, lines = "", pilot.config.read_text("utf-8").splitlines()
    for number, line in enumerate(lines):
        section = line.strip() if line.strip().startswith("[") else section
        if section == "[population]" and re.fullmatch(r"\s*clients\s*=\s*[0-9]+\s*", line):
            lines[number] = f"clients = {clients}"
    text = "\n".join(lines) + "\n"
    write_atomic(pilot.config, text.encode())
    if load_config(pilot.config).population.clients < clients:
        raise ConfigError(f"set population.clients in {pilot.config} to at least {clients}: the new node is one more")
    return True


def _write_node(pilot: Pilot, client: int, public_key: Path | None) -> None:
    name = f"node-{client}"
    if public_key is not None:
        there = by_key(pilot.nodes().values()).get(registered_form(public_key))
        if there is not None:
            raise DeployError(f"{public_key} is the key of {there.stem}, and a node is one client. {HOW}")
    file = node.NodeFile(server=pilot.file.address, client=client, port=node.port_of(client))
    folder = pilot.folder(name)
    folder.mkdir(mode=0o700)
    try:
        public = _fill_node(pilot, file, name, public_key)
        write_atomic(pilot.keys / f"{name}.pub", public)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)  # what is left would stand in the way of the next attempt
        raise


def _fill_node(pilot: Pilot, file: node.NodeFile, name: str, public_key: Path | None) -> bytes:
    """Write a node's folder, and return its public key."""
    folder = pilot.folder(name)
    write_atomic(folder / node.FILE, node.node_text(file).encode())
    write_atomic(folder / node.AUTHORITY, _read(pilot.authority))
    _write_script(folder / node.START, node.START_TEXT)
    if public_key is not None:
        return _read(public_key)
    pair = make_key_pair(name)
    certificates.write_private(folder / node.KEY, pair.private)
    return pair.public


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
    """Tell Flower's command line where the server is. It wants absolute paths, so this follows the folder's moves."""
    table = {"address": pilot.file.here, "root-certificates": str(pilot.authority)}
    lines = [f"{key} = {toml_value(value)}" for key, value in table.items()]
    head = f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
    write_atomic(pilot.flower / "config.toml", (head + "\n".join(lines) + "\n").encode())


def _joined(host: str, port: int) -> str:
    try:
        bracketed = ipaddress.ip_address(host).version == 6
    except ValueError:
        bracketed = False
    return f"[{host}]:{port}" if bracketed else f"{host}:{port}"


def listen_address(server: str) -> str:
    """Return where a server of this name listens: on loopback only if that is where its nodes look for it."""
    if server == "localhost":
        return "127.0.0.1"
    try:
        address = ipaddress.ip_address(server)
    except ValueError:
        return "0.0.0.0"
    if address.is_loopback:
        return server
    return "::" if address.version == 6 else "0.0.0.0"
