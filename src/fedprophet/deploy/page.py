"""The texts of a pilot's folder: the page that says what to start where, the app for `flwr run`, start scripts."""

import shlex
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from fedprophet.config.config import Config
from fedprophet.deploy import OFFLINE, QUICK
from fedprophet.deploy.node import Node, NodeFile
from fedprophet.version import __version__

if TYPE_CHECKING:
    from fedprophet.deploy.pilot import Pilot

IGNORED = """\
# Private keys, Flower's state and runs do not belong in a repository.
*.key
server/flower/
server/state.db*
nodes/*/home/
runs/
"""
SERVER_START = """\
#!/bin/sh
# Starts the server; deploy.toml says how.
exec fedprophet deploy server "$(dirname "$0")/.."
"""

_PAGE = """\
# A FedProphet pilot

One server and {count}, method `{method}` on `{data}`. Made by FedProphet {version}; install the same version
on every machine:

    pip install 'fedprophet[flower]=={version}'

Everything goes to one port of the server: `{address}` (TCP). Nodes need no open port.

## 1. Copy each node's folder to its device

{copies}

Each holds that device's own private key: copy it over a safe channel, and delete it here afterwards. Its `node.toml`
says which client the device is, how much memory it may give and where its data is. Look through it on the device.

## 2. Start the server, on this machine

    fedprophet deploy server {path}

## 3. Start each node, on its device

    fedprophet deploy node node-0

A node without a key in `server/keys/` is refused. See who is there, on this machine:

    fedprophet deploy status {path}

## 4. Start the run, on this machine

    fedprophet deploy run {path}

It writes to `runs/`, as `fedprophet train` does. Ctrl-C stops the printing, not the run: `fedprophet deploy logs` goes
on with the one, `fedprophet deploy stop` ends the other.
After a stop, or when the server or its machine went down, start the server again and go on from the last round:

    fedprophet deploy run {path} --resume

What is trained is in `config.toml`; a change of it is for the next run.

## Later

    fedprophet deploy add-node {path}              # one more device
    fedprophet deploy remove-node {path} node-1    # a device that was lost: its key is refused from now on
    fedprophet deploy renew {path}                 # the server's certificate ends on {expiry}

## What is secret

`ca/ca.key` signs servers that all nodes trust; keep it offline if you can, only `renew` needs it. `server/server.key`
stays on the server, `node.key` on its device. Whoever may log in on the server can start runs, and a run is code on
every node.

## Without `fedprophet deploy`, for systemd and the like

The commands above only set these variables and start these programs (`--print` shows them for any node). Flower
starts its own programs by their bare names, so those of this installation come first in `PATH`:

{environment}

Server:

{server}

Node, in its folder:

{node}

Do not start a bare `flower-superlink` on an address that others reach. Flower serves its control interface on the same
port and asks nobody there who they are; `fedprophet.deploy.superlink` is the same server with that part closed to all
but this machine.
"""


def app_text() -> str:
    """Return the pyproject.toml of the app, the same as that of a simulation through `flwr run`."""
    return resources.files("fedprophet.flower").joinpath("app", "pyproject.toml").read_text("utf-8")


def readme_text(pilot: "Pilot", config: Config, nodes: int, expiry: datetime) -> str:
    """Return the page that says what to start where."""
    node = Node(Path("/path/to/node-0"), NodeFile(server=pilot.file.address, client=0))
    copies = [f"scp -pr {shlex.quote(str(pilot.folder(f'node-{client}')))} DEVICE-{client}:" for client in range(nodes)]
    variables = {**OFFLINE, **QUICK, "FLWR_HOME": "/path/to/flower"}
    exports = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    return _PAGE.format(
        count="one node" if nodes == 1 else f"{nodes} nodes",
        method=config.method,
        data=config.data.name,
        version=__version__,
        address=pilot.file.address,
        path=shlex.quote(str(pilot.path)),
        copies=_block(copies),
        expiry=f"{expiry:%Y-%m-%d}",
        environment=_block([*exports, "PATH=/path/to/environment/bin:$PATH"]),
        server=_block([_wrapped(pilot.command())]),
        node=_block([_wrapped(node.command())]),
    )


def _block(lines: list[str]) -> str:
    return "\n".join(f"    {line}" for text in lines for line in text.splitlines())


def _wrapped(command: list[str]) -> str:
    """Return a command as it is typed, each option on a line of its own."""
    text = shlex.join(command)
    return text.replace(" --", " \\\n  --")
