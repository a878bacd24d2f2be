"""A device's folder: its settings, its key, and the command that connects it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from fedprophet.deploy import DeployError
from fedprophet.deploy.certificates import check_private
from fedprophet.deploy.settings_file import read_settings
from fedprophet.errors import ConfigError
from fedprophet.settings.section import Section
from fedprophet.settings.values import Allowed
from fedprophet.sizes import parse_size

FILE, AUTHORITY, KEY, START = "node.toml", "ca.pem", "node.key", "start.sh"
FIRST_PORT = 9094
"""Flower's default for a node. Nodes on one machine need different ports, so the next node gets the next port."""
LAST_PORT = 65535
START_TEXT = """\
#!/bin/sh
# Connects this device to the server. The settings are in node.toml.
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
    Allowed("text or integer", 'a size such as "512MB", "2GiB" or a number of bytes; "": the available memory'),
]


class NodeFile(Section):
    """The settings of one device."""

    server: str = Field(description="The server's host:port. The host must be a name in its certificate.")
    client: int = Field(ge=0, description="The number of this client in the run: 0 to population.clients − 1.")
    port: int = Field(
        default=FIRST_PORT,
        ge=1,
        le=LAST_PORT,
        description="For the node's own processes, on loopback. Nodes on one machine need different ports.",
    )
    home: str = Field(
        default="home",
        description="The folder of the client's own layers, cached modules and measurements, relative to this folder.",
    )
    memory: Memory = Field(
        default="",
        description='Memory for training; "": the memory available at the time, within the control group too.',
    )
    flops: float = Field(default=0.0, ge=0, description="FLOP/s of training; 0: measured once.")
    bandwidth: float = Field(default=0.0, ge=0, description="Bytes/s to and from the storage; 0: measured once.")
    threads: int = Field(default=0, ge=0, le=1024, description="CPU cores for training; 0: torch's own number.")
    data_root: str = Field(
        default="", description='The folder of the data, relative to this folder; "": the run\'s data.root.'
    )
    shard: Literal["run", "own"] = Field(
        default="run", description='"run": this client\'s shard of the run\'s dataset; "own": all data in data_root.'
    )


@dataclass(frozen=True)
class Node:
    """A device's folder and its settings."""

    path: Path
    file: NodeFile

    @property
    def home(self) -> Path:
        return self._place(self.file.home)

    def settings(self) -> dict[str, str | int | float]:
        """Return the settings of the client's process, under the names it reads."""
        file = self.file
        optional: dict[str, str | int | float] = {
            "memory": parse_size(file.memory) if file.memory != "" else 0,
            "flops": file.flops,
            "bandwidth": file.bandwidth,
            "threads": file.threads,
            "data-root": str(self._place(file.data_root)) if file.data_root else "",
            "shard": "own" if file.shard == "own" else "",
        }
        given = {name: value for name, value in optional.items() if value}
        return {"partition-id": file.client, "home": str(self.home), **given}

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
    """Return the port of a client's node: one after the other, starting over after the last."""
    return FIRST_PORT + client % (LAST_PORT + 1 - FIRST_PORT)


def open_node(path: Path) -> Node:
    """Read a device's folder; raise an error if something is missing or wrong."""
    path = path.absolute()
    node = Node(path, read_settings(path / FILE, NodeFile, f"{path} is not a node's folder"))
    check_private(path / KEY)
    if not (path / AUTHORITY).is_file():
        raise DeployError(f"{path / AUTHORITY} is missing. Copy ca/ca.pem of the pilot there: it identifies the server")
    return node


def as_settings(settings: dict[str, str | int | float]) -> str:
    """Return settings as Flower's command line reads them: key=value, text in quotes, without escapes."""
    return " ".join(f"{key}={_setting(key, value)}" for key, value in settings.items())


def _setting(key: str, value: str | int | float) -> str:
    if not isinstance(value, str):
        return repr(value)
    for quote, forbidden in (('"', '"\\'), ("'", "'")):
        if value.isprintable() and not set(forbidden) & set(value):
            return f"{quote}{value}{quote}"
    raise ConfigError(f"{key}: Flower cannot take {value!r}. Use a path without quotes and special characters")
