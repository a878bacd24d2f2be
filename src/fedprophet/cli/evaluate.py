"""`fedprophet evaluate` and `fedprophet export`: the accuracies of a run's model, and the model itself."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from fedprophet.attacks.names import allowed_attacks, attack_label, parse_attacks
from fedprophet.cli.options import AsJson, print_json, tell
from fedprophet.config.config import Config
from fedprophet.console import console_on
from fedprophet.display.lines import say
from fedprophet.display.numbers import counted, percent
from fedprophet.display.summary import accuracy_page
from fedprophet.display.tables import show
from fedprophet.progress import progress_bar
from fedprophet.runs.evaluation import RunEvaluation, can_keep, check_samples, evaluate_run, parse_kinds
from fedprophet.runs.evaluator import KINDS
from fedprophet.runs.export import about_exported, expect_replaceable, write_model
from fedprophet.runs.masking import MaskingCheck
from fedprophet.runs.run import Run, open_to_read

AWAY = (
    "the clients are on other machines: only the global model is measured here. What the clients measured at the end "
    "of the run is in its results.json"
)


def evaluate_command(
    run: Annotated[Path, typer.Argument(help="The run's folder.")],
    attack: Annotated[
        str, typer.Option(help=f"What to measure, separated by commas: {', '.join(allowed_attacks())}.")
    ] = "clean,pgd20",
    samples: Annotated[
        int | None,
        typer.Option(metavar="N", help="Use N test samples, and about N samples of all clients. Default: all."),
    ] = None,
    of: Annotated[
        str, typer.Option(metavar="KINDS", help=f"Whose accuracy, separated by commas: {', '.join(KINDS)}.")
    ] = ",".join(KINDS),
    masking_check: Annotated[
        bool,
        typer.Option(
            "--masking-check/--no-masking-check",
            help="Repeat each pgdN with larger radii, on at most 200 test samples, to detect gradient masking.",
        ),
    ] = True,
    json_: AsJson = False,
) -> None:
    """Measure a run's model: personalised (each client's own data) and global (the exported model on the test set).

    The measurements are kept in the run's folder: a command that was stopped continues when it is given again. The
    result is also in RUN/evaluation.json. AutoAttack takes long: thousands of passes through the model per sample.

    Examples:

      fedprophet evaluate runs/digits-fedprophet-1 --attack clean,pgd20,pgd50

      fedprophet evaluate runs/digits-fedprophet-1 --attack clean,pgd20,autoattack --samples 100

      fedprophet evaluate runs/digits-fedprophet-1 --attack autoattack --of personalised --samples 100

      fedprophet evaluate runs/digits-fedprophet-1 --attack aa-fast --json
    """
    attacks, kinds = parse_attacks(attack), parse_kinds(of)
    check_samples(samples)
    opened = _open(run)
    if opened.away:
        _note(AWAY)
    if not can_keep(opened):
        _note(f"{run} cannot be written to: this evaluation is not kept")
    with closing(opened.session), progress_bar() as watch:
        evaluation = evaluate_run(opened, attacks, samples, masking_check, watch, kinds)
    _show(evaluation, json_)


def _show(evaluation: RunEvaluation, as_json: bool) -> None:
    results = evaluation.to_json()
    for warning in results["warnings"]:
        tell(f"warning: {warning}", err=True)
    if as_json:
        print_json(results)
        return
    show(accuracy_page(results, map(_checked, evaluation.checks.values())))


def _checked(check: MaskingCheck) -> str:
    found = {radius: percent(tally.correct / max(tally.samples, 1)) for radius, tally in check.found.items()}
    larger = ", ".join(f"{value} with {radius:g}" for radius, value in found.items() if radius != check.radius)
    return (
        f"Masking check of {attack_label(check.attack)} on {check.found[check.radius].samples} test samples: "
        f"{found[check.radius]} correct with radius {check.radius:g}, {larger}."
    )


def export_command(
    run: Annotated[Path, typer.Argument(help="The run's folder.")],
    out: Annotated[Path, typer.Option(help="The safetensors file to write.")],
    json_: Annotated[bool, typer.Option("--json", help="Print what the file's metadata say, and its digest.")] = False,
) -> None:
    """Write the model to a file that loads into the plain architecture by name.

    Its metadata say where its norm layers come from, how to normalise its input, and whether clients were trained with
    their label frequencies.

    Examples:

      fedprophet export runs/digits-fedprophet-1 --out model.safetensors

      fedprophet export runs/digits-fedprophet-1 --out model.safetensors --json
    """
    expect_replaceable(out)
    opened = _open(run)
    session = opened.session
    with closing(session):
        write_model(opened, out)
    if json_:
        finished = session.method.finished(opened.state)
        print_json({"run": str(run), "file": str(out), "finished": finished, **about_exported(out)})
        return
    mean, std = (", ".join(f"{value:.4f}" for value in values) for values in session.normalize.numbers)
    lines = (
        f"{session.config.model.name} after {counted(opened.state.round, 'round')} written to {out}.",
        f"Norm layers: {session.method.layers_of(opened.state)['global']}.",
        f"Its input: images in [0, 1], normalised with mean {mean} and std {std}.",
        *_trained_as(session.config),
        "The file's metadata say so, too.",
    )
    console = console_on()
    for line in lines:
        say(console, line)


def _trained_as(config: Config) -> Iterator[str]:
    """Yield what is to be known of an exported model's training, where it is not as in the paper."""
    if config.horizon_rounds:
        yield f"It is the mean of the model over its last rounds, of up to {config.horizon_rounds} (aggregate.horizon)."
    if config.train.calibration != "none":
        how = "whoever adds theirs to its scores makes it personal (docs/how-to/one-model.md)"
        yield f"Clients were trained with their label frequencies: {how}."


def _open(path: Path) -> Run:
    """Open a run, and print notes about it to standard error."""
    run = open_to_read(path)
    for note in run.notes:
        _note(note)
    if not run.session.method.finished(run.state):
        _note(f"this run is not finished; this is its model after round {run.state.round}")
    return run


def _note(text: str) -> None:
    tell(f"note: {text}", err=True)
