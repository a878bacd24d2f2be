"""`fedprophet reproduce`: the paper's tables and figures, each by its own number."""

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from fedprophet.attacks.names import parse_attacks
from fedprophet.cli.options import Overrides, open_folder, print_json, print_result
from fedprophet.display.tables import Column, Page, Table, show
from fedprophet.errors import ConfigError, unknown
from fedprophet.report.figures import check_plots
from fedprophet.reproduce.experiment import Experiment
from fedprophet.reproduce.listing import listing, listing_page, time_left
from fedprophet.reproduce.output import Outcome, document, page, write
from fedprophet.reproduce.registry import EXPERIMENTS
from fedprophet.reproduce.runs import Setup, carry_out, check_runs, once
from fedprophet.reproduce.scales import SCALES, SMALL

ROOT = Path("reproduce")
LIST, ALL = "list", "all"


def reproduce_command(
    experiment: Annotated[
        str, typer.Argument(help=f"{LIST}, {ALL}, or one of {', '.join(EXPERIMENTS)}: the paper's own numbers.")
    ],
    scale: Annotated[
        str, typer.Option(help="; ".join(f"{name}: {entry.help}" for name, entry in SCALES.items()) + ".")
    ] = SMALL.name,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help=f"The folder. Default: {ROOT}/SCALE here.")] = None,
    settings: Overrides = None,
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="Runs of each row, with seeds 0, 1, …")] = 1,
    only: Annotated[
        str | None, typer.Option(metavar="PRESET,…", help="Only these settings, as in cifar10-balanced.")
    ] = None,
    from_: Annotated[
        Path | None,
        typer.Option("--from", metavar="DIR", help="Also use results of runs with the same settings in this folder."),
    ] = None,
    train: Annotated[bool, typer.Option("--train/--no-train", help="Train what is missing, or leave it out.")] = True,
    plot: Annotated[bool, typer.Option("--plot/--no-plot", help="Draw the figure too.")] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be trained, and train nothing.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Reproduce a table or figure of the paper: train what is missing, then print our numbers beside the paper's.

    What was stopped is resumed, what is finished is used as it is, and experiments share their runs. Scale small ends
    in minutes on two cores, on other data and another model; scale paper needs a GPU and the data. Table, numbers and
    figure are also written to the folder.

    Examples:

      fedprophet reproduce list

      fedprophet reproduce table7

      fedprophet reproduce table3 --scale small

      fedprophet reproduce table2 --scale paper --only cifar10-balanced --set model.weights=vgg16.safetensors
    """
    if experiment == LIST:
        setups = {name: _setup(name, out, seeds=seeds) for name in SCALES}
        print_result(listing(setups), listing_page(setups), json_)
        return
    setup = _setup(scale, out, settings, seeds, only, from_)
    chosen = _chosen(experiment)
    if dry_run:
        print_result(_plan(chosen, setup), _plan_page(chosen, setup), json_)
        return
    if plot:
        check_plots()
    outcomes = _reproduce(chosen, setup, train, _command(experiment, setup, out))
    documents = []
    for outcome in outcomes:
        files = write(outcome, plot)
        documents.append({**document(outcome), "files": [str(file) for file in files]})
        if not json_:
            show(page(outcome))
            typer.echo(f"written: {', '.join(map(str, files))}", err=True)
    if json_:
        print_json(documents if experiment == ALL else documents[0])


def _setup(
    scale: str,
    out: Path | None,
    settings: list[str] | None = None,
    seeds: int = 1,
    only: str | None = None,
    kept: Path | None = None,
) -> Setup:
    if scale not in SCALES:
        raise ConfigError(f"--scale: {unknown('scale', scale, SCALES)}")
    names = tuple(filter(None, (name.strip() for name in (only or "").split(","))))
    if kept is not None and not kept.is_dir():
        raise ConfigError(f"--from: there is no folder {kept}")
    return Setup(SCALES[scale], out if out is not None else ROOT / scale, tuple(settings or ()), seeds, names, kept)


def _chosen(name: str) -> list[Experiment]:
    if name == ALL:
        return list(EXPERIMENTS.values())
    if name not in EXPERIMENTS:
        raise ConfigError(unknown("experiment", name, [*EXPERIMENTS, LIST, ALL]))
    return [EXPERIMENTS[name]]


def _command(name: str, setup: Setup, out: Path | None) -> str:
    """Return the command that goes on with what was stopped."""
    options = {
        "--out": out,
        "--seeds": setup.seeds if setup.seeds > 1 else None,
        "--only": ",".join(setup.only) or None,
        "--from": setup.kept,
    }
    given = [word for option, value in options.items() if value is not None for word in (option, str(value))]
    changes = [word for change in setup.overrides for word in ("--set", change)]
    return shlex.join(["fedprophet", "reproduce", name, "--scale", setup.scale.name, *given, *changes])


def _reproduce(chosen: list[Experiment], setup: Setup, train: bool, command: str) -> Iterator[Outcome]:
    """Train what is missing, everything checked before; yield what each experiment found."""
    runs = once(run for experiment in chosen for run in experiment.source.runs(setup))
    check_runs(runs, to_train=train)
    attacks = {e.name: e.attacks if setup.scale.attacks else () for e in chosen}
    parse_attacks(",".join(("clean", *(attack for names in attacks.values() for attack in names))))
    open_folder(setup.out)
    if train and any(run.state != "finished" for run in runs):
        _say(f"to train: {time_left(runs, setup)}")
        if setup.scale.like_the_paper and not torch.cuda.is_available():
            _say("note: there is no GPU here, so this takes days. --scale small is made for such a machine")
    console = Console(stderr=True)
    for experiment in chosen:
        own = [run for run in experiment.source.runs(setup) if train or run.state == "finished"]
        failures = carry_out(own, attacks[experiment.name], command, console, _say)
        yield Outcome(experiment, setup, tuple(experiment.source.parts(setup)), failures)


def _say(text: str) -> None:
    typer.echo(text, err=True)


def _plan(chosen: list[Experiment], setup: Setup) -> list[dict[str, Any]]:
    return [
        {
            "experiment": experiment.name,
            "runs": [{"path": str(run.path), "state": run.state} for run in experiment.source.runs(setup)],
            "needs": time_left(experiment.source.runs(setup), setup),
        }
        for experiment in chosen
    ]


def _plan_page(chosen: list[Experiment], setup: Setup) -> Page:
    columns = (Column("Run"), Column("State", words=True))
    parts = tuple(
        Page(
            f"{experiment.label}. {experiment.title}",
            (Table("", columns, tuple((run.name, run.state) for run in experiment.source.runs(setup))),),
            notes=(time_left(experiment.source.runs(setup), setup),),
        )
        for experiment in chosen
    )
    return Page(f"Scale {setup.scale.name}: {setup.scale.help}", parts=parts)
