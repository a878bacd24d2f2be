"""`fedprophet train`: start a run, or resume one."""

from pathlib import Path
from typing import Annotated

import typer

from fedprophet.cli.options import Logs, MethodName, Overrides, print_json, with_method
from fedprophet.cli.report import make_report
from fedprophet.config.choices import engines
from fedprophet.config.load import load_config
from fedprophet.console import console_on
from fedprophet.display.progress import observer_for
from fedprophet.display.summary import show_results
from fedprophet.errors import ConfigError
from fedprophet.runs.observer import Observers
from fedprophet.runs.play import play
from fedprophet.runs.run import Run, reopen, start
from fedprophet.tracking import Tracking, open_trackers


def train_command(
    preset: Annotated[str | None, typer.Argument(help="A preset's name or a TOML file. Default: digits.")] = None,
    settings: Overrides = None,
    method: MethodName = None,
    engine: Annotated[str | None, typer.Option(help=f"Short for --set engine=…: {', '.join(engines())}.")] = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder. Default: runs/NAME here.")] = None,
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="Resume a run that was stopped.")] = None,
    from_round: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="With --resume: go back to the checkpoint of round N.")
    ] = None,
    log: Logs = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the closing summary as JSON.")] = False,
) -> None:
    """Train a robust model on a fleet of clients with little memory.

    Without arguments it trains on scikit-learn's digits, in about three minutes on two cores.

    Examples:

      fedprophet train

      fedprophet train digits --set seed=1 --set perturbation.enabled=false --out runs/no-apa

      fedprophet train --resume runs/no-apa

      fedprophet train cifar10-balanced-small --method heterofl

      fedprophet train digits --engine flower-sim

      fedprophet train digits --log tensorboard
    """
    trackers = open_trackers(log or (), "--log")
    run = _open(preset, with_method(settings, method=method, engine=engine), out, resume, from_round)
    with observer_for(console_on(err=json_, lasting=True)) as display, Tracking(trackers, display.note) as tracking:
        results = play(run, Observers(display, tracking))
    if json_:
        print_json(results)
    else:
        show_results(results, run.files.path, console_on())
    make_report(run.files.path, quietly=json_)


def _open(
    preset: str | None, overrides: list[str], out: Path | None, resume: Path | None, from_round: int | None
) -> Run:
    if resume is None and from_round is not None:
        raise ConfigError("--from-round goes with --resume RUN: it says which of the run's checkpoints to go on from")
    if resume is None:
        return start(load_config(preset, overrides), out)
    if preset is not None or overrides or out is not None:
        raise ConfigError(
            "--resume continues a run exactly as it was started: leave out the preset and all other options but "
            "--from-round, --log and --json"
        )
    return reopen(resume, round=from_round)
