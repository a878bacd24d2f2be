"""The texts in a pilot's folder: instructions, the app for `flwr run`, start scripts."""

import shlex
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from fedprophet.config.config import Config
from fedprophet.deploy import OFFLINE, QUICK
from fedprophet.deploy.node import Node, NodeFile
from fedprophet.display.numbers import counted
from fedprophet.version import __version__

if TYPE_CHECKING:
    from fedprophet.deploy.pilot import Pilot

IGNORED = """\
# Private keys, Flower's state and runs must not be committed.
*.key
server/flower/
server/state.db*
nodes/*/home/
runs/
"""
SERVER_START = """\
#!/bin/sh
# Starts the server. The settings are in deploy.toml.
exec fedprophet deploy server "$(dirname "$0")/.."
"""

_PAGE = """\
# A FedProphet pilot

One server and {count}, method `{method}` on `{data}`. Made with FedProphet {version}. Install the same version on
every machine:

    pip install 'fedprophet[flower]=={version}'

All connections go to one port of the server: `{address}` (TCP). Nodes need no open port.

## 1. Copy each node's folder to its device

{copies}

Each holds that device's private key: copy it over a safe channel, then delete it here. Its `node.toml` says which
client the device is, how much memory it may use and where its data is. Check it on the device.

## 2. Start the server, on this machine

    fedprophet deploy server {path}

## 3. Start each node, on its device

    fedprophet deploy node node-0

A node without a key in `server/keys/` is refused. To see who is connected, on this machine:

    fedprophet deploy status {path}

## 4. Start the run, on this machine

    fedprophet deploy run {path}

It writes to `runs/`, as `fedprophet train` does. Ctrl-C stops the output, not the run: `fedprophet deploy logs` shows
the output again, `fedprophet deploy stop` ends the run. After a stop, or if the server or its machine went down, start
the server again and resume from the last round:

    fedprophet deploy run {path} --resume

The configuration is in `config.toml`; changes apply to the next run.

## Later

    fedprophet deploy add-node {path}              # one more device
    fedprophet deploy remove-node {path} node-1    # a lost device: its key is refused from now on
    fedprophet deploy renew {path}                 # the server's certificate ends on {expiry}

## What is secret

`ca/ca.key` signs servers that all nodes trust; keep it offline if you can, only `renew` needs it. `server/server.key`
stays on the server, `node.key` on its device. Anyone who can log in on the server can start runs, and a run is code on
every node.

## Without `fedprophet deploy`, for systemd and the like

The commands above only set these variables and start these programs (`--print` shows them for any node). Flower
starts its own programs by name, so this installation's programs must come first in `PATH`:

{environment}

Server:

{server}

Node, in its folder:

{node}

Do not start a bare `flower-superlink` on an address that others can reach. Flower serves its control interface on the
same port, without authentication; `fedprophet.deploy.superlink` is the same server, but its control interface answers
this machine only.
"""


def app_text() -> str:
    """Return the app's pyproject.toml, the same as for a simulation with `flwr run`."""
    return resources.files("fedprophet.flower").joinpath("app", "pyproject.toml").read_text("utf-8")


def readme_text(pilot: "Pilot", config: Config, nodes: int) -> str:
    """Return the instructions: what to start where."""
    node = Node(Path("/path/to/node-0"), NodeFile(server=pilot.file.address, client=0))
    copies = [f"scp -pr {shlex.quote(str(pilot.folder(f'node-{client}')))} DEVICE-{client}:" for client in range(nodes)]
    variables = {**OFFLINE, **QUICK, "FLWR_HOME": "/path/to/flower"}
    exports = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    return _PAGE.format(
        count=counted(nodes, "node"),
        method=config.method,
        data=config.data.name,
        version=__version__,
        address=pilot.file.address,
        path=shlex.quote(str(pilot.path)),
        copies=_block(copies),
        expiry=f"{pilot.expiry():%Y-%m-%d}",
        environment=_block([*exports, "PATH=/path/to/environment/bin:$PATH"]),
        server=_block([_wrapped(pilot.command())]),
        node=_block([_wrapped(node.command())]),
    )


def _block(lines: list[str]) -> str:
    return "\n".join(f"    {line}" for text in lines for line in text.splitlines())


def _wrapped(command: list[str]) -> str:
    """Return a command for a shell, each option on its own line."""
    text = shlex.join(command)
    return text.replace(" --", " \\\n  --")
