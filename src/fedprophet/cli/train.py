"""`fedprophet train`: start a run, or go on with one."""

import json
import signal
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedprophet.config.config import load_config
from fedprophet.display.progress import closing_table, observer_for
from fedprophet.errors import ConfigError
from fedprophet.runs.run import Run, play, reopen, start


def train_command(
    preset: Annotated[str | None, typer.Argument(help="A preset's name or a TOML file. Default: digits.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one key; may be repeated.")
    ] = None,
    method: Annotated[str | None, typer.Option(help="Short for --set method=…; fedprophet methods lists them.")] = None,
    engine: Annotated[
        str | None, typer.Option(help="Short for --set engine=…: auto, plain, workers, cuda or flower-sim.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder. Default: runs/NAME here.")] = None,
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="Go on with a run that was stopped.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the closing summary as JSON.")] = False,
) -> None:
    """Train a robust model with a fleet of memory-poor clients.

    Without arguments it trains on scikit-learn's digits, in under three minutes on two cores.

    Examples:

      fedprophet train

      fedprophet train digits --set seed=1 --set perturbation.enabled=false --out runs/no-apa

      fedprophet train --resume runs/no-apa

      fedprophet train cifar10-balanced-small --method heterofl

      fedprophet train digits --engine flower-sim
    """
    # A polite kill is a Ctrl-C: a checkpoint is written before the process ends.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    short = [f"{key}={value}" for key, value in {"method": method, "engine": engine}.items() if value]
    run = _open(preset, [*(settings or []), *short], out, resume)
    with observer_for(Console(stderr=json_)) as observer:
        results = play(run, observer)
    if json_:
        typer.echo(json.dumps(results, indent=2))
    else:
        closing_table(results, run.files.path, Console())


def _open(preset: str | None, overrides: list[str], out: Path | None, resume: Path | None) -> Run:
    if resume is None:
        return start(load_config(preset, overrides), out)
    if preset is not None or overrides or out is not None:
        raise ConfigError("--resume goes on with a run exactly as it was started: it takes no preset, --set or --out")
    return reopen(resume)
