"""What was measured, kept from one occasion to the next, and the page that shows it."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fedprophet.display.tables import Column, Page, Table
from memory_price.models import MB, SETTINGS
from memory_price.trials import TIMED_STEPS

OCCASION = ("date", "commit", "repeat", "processor")


def known(path: Path) -> dict[str, Any]:
    """Return what was measured before; a budget that does not say when, or on what, was measured as its model was.

    So was what was swapped for it.
    """
    document = json.loads(path.read_text()) if path.exists() else {"models": {}}
    models: dict[str, Any] = document["models"]
    for model in models.values():
        model.setdefault("processor", document["machine"]["processor"])
        model["budgets"] = [{**_when(model), **entry} for entry in model["budgets"]]
        for entry in model["budgets"]:
            entry["swapped"] = entry["swapped"] and {**_when(entry), **entry["swapped"]}
    return models


def _when(measured: dict[str, Any]) -> dict[str, Any]:
    return {key: measured[key] for key in OCCASION}


def together(before: Sequence[dict[str, Any]], now: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what was measured for other budgets before, and now; what is not swapped now, as it was before."""
    entries = {entry["budget_bytes"]: entry for entry in before}
    for entry in now:
        swapped = entry["swapped"] or entries.get(entry["budget_bytes"], {}).get("swapped")
        entries[entry["budget_bytes"]] = {**entry, "swapped": swapped}
    return [entries[budget] for budget in sorted(entries)]


def page(document: dict[str, Any]) -> Page:
    parts = [part for name, found in document["models"].items() for part in _model_page(name, found)]
    machine = document["machine"]
    place = f"{machine['gpu']}, " if document["device"] != "cpu" else ""
    time_ = "processor time" if document["device"] == "cpu" else "wall time"
    on_cpu = document["device"] == "cpu"
    few = f", {TIMED_STEPS['cpu']} steps of the attack before" if on_cpu else ", by torch's own convolutions"
    noisy = "" if on_cpu else " Seconds of one plan differ by up to a third from one timing to the next."
    note = (
        f"{place}{machine['cores']} cores, one thread, last with a load of {machine['load']}; Python "
        f"{machine['python']}, torch {machine['torch']}. Computation: {time_}; swapping: wall time, O_DIRECT, beside "
        "other work. Difference: of one iteration's update by the plan from the plain one, by the length of that"
        f"{few}; also in float64, where rounding is next to nothing and any other difference would stay.{noisy}"
    )
    return Page("Time against budget", lines=(note,), parts=tuple(parts))


def _model_page(name: str, found: dict[str, Any]) -> Iterator[Page]:
    columns = (
        Column("Budget", form=_mb),
        Column("Modules"),
        Column("within", form=str),
        Column("plain", "One iteration of each, s", form=_seconds),
        Column("planned", "One iteration of each, s", form=_seconds),
        Column("ratio", "One iteration of each, s", form=_ratio),
        Column("worst ratio", form=_ratio),
        Column("computation", "Whole model swapped, s", form=_seconds),
        Column("disk", "Whole model swapped, s", form=_seconds),
        Column("moved", "Whole model swapped", form=_mb),
        Column("in memory", "Whole model swapped", form=_mb),
    )
    line = (
        f"whole model: {_mb(found['paper_bytes'])} on paper, {_mb(found['measured_bytes'])} measured, plain iteration "
        f"{_seconds(found['seconds'])} s; {_occasion(found)}"
    )
    table = Table("", columns, tuple(_summary(entry) for entry in found["budgets"]))
    yield Page(name, (table,), lines=(line, *_not_measured(name, found)))
    for entry in found["budgets"]:
        yield Page(f"{name}, {_mb(entry['budget_bytes'])}", (_modules_table(entry),), lines=(_occasions(entry),))


def _not_measured(name: str, found: dict[str, Any]) -> Iterator[str]:
    """Say at which of the model's budgets modules were not measured here, and at which swapping was not."""
    entries = {entry["budget_bytes"]: entry for entry in found["budgets"]}
    budgets = SETTINGS[name].budgets["cpu"]
    modules = [budget for budget in budgets if budget * MB not in entries]
    swapping = [budget for budget in budgets if not entries.get(budget * MB, {}).get("swapped")]
    lacking = {"modules": modules, "swapping": swapping}
    if modules or swapping:
        texts = (f"{what} at {', '.join(map(str, at))} MB" for what, at in lacking.items() if at)
        yield f"not measured here: {'; '.join(texts)}"


def _occasions(entry: dict[str, Any]) -> str:
    """Say when modules were measured, and when swapping was, if that was at another time."""
    modules, swapped = _occasion(entry), _occasion({**entry, **(entry["swapped"] or {})})
    return modules if swapped == modules else f"{modules}; swapping: {swapped}"


def _occasion(measured: dict[str, Any]) -> str:
    when = f"commit {measured['commit']}, {measured['date']}, quickest of {max(measured['repeat'], 1)}"
    return f"{when}, {measured['processor']}"


def _summary(entry: dict[str, Any]) -> tuple[Any, ...]:
    modules, swapped = entry["modules"], entry["swapped"] or {}
    planned = [module for module in modules if module["plan"] is not None]
    plain, fitted = (sum(module[key] for module in planned) for key in ("plain_seconds", "planned_seconds"))
    worst = max((module["planned_seconds"] / module["plain_seconds"] for module in planned), default=None)
    return (
        entry["budget_bytes"],
        len(modules),
        f"{len(planned)} of {len(modules)}",
        plain,
        fitted,
        fitted / plain if plain else None,
        worst,
        swapped.get("computation_seconds"),
        swapped.get("swapping_seconds"),
        swapped["written_bytes"] + swapped["read_bytes"] if swapped else None,
        swapped.get("in_memory_bytes"),
    )


def _modules_table(entry: dict[str, Any]) -> Table:
    columns = {
        "module": Column("Module"),
        "paper_bytes": Column("Paper", form=_mb),
        "plain_measured_bytes": Column("Plain measured", form=_mb),
        "plan": Column("Plan", words=True),
        "predicted_bytes": Column("Predicted", form=_mb),
        "measured_bytes": Column("Measured", form=_mb),
        "plain_seconds": Column("Plain, s", form=_seconds),
        "planned_seconds": Column("Planned, s", form=_seconds),
        "difference": Column("in float32", "Difference", form=_difference),
        "difference_in_float64": Column("in float64", "Difference", form=_difference),
    }
    return Table(
        "", tuple(columns.values()), tuple(tuple(module.get(key) for key in columns) for module in entry["modules"])
    )


def _mb(size: int) -> str:
    return f"{size / MB:.1f} MB"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds >= 1 else f"{seconds:.4f}"


def _difference(difference: float) -> str:
    return f"{difference:.0e}" if difference else "0"


def _ratio(ratio: float) -> str:
    return f"{ratio:.2f}×"
