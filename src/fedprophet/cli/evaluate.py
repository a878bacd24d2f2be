"""`fedprophet evaluate` and `fedprophet export`: what a run's model can do, and the model itself."""

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fedprophet.display.progress import percent, say, show_accuracies
from fedprophet.errors import ConfigError
from fedprophet.runs.evaluation import Check, Evaluation, can_keep, check_samples, evaluate_run
from fedprophet.runs.results import Watch, allowed_attacks, attack_label, parse_attacks
from fedprophet.runs.run import Run, open_to_read, write_model

AWAY = (
    "note: the clients are on other machines: only the global model is measured here; what they measured at the end "
    "of the run is in its results.json"
)


def evaluate_command(
    run: Annotated[Path, typer.Argument(help="The run's folder.")],
    attack: Annotated[
        str, typer.Option(help=f"What to measure, separated by commas: {', '.join(allowed_attacks())}.")
    ] = "clean,pgd20",
    samples: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Use N samples of the test set, and about N of all clients together. Default: all."
        ),
    ] = None,
    masking_check: Annotated[
        bool,
        typer.Option(
            "--masking-check/--no-masking-check",
            help="Repeat each pgdN in larger balls, on at most 200 test samples, to find gradient masking.",
        ),
    ] = True,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure a run's model: personalised (each client's own data) and global (the exported model on the test set).

    What is measured is kept in the run's folder: the same command given again goes on where it was stopped. The result
    is also in RUN/evaluation.json. AutoAttack takes long: a sample costs it thousands of passes through the model.

    Examples:

      fedprophet evaluate runs/digits-fedprophet-1 --attack clean,pgd20,pgd50

      fedprophet evaluate runs/digits-fedprophet-1 --attack clean,pgd20,autoattack --samples 100

      fedprophet evaluate runs/digits-fedprophet-1 --attack aa-fast --json
    """
    attacks = parse_attacks(attack)
    check_samples(samples)
    opened = _open_to_measure(run)
    with closing(opened.session), _progress() as watch:
        evaluation = evaluate_run(opened, attacks, samples, masking_check, watch)
    _show(evaluation, json_)


def _open_to_measure(path: Path) -> Run:
    """Open a run and say what cannot be measured or kept."""
    run = _open(path)
    if run.away:
        typer.echo(AWAY, err=True)
    if not can_keep(run):
        typer.echo(f"note: {path} cannot be written to: nothing is kept of this evaluation", err=True)
    return run


def _show(evaluation: Evaluation, as_json: bool) -> None:
    """Print warnings aside, then JSON, or tables for people."""
    results = evaluation.to_json()
    for warning in results["warnings"]:
        typer.echo(f"warning: {warning}", err=True)
    if as_json:
        typer.echo(json.dumps(results, indent=2))
        return
    console = Console()
    show_accuracies(results, console)
    say(console, map(_checked, evaluation.checks.values()))


@contextmanager
def _progress() -> Iterator[Watch]:
    """Show a bar for each thing that is measured, in a terminal; be quiet elsewhere."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(30), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        shown = bar.add_task("opening", total=None)
        at = "opening"

        def watch(what: str, done: int, total: int) -> None:
            nonlocal shown, at
            if what != at:
                bar.remove_task(shown)
                shown, at = bar.add_task(what, total=total), what
            bar.update(shown, completed=done, total=total)

        yield watch


def _checked(check: Check) -> str:
    """Say what the masking check found."""
    found = {radius: percent(tally.correct / max(tally.samples, 1)) for radius, tally in check.found.items()}
    larger = ", ".join(f"{value} with {radius:g}" for radius, value in found.items() if radius != check.radius)
    return (
        f"Masking check of {attack_label(check.attack)} on {check.found[check.radius].samples} test samples: "
        f"{found[check.radius]} correct with radius {check.radius:g}, {larger}."
    )


def export_command(
    run: Annotated[Path, typer.Argument(help="The run's folder.")],
    out: Annotated[Path, typer.Option(help="The safetensors file to write.")],
) -> None:
    """Write one plain model, loadable into the bare architecture by name.

    Its metadata say where its norm layers come from and how to normalise its input.

    Example: fedprophet export runs/digits-fedprophet-1 --out model.safetensors
    """
    if out.is_dir():
        raise ConfigError(f"{out} is a folder. Give the file to write, such as {out / 'model.safetensors'}")
    opened = _open(run)
    with closing(opened.session):
        write_model(opened, out)
    session = opened.session
    mean, std = session.normalize.numbers
    lines = (
        f"{session.config.model.name} after {opened.state.round} rounds written to {out}.",
        f"Norm layers: {session.method.norm_layers}.",
        f"Feed it images in [0, 1] normalised with mean {_numbers(mean)} and std {_numbers(std)}.",
        "Both are in the file's metadata.",
    )
    say(Console(), lines)


def _open(path: Path) -> Run:
    """Open a run and say what is not as it should be: aside, where it spoils no JSON."""
    run = open_to_read(path)
    notes = list(run.notes)
    if not run.session.method.finished(run.state):
        notes.append(f"this run is not finished; this is its model after round {run.state.round}")
    for note in notes:
        typer.echo(f"note: {note}", err=True)
    return run


def _numbers(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value:.4f}" for value in values)
