"""A finished run for people: its modules, its accuracies, and what it took."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fedprophet.attacks.names import attack_label
from fedprophet.display.progress import percent
from fedprophet.durations import format_duration
from fedprophet.runs.engine_history import engines_text, spans_of
from fedprophet.sizes import format_size

MEASURED_ON = {
    "personalised": "on each client's own held-out data",
    "global": "the exported model on the test set",
}


def say(console: Console, lines: Iterable[str]) -> None:
    """Print sentences: wrapped between words in a terminal, each on one line where a program may read them."""
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=not console.is_terminal)


def closing_table(results: Mapping[str, Any], path: Path, console: Console) -> None:
    """Print what a run reached."""
    if "stages" in results:
        console.print(_module_table(results))
    show_accuracies(results, console)
    say(console, _remarks(results))
    console.print(f"Files: {path}", highlight=False, markup=False, soft_wrap=True)


def show_accuracies(results: Mapping[str, Any], console: Console) -> None:
    """Print the accuracies, and below them what they were measured with."""
    console.print(_accuracy_table(results))
    say(console, _measured_with(results))


def _table(title: str, texts: Iterable[str], numbers: Iterable[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in texts:
        table.add_column(heading)
    for heading in numbers:
        table.add_column(heading, justify="right")
    return table


def _module_table(results: Mapping[str, Any]) -> Table:
    budget, whole = results["budget_bytes"], results["whole_model_bytes"]
    table = _table("Modules", ("Module", "Layers"), ("Memory", "of budget", "of whole model", "Clean", "PGD"))
    for row, stage in zip(results["modules"], results["stages"], strict=True):
        memory = row["memory_bytes"]
        shares = (f"{100 * memory / budget:.0f} %", f"{100 * memory / whole:.0f} %")
        reached = (percent(stage["clean"]), percent(stage["adversarial"]))
        table.add_row(str(row["index"]), ", ".join(row["layers"]), format_size(memory), *shares, *reached)
    return table


def _accuracy_table(results: Mapping[str, Any]) -> Table:
    """Return a row for each attack, first for the clients, then for the test set."""
    columns = ("Accuracy", "95 % interval", "Samples")
    table = _table("Accuracy of the trained model", ("Measured", "Attack"), columns)
    for part in MEASURED_ON:
        for number, (name, cell) in enumerate(results[part].items()):
            value = percent(cell["accuracy"] if cell["samples"] else None)
            shown = (attack_label(name), value, _interval(cell), str(cell["samples"]))
            table.add_row("" if number else part, *shown, end_section=number == len(results[part]) - 1)
    return table


def _interval(cell: Mapping[str, Any]) -> str:
    if not cell["samples"] or "interval" not in cell:
        return "–"
    low, high = cell["interval"]
    return f"{100 * low:.1f} – {100 * high:.1f} %"


def _measured_with(results: Mapping[str, Any]) -> Iterator[str]:
    public = results.get("public_samples", 0)
    left_out = {"global": f" without the {public} samples of the public set" if public else ""}
    for part, text in MEASURED_ON.items():
        layers = results.get("norm_layers", {}).get(part)
        yield f"{part}: {text}{left_out.get(part, '')}" + (f"; norm layers: {layers}" if layers else "")
    if "starting_weights" in results:
        yield f"starting weights: {results['starting_weights'] or 'drawn at random'}"


def _remarks(results: Mapping[str, Any]) -> Iterator[str]:
    """Yield memory, time, traffic and engine in sentences."""
    yield _need(results)
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
        sent, received, jfat = (format_size(moved[part]) for part in ("sent", "received", "jfat"))
        yield f"On the wire: {sent} sent, {received} received; jFAT's training alone would have moved {jfat}."
    lost = results.get("faults", 0)
    if lost:
        yield f"{lost} {'answers were' if lost > 1 else 'answer was'} missing or dropped; the journal says why."
    if results.get("engines"):
        yield f"Engine: {engines_text(spans_of(results['engines']))}."
    yield f"Rounds: {results['rounds']}, seed {results['seed']}."


def _need(results: Mapping[str, Any]) -> str:
    """Say how much memory a client's training takes."""
    whole, memory = results["whole_model_bytes"], results.get("memory")
    if "stages" in results:
        largest = max(row["memory_bytes"] for row in results["modules"])
        need = f"A client needs {format_size(largest)} to train "
        return need + (f"a module; the whole model would take {format_size(whole)}." if largest < whole else "it.")
    if memory is None:
        return f"Training the whole model takes {format_size(whole)}."
    least, peak = memory["least_bytes"], memory["peak_bytes"]
    if least == peak == whole:
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
    return f"{name.capitalize()} round ({round['round']}): {accuracies}."
