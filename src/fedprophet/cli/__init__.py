"""The command line. Commands raise errors; only `main` turns them into a sentence and an exit code."""

import errno
import sys
from collections.abc import Mapping
from io import TextIOWrapper
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from fedprophet.cli.bench import bench_command
from fedprophet.cli.compare import compare_command
from fedprophet.cli.config import config_app
from fedprophet.cli.data import data_app
from fedprophet.cli.deploy import deploy_app
from fedprophet.cli.evaluate import evaluate_command, export_command
from fedprophet.cli.fleet import fleet_app
from fedprophet.cli.help_text import use_plain_help
from fedprophet.cli.latency import latency_command
from fedprophet.cli.memory import memory_command
from fedprophet.cli.options import AsJson, print_listing, tell
from fedprophet.cli.partition import partition_command
from fedprophet.cli.report import report_command
from fedprophet.cli.reproduce import reproduce_command
from fedprophet.cli.runs import runs_app
from fedprophet.cli.stopping import stopped_once
from fedprophet.cli.train import train_command
from fedprophet.cli.watch import watch_command
from fedprophet.config.choices import engines, methods
from fedprophet.data import DATASETS
from fedprophet.errors import FedProphetError, memory_for
from fedprophet.models import MODELS
from fedprophet.runs.run import RunStoppedError
from fedprophet.server.rules import RULES
from fedprophet.version import __version__


class _Commands(TyperGroup):
    """Says that a command was stopped; typer would end it without a word."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise RunStoppedError("stopped") from None


HELP = """Federated adversarial training within a memory budget.

Start with: fedprophet train

Examples:

  fedprophet train digits --set seed=1 --out runs/first

  fedprophet train --resume runs/first

  fedprophet evaluate runs/first --attack clean,pgd20

  fedprophet compare runs/* --out comparison
"""

app = typer.Typer(
    cls=_Commands,
    help=HELP,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command("train")(train_command)
app.command("watch")(watch_command)
app.command("evaluate")(evaluate_command)
app.command("export")(export_command)
app.command("compare")(compare_command)
app.command("report")(report_command)
app.command("reproduce")(reproduce_command)
app.command("partition")(partition_command)
app.command("memory")(memory_command)
app.command("latency")(latency_command)
app.command("bench")(bench_command)
app.add_typer(runs_app, name="runs")
app.add_typer(fleet_app, name="fleet")
app.add_typer(data_app, name="data")
app.add_typer(deploy_app, name="deploy")
app.add_typer(config_app, name="config")


def _add_listing(what: str, entries: Mapping[str, str], described: str = "") -> None:
    def listing(json_: AsJson = False) -> None:
        print_listing(entries, json_)

    app.command(what, help=f"List the {described or what}. Example: fedprophet {what}")(listing)


_add_listing("methods", methods())
_add_listing("models", {name: entry.help for name, entry in MODELS.items()})
_add_listing("datasets", {name: entry.help for name, entry in sorted(DATASETS.items())})
_add_listing("engines", engines())
_add_listing("rules", {name: entry.help for name, entry in sorted(RULES.items())}, "rules of aggregation")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fedprophet {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


use_plain_help(app)

SYSTEM_ADVICE = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "Free some space there"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "Correct its permissions or give another folder"),
    **dict.fromkeys((errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP), "Give another path"),
}
"""What to do about errors of the system that are not defects of the program."""


def main() -> None:
    """Run the command line. Exit code 0: success; 2: an error that the user can correct; 130: Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")  # names of files need not be text
    with stopped_once():
        _run()


def _run() -> None:
    try:
        with memory_for("the command was carried out", "Use a smaller model, smaller batches or fewer clients"):
            app()
    except (RunStoppedError, KeyboardInterrupt) as stop:
        _exit(str(stop) or "stopped", 130)
    except FedProphetError as error:
        _exit(f"error: {error}", 2)
    except OSError as error:
        if error.errno not in SYSTEM_ADVICE:
            raise
        _exit(f"error: {error.filename or 'a file'}: {error.strerror}. {SYSTEM_ADVICE[error.errno]}", 2)


def _exit(text: str, code: int) -> None:
    tell(text, err=True)
    sys.exit(code)
