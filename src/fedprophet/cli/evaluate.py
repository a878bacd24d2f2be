"""`fedprophet evaluate` and `fedprophet export`: what a run's model can do, and the model itself."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from fedprophet.cli.progress import WORK_NAMES, accuracy_table
from fedprophet.client.task import TaskKind
from fedprophet.errors import ConfigError
from fedprophet.runs.results import Watched, evaluate, parse_attacks
from fedprophet.runs.run import Run, reopen, write_model


def evaluate_command(
    run: Annotated[Path, typer.Argument(help="The run's folder.")],
    attack: Annotated[str, typer.Option(help="What to measure, separated by commas: clean, pgdN.")] = "clean,pgd20",
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure a run's model: personalised (each client's own data) and global (the exported model on the test set).

    Example: fedprophet evaluate runs/digits-fedprophet-1 --attack clean,pgd20,pgd50
    """
    attacks = parse_attacks(attack)
    opened = _open(run)
    with Progress(console=Console(stderr=True), transient=True, disable=not Console(stderr=True).is_terminal) as bar:
        work = bar.add_task("evaluating")

        def done(kind: TaskKind, number: int, total: int) -> None:
            bar.update(work, description=WORK_NAMES[kind], completed=number, total=total)

        results = evaluate(opened.session, opened.state, attacks, Watched(opened.session.engine, done))
    if json_:
        typer.echo(json.dumps(results, indent=2))
        return
    Console().print(accuracy_table(results))


def export_command(
    run: Annotated[Path, typer.Argument(help="The run's folder.")],
    out: Annotated[Path, typer.Option(help="The safetensors file to write.")],
) -> None:
    """Write one plain model with averaged norm statistics, loadable into the bare architecture by name.

    Example: fedprophet export runs/digits-fedprophet-1 --out model.safetensors
    """
    if out.is_dir():
        raise ConfigError(f"{out} is a folder. Give the file to write, such as {out / 'model.safetensors'}")
    opened = _open(run)
    write_model(opened, out)
    dataset = opened.session.dataset
    Console().print(
        f"{opened.session.config.model.name} after {opened.state.round} rounds written to {out}. Its norm layers are "
        f"the mean over the clients that have trained, weighted by shard size. Feed it images in [0, 1] normalised "
        f"with mean {_numbers(dataset.mean)} and std {_numbers(dataset.std)} (both are in the file's metadata).",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def _open(path: Path) -> Run:
    """Open a run and say what is not as it should be: aside, where it spoils no JSON."""
    run = reopen(path)
    notes = list(run.notes)
    if not run.session.method.finished(run.state):
        notes.append(f"this run is not finished; this is its model after round {run.state.round}")
    for note in notes:
        typer.echo(f"note: {note}", err=True)
    return run


def _numbers(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value:.4f}" for value in values)
