"""The command line. Commands raise errors; `main` alone turns them into a sentence and an exit code."""

import errno
import json
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from fedprophet.cli.bench import bench_command
from fedprophet.cli.compare import compare_command
from fedprophet.cli.config import config_app
from fedprophet.cli.data import data_app
from fedprophet.cli.deploy import deploy_app
from fedprophet.cli.evaluate import evaluate_command, export_command
from fedprophet.cli.fleet import fleet_app
from fedprophet.cli.help_text import make_plain
from fedprophet.cli.latency import latency_command
from fedprophet.cli.partition import partition_command
from fedprophet.cli.train import train_command
from fedprophet.errors import FedProphetError
from fedprophet.methods import METHODS
from fedprophet.models import MODELS
from fedprophet.runs.run import RunStoppedError
from fedprophet.version import __version__

app = typer.Typer(
    help="Federated adversarial training within a memory budget.\n\nStart with: fedprophet train",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command("train")(train_command)
app.command("evaluate")(evaluate_command)
app.command("export")(export_command)
app.command("compare")(compare_command)
app.command("partition")(partition_command)
app.command("latency")(latency_command)
app.command("bench")(bench_command)
app.add_typer(fleet_app, name="fleet")
app.add_typer(data_app, name="data")
app.add_typer(deploy_app, name="deploy")
app.add_typer(config_app, name="config")

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("methods")
def methods_command(json_: Json = False) -> None:
    """List the training methods. Example: fedprophet methods"""
    _listing({name: entry.summary for name, entry in METHODS.items()}, json_)


@app.command("models")
def models_command(json_: Json = False) -> None:
    """List the models of the registry. Example: fedprophet models"""
    _listing({name: entry.description for name, entry in MODELS.items()}, json_)


def _listing(entries: dict[str, str], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(entries, indent=2))
        return
    console, width = Console(), max(map(len, entries))
    if not console.is_terminal:
        typer.echo("\n".join(f"{name:{width}}  {text}" for name, text in entries.items()))
        return
    table = Table.grid(padding=(0, 2))
    for name, text in entries.items():
        table.add_row(name, text)
    console.print(table)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fedprophet {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="The version.")] = False,
) -> None:
    pass


make_plain(app)

_ROOM, _RIGHTS, _PATH = "Make room there", "Correct its permissions or give another folder", "Give another path"
MENDABLE = {
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EFBIG: _ROOM,
    errno.EACCES: _RIGHTS,
    errno.EPERM: _RIGHTS,
    errno.EROFS: _RIGHTS,
    errno.ENAMETOOLONG: _PATH,
    errno.ENOTDIR: _PATH,
    errno.EISDIR: _PATH,
    errno.ELOOP: _PATH,
}
"""What to do about the system's errors that are no defect of ours."""


def main() -> None:
    """Run the command line: exit code 0 for success, 2 for what the user can mend, 130 for Ctrl-C."""
    try:
        app()
    except RunStoppedError as stop:
        _say(str(stop), 130)
    except FedProphetError as error:
        _say(f"error: {error}", 2)
    except KeyboardInterrupt:
        _say("stopped", 130)
    except OSError as error:
        if error.errno not in MENDABLE:
            raise
        _say(f"error: {error.filename or 'a file'}: {error.strerror}. {MENDABLE[error.errno]}", 2)


def _say(text: str, code: int) -> None:
    print(text, file=sys.stderr)
    sys.exit(code)
