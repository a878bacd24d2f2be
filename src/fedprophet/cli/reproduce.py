"""`fedprophet reproduce`: the paper's tables and figures, each by its own number."""

import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer

from fedprophet.attacks.names import parse_attacks
from fedprophet.cli.options import AsJson, Overrides, open_folder, print_json, print_result
from fedprophet.console import console_on
from fedprophet.display.lines import say
from fedprophet.display.numbers import counted
from fedprophet.display.tables import show
from fedprophet.errors import ConfigError, unknown
from fedprophet.report.figures import check_plots
from fedprophet.reproduce.experiment import Experiment
from fedprophet.reproduce.listing import listing, listing_page, plan, plan_page, time_left
from fedprophet.reproduce.output import Outcome, document, page, write
from fedprophet.reproduce.registry import EXPERIMENTS
from fedprophet.reproduce.runs import Setup, carry_out, check_runs, once
from fedprophet.reproduce.scales import SCALES, SMALL

ROOT = Path("reproduce")
LIST, ALL = "list", "all"
SCALE_HELP = "; ".join(f"{name}: {entry.help}" for name, entry in SCALES.items())

Name = Annotated[
    str, typer.Argument(help=f"{LIST}, {ALL}, or one of {', '.join(EXPERIMENTS)}: the paper's own numbers.")
]
ScaleName = Annotated[str | None, typer.Option("--scale", help=f"{SCALE_HELP}. Default: {SMALL.name}; {LIST}: both.")]
Out = Annotated[Path | None, typer.Option(metavar="DIR", help=f"The folder. Default: {ROOT}/SCALE here.")]
Seeds = Annotated[int, typer.Option(min=1, max=1000, help="Runs of each row, with seeds 0, 1, …")]
Only = Annotated[str | None, typer.Option(metavar="PRESET,…", help="Only these settings, as in cifar10-balanced.")]
From = Annotated[
    Path | None,
    typer.Option("--from", metavar="DIR", help="Also use results of runs with the same settings in this folder."),
]
Train = Annotated[bool, typer.Option("--train/--no-train", help="Train what is missing, or leave it out.")]
Plot = Annotated[bool, typer.Option("--plot/--no-plot", help="Draw the figure too.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be trained, and train nothing.")]


def reproduce_command(
    experiment: Name,
    scale: ScaleName = None,
    out: Out = None,
    settings: Overrides = None,
    seeds: Seeds = 1,
    only: Only = None,
    from_: From = None,
    train: Train = True,
    plot: Plot = True,
    dry_run: DryRun = False,
    json_: AsJson = False,
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
        if settings or only or from_:
            raise ConfigError(f"{LIST} takes no --set, --only or --from. See what they change with --dry-run")
        return _list(scale, out, seeds, json_)
    setup, chosen = _setup(scale or SMALL.name, out, settings, seeds, only, from_), _chosen(experiment)
    _say_what_is_left_aside(chosen, setup)
    if dry_run:
        return print_result(plan(chosen, setup), plan_page(chosen, setup), json_)
    if plot:
        check_plots()
    outcomes = _reproduce(chosen, setup, train, _command(experiment, setup, out, plot, json_))
    return _print(outcomes, plot, json_, several=experiment == ALL)


def _list(scale: str | None, out: Path | None, seeds: int, as_json: bool) -> None:
    """List both scales; one alone where it, or a folder, is named: a folder holds the runs of one scale."""
    names = [scale or SMALL.name] if scale or out else list(SCALES)
    setups = {name: _setup(name, out, seeds=seeds) for name in names}
    print_result(listing(setups), listing_page(setups), as_json)


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


def _command(name: str, setup: Setup, out: Path | None, plot: bool, as_json: bool) -> str:
    """Return the command that goes on with what was stopped."""
    options = {
        "--out": out,
        "--seeds": setup.seeds if setup.seeds > 1 else None,
        "--only": ",".join(setup.only) or None,
        "--from": setup.kept,
    }
    given = [word for option, value in options.items() if value is not None for word in (option, str(value))]
    changes = [word for change in setup.overrides for word in ("--set", change)]
    flags = [*([] if plot else ["--no-plot"]), *(["--json"] if as_json else [])]
    return shlex.join(["fedprophet", "reproduce", name, "--scale", setup.scale.name, *given, *changes, *flags])


def _say_what_is_left_aside(chosen: list[Experiment], setup: Setup) -> None:
    names = [experiment.name for experiment in chosen if not experiment.source.heeds_changes(setup)]
    if setup.overrides and names:
        _say(f"note: --set changes nothing in {', '.join(names)}, computed for the paper's own settings")


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
    console = console_on(err=True, lasting=True)
    for experiment in chosen:
        own = [run for run in experiment.source.runs(setup) if train or run.state == "finished"]
        failures = carry_out(own, attacks[experiment.name], command, console, _say)
        yield Outcome(experiment, setup, tuple(experiment.source.parts(setup, _say)), failures)


def _print(outcomes: Iterable[Outcome], plot: bool, as_json: bool, several: bool) -> None:
    """Write what was found to the folder, and print it; of an experiment without anything yet, say that."""
    documents = []
    for outcome in outcomes:
        if outcome.empty:
            _say(_nothing(outcome))
        files = [] if outcome.empty else write(outcome, plot)
        documents.append({**document(outcome), "files": [str(file) for file in files]})
        if files and not as_json:
            show(page(outcome))
            _say(f"written: {', '.join(map(str, files))}")
    if as_json:
        print_json(documents if several else documents[0])


def _nothing(outcome: Outcome) -> str:
    experiment, setup = outcome.experiment, outcome.setup
    runs = len(experiment.source.runs(setup))
    if not runs:
        return f"{experiment.name}: nothing to show, it has no runs in {', '.join(setup.only)}"
    return f"{experiment.name}: nothing is there yet, of {counted(runs, 'run')}. Leave out --no-train to train"


def _say(text: str) -> None:
    say(console_on(err=True, lasting=True), text)
