"""The texts in a pilot's folder: instructions, the app for `flwr run`, start scripts."""

import shlex
import textwrap
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


def app_text() -> str:
    """Return the app's pyproject.toml, the same as for a simulation with `flwr run`."""
    return resources.files("fedprophet.flower").joinpath("app", "pyproject.toml").read_text("utf-8")


def readme_text(pilot: "Pilot", config: Config, nodes: int) -> str:
    """Return the instructions: what to start where."""
    node = Node(Path("/path/to/node-0"), NodeFile(server=pilot.file.address, client=0))
    copies = [f"scp -pr {shlex.quote(str(pilot.folder(f'node-{client}')))} DEVICE-{client}:" for client in range(nodes)]
    variables = {**OFFLINE, **QUICK, "FLWR_HOME": "/path/to/flower"}
    exports = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    template = resources.files("fedprophet.deploy").joinpath("pilot_readme.md").read_text("utf-8")
    return template.format(
        count=counted(nodes, "node"),
        method=config.method,
        data=config.data.name,
        version=__version__,
        address=pilot.file.address,
        path=pilot.typed,
        copies=_block(copies),
        expiry=f"{pilot.expiry():%Y-%m-%d}",
        environment=_block([*exports, "PATH=/path/to/environment/bin:$PATH"]),
        server=_command(pilot.command()),
        node=_command(node.command()),
    )


def _block(lines: list[str]) -> str:
    return textwrap.indent("\n".join(lines), "    ")


def _command(words: list[str]) -> str:
    """Return a command for a shell, each option on its own line."""
    return _block([shlex.join(words).replace(" --", " \\\n  --")])
