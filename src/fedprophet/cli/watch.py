"""`fedprophet watch`: a run in progress, seen from its folder."""

import json
import shlex
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from fedprophet.cli.options import print_json, tell
from fedprophet.console import console_on
from fedprophet.display.lines import say
from fedprophet.display.progress import headline, lines_of
from fedprophet.display.summary import show_finished
from fedprophet.display.watch import Picture, document, played, state_lines, state_text
from fedprophet.errors import ConfigError, TrainingError
from fedprophet.report.serve import serve as serve_report
from fedprophet.runs.files import RunFiles
from fedprophet.runs.watched import Look, WatchedRun

SECONDS = 1.0
"""How long it waits between two looks."""
SECONDS_TO_BEGIN = 60
"""For so long it waits for a run whose folder is not there yet."""
DRAWN_AGAIN = 5
"""After so many looks a picture is drawn again although nothing is new: it says since when."""


def watch_command(
    run: Annotated[Path, typer.Argument(help="The run's folder.")],
    once: Annotated[bool, typer.Option("--once", help="Show the run as it is now, and end.")] = False,
    serve: Annotated[
        bool, typer.Option("--serve", help="Serve the run's report to a browser on this machine, until Ctrl-C.")
    ] = False,
    port: Annotated[
        int | None, typer.Option(help="The port for --serve; default: any that is free.", min=0, max=65535)
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON, one document a line for each new round.")] = False,
) -> None:
    """Show a run that is being trained, by this machine or another: how far it is, and its accuracies over rounds.

    It only reads the run's folder, needs no data, and ends when the run is finished. Ctrl-C ends it; the run goes on.
    Without a terminal it prints a line for each new round, and ends with code 2 if the run was stopped.

    Examples:

      fedprophet watch runs/digits-fedprophet-1

      fedprophet watch runs/digits-fedprophet-1 --serve --port 8080

      fedprophet watch runs/digits-fedprophet-1 --once --json
    """
    if port is not None and not serve:
        raise ConfigError("--port goes with --serve: it says where the report is served")
    if serve and (once or json_):
        raise ConfigError("--serve shows the run in a browser: leave out --once and --json")
    console = console_on()
    try:
        watched = WatchedRun(run) if once else _begun(run)
        if serve:
            _serve(run, port or 0)
        elif once:
            _show_once(watched, console, json_)
        elif json_:
            _print_documents(watched)
        elif console.is_terminal:
            _draw(watched, console)
        else:
            _print_lines(watched, console)
    except KeyboardInterrupt:
        again = f"fedprophet watch {shlex.quote(str(run))}" + " --serve" * serve
        tell(f"the run is left as it is. Show it again with: {again}", err=True)
        raise typer.Exit(130) from None


def _begun(run: Path) -> WatchedRun:
    """Return a run, or wait a while for it: a process that was just started takes some seconds to write its folder."""
    if run.exists() and not run.is_dir():
        raise ConfigError(f"{run} is a file. Give the folder of a run")
    if not RunFiles(run).config.exists():
        tell(f"there is no run in {run} yet: waiting for it, at most {SECONDS_TO_BEGIN} seconds", err=True)
    for _ in range(SECONDS_TO_BEGIN):
        if RunFiles(run).config.exists():
            break
        time.sleep(SECONDS)
    return WatchedRun(run)


def _serve(run: Path, port: int) -> None:
    with serve_report([run], port=port) as server:
        tell(f"{server.url} shows {run}, and goes on to show it when it is finished. Ctrl-C ends this.")
        server.wait()


def _looks(watched: WatchedRun) -> Iterator[Look]:
    """Yield looks at a run, the last one when it is finished."""
    while (look := watched.look()).state != "finished":
        yield look
        time.sleep(SECONDS)
    yield look


def _show_once(watched: WatchedRun, console: Console, as_json: bool) -> None:
    look, path = watched.look(), watched.files.path
    if as_json:
        print_json(document(look, path))
    elif look.state == "finished":
        show_finished(path, console)
    elif console.is_terminal:
        console.print(Picture(look, path))
    else:
        for line in state_lines(look, path):
            say(console, line)


def _draw(watched: WatchedRun, console: Console) -> None:
    """Draw a picture again and again; of a run that was stopped, too, for it may be resumed."""
    path, drawn = watched.files.path, None
    with Live(console=console, auto_refresh=False) as live:
        for number, look in enumerate(_looks(watched)):
            if drawn != (look.round, look.state) or number % DRAWN_AGAIN == 0:
                live.update(Picture(look, path), refresh=True)
            drawn = look.round, look.state
    show_finished(path, console)


def _print_lines(watched: WatchedRun, console: Console) -> None:
    """Print a line for the newest round, and for each that comes."""
    path, shown = watched.files.path, None
    for look in _looks(watched):
        if shown is None:
            if look.round or look.state != "stopped":  # of one that never began, its end says all
                say(console, headline(look.outline, path) if look.round else state_text(look, path))
            shown = max(look.round - 1, 0)
        if look.round < shown:
            say(console, f"the run went back to round {look.round}")
            shown = look.round
        for record, seconds, progress in played(look):
            for line in lines_of(record, seconds, progress) if record["round"] > shown else ():
                say(console, line)
        shown = look.round
        _expect_progress(look, path)
    show_finished(path, console)


def _print_documents(watched: WatchedRun) -> None:
    """Print a document of the run as it is, and one for each round that comes."""
    path, shown, state = watched.files.path, None, None
    for look in _looks(watched):
        first = look.round if shown is None else shown + 1
        rounds = [number for number in range(len(look.records)) if look.records[number]["round"] >= first]
        for number in rounds:
            typer.echo(json.dumps(document(replace(look, records=look.records[: number + 1]), path)))
        if not rounds and look.state != state:
            typer.echo(json.dumps(document(look, path)))
        shown, state = look.round, look.state
        _expect_progress(look, path)


def _expect_progress(look: Look, path: Path) -> None:
    """End where nobody reads that a run was stopped."""
    if look.state == "stopped":
        raise TrainingError(f"{path}: {state_text(look, path)}")
