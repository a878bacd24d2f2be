"""A finished run for people: its modules, its accuracies, and what it took."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from fedprophet.attacks.names import attack_label
from fedprophet.display.lines import say
from fedprophet.display.numbers import NONE, counted, percent
from fedprophet.display.tables import Column, Page, Table, show
from fedprophet.durations import format_duration
from fedprophet.runs.engine_history import engines_text, spans_of
from fedprophet.runs.files import RunFiles, damaged, read_results
from fedprophet.sizes import format_size
from fedprophet.storage.files import is_deployed

MEASURED_ON = {
    "personalised": "on each client's own held-out data",
    "uncalibrated": "on each client's own held-out data, without its label frequencies",
    "global": "the exported model on the test set",
}


def show_results(results: Mapping[str, Any], path: Path, console: Console) -> None:
    """Print what a finished run reached and took; CheckpointError if its results.json is not as it was written."""
    try:
        modules = (_module_table(results),) if "stages" in results else ()
        accuracies = accuracy_page(results, _remarks(results))
        show(replace(accuracies, tables=(*modules, *accuracies.tables)), console)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise damaged(RunFiles(path).results) from error
    say(console, f"Files: {path}")


def show_finished(path: Path, console: Console) -> None:
    """Print what the finished run in a folder reached and took; real devices have no simulated time."""
    results = read_results(path)
    show_results({**results, "simulated": None} if is_deployed(path) else results, path, console)


def accuracy_page(results: Mapping[str, Any], remarks: Iterable[str] = ()) -> Page:
    """Return the accuracies, what they were measured with, and further remarks."""
    columns = (
        Column("Measured"),
        Column("Attack"),
        Column("Accuracy", form=percent),
        Column("95 % interval", form=_interval),
        Column("Samples"),
    )
    rows = tuple(
        (part, attack_label(name), cell["accuracy"], cell, cell["samples"])
        for part in MEASURED_ON
        for name, cell in results.get(part, {}).items()
    )
    table = Table("Accuracy of the trained model", columns, rows, labels=2)
    return Page("Results", (table,), notes=(*_measured_with(results), *remarks))


def _module_table(results: Mapping[str, Any]) -> Table:
    shares = [Column(heading, form=percent) for heading in ("of budget", "of whole model", "Clean", "PGD")]
    columns = (Column("Module"), Column("Layers", form=", ".join), Column("Memory", form=format_size), *shares)
    rows = []
    for module, stage in zip(results["modules"], results["stages"], strict=True):
        memory = module["memory_bytes"]
        used = memory / results["budget_bytes"], memory / results["whole_model_bytes"]
        rows.append((module["index"], module["layers"], memory, *used, stage["clean"], stage["adversarial"]))
    return Table("Modules", columns, tuple(rows), labels=2)


def _interval(cell: Mapping[str, Any]) -> str:
    if not cell["samples"] or "interval" not in cell:
        return NONE
    low, high = cell["interval"]
    return f"{100 * low:.1f} – {100 * high:.1f} %"


def _measured_with(results: Mapping[str, Any]) -> Iterator[str]:
    public = results.get("public_samples", 0)
    left_out = {"global": f" without the {public} samples of the public set" if public else ""}
    for part, text in MEASURED_ON.items():
        if not results.get(part):
            continue
        layers = results.get("norm_layers", {}).get(part)
        yield f"{part}: {text}{left_out.get(part, '')}" + (f"; norm layers: {layers}" if layers else "")
    if results.get("averaged_rounds"):
        yield f"model: the mean of the last rounds, of up to {results['averaged_rounds']} (aggregate.horizon)"
    yield from _precisions(results)
    if "starting_weights" in results:
        yield f"starting weights: {results['starting_weights'] or 'drawn at random'}"


def _precisions(results: Mapping[str, Any]) -> Iterator[str]:
    """Name the precision of each accuracy, unless all are in float32."""
    found: dict[str, dict[str, None]] = {}
    for part in MEASURED_ON:
        for name, cell in results.get(part, {}).items():
            if "precision" in cell:  # earlier versions did not record it
                found.setdefault(cell["precision"], {})[attack_label(name)] = None
    if set(found) - {"float32"}:
        yield "precision: " + "; ".join(f"{each} for {', '.join(names)}" for each, names in found.items())


def _remarks(results: Mapping[str, Any]) -> Iterator[str]:
    """Yield memory, time, traffic and engine in sentences."""
    yield _need(results)
    if "plans" in results:
        yield _kept_within(results["plans"])
    if "best" in results:
        yield from (_reached(name, results[name]) for name in ("best", "last"))
    time = results.get("simulated")
    if time is not None:
        total, computation, access = (format_duration(time[f"{part}_s"]) for part in ("total", "computation", "access"))
        yield (
            f"On the devices of the pool it would have taken {total}: computation {computation}, storage access "
            f"{access} (simulated)."
        )
    moved = results.get("wire")
    if moved is not None:
        sent, received, jfat = (format_size(moved[part]) for part in ("sent", "received", "whole_model"))
        yield f"On the wire: {sent} sent, {received} received; jFAT's training alone would have moved {jfat}."
    lost = results.get("faults", 0)
    if lost:
        yield f"{lost} {'answers were' if lost > 1 else 'answer was'} missing or dropped; the journal says why."
    if results.get("engines"):
        yield f"Engine: {engines_text(spans_of(results['engines']))}."
    yield f"Rounds: {results['rounds']}, seed {results['seed']}."


def _kept_within(plans: Mapping[str, Any]) -> str:
    """Say how clients kept within their memory."""
    peak, limit = (plans["closest"][part] for part in ("peak_bytes", "limit_bytes"))
    taken = "; ".join(f"{plan} ({counted(times, 'time')})" for plan, times in plans["counts"].items())
    return (
        f"Memory was enforced: no client took more than {percent(peak / limit)} of what it may ({format_size(peak)} of "
        f"{format_size(limit)}). Plans: {taken}."
    )


def _need(results: Mapping[str, Any]) -> str:
    """Say how much memory a client's training takes, as it is counted."""
    whole, memory = results["whole_model_bytes"], results.get("memory")
    if "stages" in results:
        largest = max(row["memory_bytes"] for row in results["modules"])
        how = "by the most economical plan " if results.get("memory_model") == "measured" else "on paper "
        need = f"A client needs {format_size(largest)} {how if 'plans' in results else ''}to train "
        return need + (f"a module; the whole model would take {format_size(whole)}." if largest < whole else "it.")
    if memory is None:
        return f"Training the whole model takes {format_size(whole)}."
    least, peak = memory["least_bytes"], memory["peak_bytes"]
    if memory.get("smallest_bytes", least) == peak == whole:  # earlier versions did not record the smallest
        swapping = "; where less was available, the simulated time includes swapping"
        return (
            f"Every client trained the whole model, which takes {format_size(whole)}"
            f"{swapping if results.get('simulated') else ''}."
        )
    return (
        f"With {format_size(least)} a client could have done the smallest task of every round; the largest task took "
        f"{format_size(peak)}, and the whole model takes {format_size(whole)}."
    )


def _reached(name: str, round: Mapping[str, Any]) -> str:
    accuracies = f"clean {percent(round['clean'])}, PGD {percent(round['adversarial'])}"
    module = f", module {round['module']}" if "module" in round else ""
    return f"{name.capitalize()} round ({round['round']}{module}): {accuracies}."
