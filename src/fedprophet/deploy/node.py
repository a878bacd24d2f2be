"""One device's folder: what it is in the pilot, its key, and the command that connects it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from fedprophet.config.config import Section
from fedprophet.deploy import DeployError
from fedprophet.deploy.certificates import check_private
from fedprophet.deploy.tables import read_settings
from fedprophet.errors import ConfigError
from fedprophet.settings.describe import Allowed, as_toml
from fedprophet.sizes import parse_size

FILE, AUTHORITY, KEY, START = "node.toml", "ca.pem", "node.key", "start.sh"
FIRST_PORT = 9094
"""Flower's own for a node. Nodes on one machine need one each, so the next node's is the next."""
LAST_PORT = 65535
START_TEXT = """\
#!/bin/sh
# Connects this device to the server; node.toml says how.
exec fedprophet deploy node "$(dirname "$0")"
"""


def _check_memory(value: int | str) -> int | str:
    if value != "":
        try:
            parse_size(value)
        except ConfigError as error:
            raise ValueError(str(error)) from None
    return value


Memory = Annotated[
    int | str,
    AfterValidator(_check_memory),
    Allowed("text or integer", 'a size such as "512MB", "2GiB" or a number of bytes; "": what is free'),
]


class NodeFile(Section):
    """What one device is in the pilot."""

    server: str = Field(description="The server's host:port. The host must be a name in its certificate.")
    client: int = Field(ge=0, description="Which client of the run the device is: 0 to population.clients − 1.")
    port: int = Field(
        default=FIRST_PORT,
        ge=1,
        le=LAST_PORT,
        description="For the node's own processes, on loopback. Nodes on one machine need different ones.",
    )
    home: str = Field(
        default="home",
        description="Where the device keeps its own layers, its cache of modules and what was measured of the machine; "
        "relative to this folder.",
    )
    memory: Memory = Field(
        default="",
        description='Memory for training; "": what is free at the time, of the machine and of its control group.',
    )
    flops: float = Field(default=0.0, ge=0, description="FLOP/s of training; 0: measured once.")
    bandwidth: float = Field(default=0.0, ge=0, description="Bytes/s to and from the storage; 0: measured once.")
    threads: int = Field(default=0, ge=0, le=1024, description="CPU cores for training; 0: torch's own number.")
    data_root: str = Field(
        default="", description='Where the data is on this device, relative to this folder; "": the run\'s data.root.'
    )
    shard: Literal["run", "own"] = Field(
        default="run", description='"run": this client\'s shard of the run\'s dataset; "own": all that is in data_root.'
    )


@dataclass(frozen=True)
class Node:
    """A device's folder, read."""

    path: Path
    file: NodeFile

    @property
    def home(self) -> Path:
        """Where the device keeps its state."""
        return self._place(self.file.home)

    def settings(self) -> dict[str, str | int | float]:
        """Return what the client's process is told, under the names that it reads."""
        file = self.file
        return {
            "partition-id": file.client,
            "home": str(self.home),
            **({"memory": parse_size(file.memory)} if file.memory != "" else {}),
            **({"flops": file.flops} if file.flops else {}),
            **({"bandwidth": file.bandwidth} if file.bandwidth else {}),
            **({"threads": file.threads} if file.threads else {}),
            **({"data-root": str(self._place(file.data_root))} if file.data_root else {}),
            **({"shard": file.shard} if file.shard == "own" else {}),
        }

    def command(self) -> list[str]:
        """Return the plain Flower command that connects the device."""
        return [
            "flower-supernode",
            *("--superlink", self.file.server),
            *("--root-certificates", str(self.path / AUTHORITY)),
            *("--auth-supernode-private-key", str(self.path / KEY)),
            *("--host", "127.0.0.1"),
            *("--port", str(self.file.port)),
            *("--node-config", as_settings(self.settings())),
        ]

    def _place(self, text: str) -> Path:
        return self.path / Path(text).expanduser()


def port_of(client: int) -> int:
    """Return the port of a client's node: the next one's is the next, and after the last comes the first again."""
    return FIRST_PORT + client % (LAST_PORT + 1 - FIRST_PORT)


def open_node(path: Path) -> Node:
    """Read a device's folder; a sentence where something in it is missing or does not fit."""
    path = path.absolute()
    node = Node(path, read_settings(path / FILE, NodeFile, f"{path} is no node's folder"))
    check_private(path / KEY)
    if not (path / AUTHORITY).is_file():
        raise DeployError(
            f"{path / AUTHORITY} is missing. Copy ca/ca.pem of the pilot there: the server is known by it"
        )
    return node


def node_text(file: NodeFile) -> str:
    """Return a node.toml with the meaning of every key above it."""
    return as_toml(file, comments=True)


def as_settings(settings: dict[str, str | int | float]) -> str:
    """Return settings as Flower's command line reads them: key=value, texts in quotes, without escapes."""
    return " ".join(f"{key}={_setting(key, value)}" for key, value in settings.items())


def _setting(key: str, value: str | int | float) -> str:
    if not isinstance(value, str):
        return repr(value)
    plain = value.isprintable()
    for quote, forbidden in (('"', '"\\'), ("'", "'")):
        if plain and not any(character in value for character in forbidden):
            return f"{quote}{value}{quote}"
    raise ConfigError(f"{key}: Flower cannot be given {value!r}. Use a path without quotes and special characters")
