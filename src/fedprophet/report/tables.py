"""A comparison as a page of tables, as Markdown, as CSV and as JSON."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from fedprophet.display import tables
from fedprophet.display.numbers import factor, percent
from fedprophet.display.tables import Column, Page, Table
from fedprophet.durations import Unit, format_duration, unit_of
from fedprophet.report.compare import COLUMN_ATTACKS, Comparison, Row, RowAccuracy, Setting, Statistic
from fedprophet.report.notes import FAST_MARK, reading, setting_notes
from fedprophet.report.runs import Reached, RunSummary
from fedprophet.runs.evaluator import KINDS
from fedprophet.sizes import format_size

WIRE_PARTS = {"sent": "sent", "received": "received", "total": "total", "jfat": "whole_model"}
"""The bytes of a run, by what they are called here: training the whole model takes what jFAT's training does."""
TIMES = ("total", "computation", "access", "communication")
ROUND_PARTS = ("round", "clean", "adversarial")
METHOD = Column("Method")


def page(comparison: Comparison, figure: str | None = None) -> Page:
    """Return the comparison as a page; `figure` is the file of its picture."""
    return Page(
        "Comparison",
        lines=(*reading(comparison), *comparison.notes),
        figure=f"![Accuracies and simulated time of each method]({figure})" if figure else "",
        parts=tuple(
            Page(setting.title, tuple(setting_tables(setting)), notes=(*setting_notes(setting), *_folders(setting)))
            for setting in comparison.settings
        ),
    )


def markdown(comparison: Comparison, figure: str | None = None) -> str:
    """Return the comparison as a Markdown page; `figure` is the file of its picture."""
    return tables.markdown(page(comparison, figure))


def _folders(setting: Setting) -> Iterator[str]:
    """Yield which folders are behind each row."""
    for row in setting.rows:
        seeds = f"seed{'s' if len(row.seeds) > 1 else ''} {', '.join(map(str, row.seeds))}"
        yield f"Runs of {row.name}: {', '.join(str(run.path) for run in row.runs)} ({seeds})"


# Numbers -------------------------------------------------------------------------------------------------------------


def percent_text(value: Statistic) -> str:
    """Return an accuracy in %: `79.7` or `79.7 ± 0.4`."""
    return _with_deviation(value, 100.0)


def time_unit(rows: Sequence[Row], part: str = "total") -> Unit:
    """Return one unit for all rows, so that they can be compared: the one that suits the median of finished rows."""
    rows = [row for row in rows if row.finished] or rows
    return unit_of(statistics.median([value.mean for row in rows if (value := row.time(part))] or [0.0]))


def time_text(unit: Unit, value: Statistic) -> str:
    """Return a time span: `7.2 h` or `7.2 ± 0.1 h`; one too short for the unit in a smaller one, `36.0 s`."""
    if 0 < value.mean < 0.1 * unit.seconds:
        return format_duration(value.mean)
    return f"{_with_deviation(value, 1 / unit.seconds)} {unit.name}"


def _with_deviation(value: Statistic, scale: float) -> str:
    value = value.scaled(scale)
    return f"{value.mean:.1f}" + ("" if value.deviation is None else f" ± {value.deviation:.1f}")


def _accuracy_text(accuracy: RowAccuracy) -> str:
    return percent_text(accuracy.value) + (FAST_MARK if accuracy.attack == "aa-fast" else "")


def _part(value: Any, *names: str) -> Any:
    """Return an attribute of an attribute; None where one of them is None."""
    for name in names:
        value = None if value is None else getattr(value, name)
    return value


# Tables for people ---------------------------------------------------------------------------------------------------


def setting_tables(setting: Setting) -> list[Table]:
    """Return accuracy and cost and, where runs have them, measured memory, bytes on the wire, best and last rounds."""
    makers = (_accuracy_table, _cost_table, _memory_table, _plans_table, _wire_table, _rounds_table)
    return [table for table in (make(setting) for make in makers) if table.rows]


def _accuracy_table(setting: Setting) -> Table:
    steps = {run.config.evaluate.steps for run in setting.runs}
    # Where rows were attacked with different numbers of steps, a note says so.
    names = {"clean": "clean", "pgd": f"PGD-{steps.pop()}" if len(steps) == 1 else "PGD", "aa": "AA"}
    calibrated = any(row.accuracy("uncalibrated", name) for row in setting.rows for name in names)
    kinds = [kind for kind in KINDS if calibrated or kind != "uncalibrated"]
    columns = [Column(name, kind.capitalize(), _accuracy_text) for kind in kinds for name in names.values()]
    rows = (
        (row.name, len(row.runs), *(row.accuracy(kind, name) for kind in kinds for name in names))
        for row in setting.rows
    )
    return Table("Accuracy of the trained model, in %", (METHOD, Column("Seeds"), *columns), tuple(rows))


def _cost_table(setting: Setting) -> Table:
    spent = partial(time_text, time_unit(setting.rows))
    network = partial(time_text, time_unit(setting.rows, "communication"))
    columns = (
        METHOD,
        Column("Rounds", form="{:.0f}".format),
        *(Column(part, "Memory", format_size) for part in ("least", "peak")),
        *(Column(part, "Time", spent) for part in ("total", "computation", "access")),
        Column("over jFAT", "Speed-up", factor),
        Column("time", "Network", network),
    )
    rows = (
        (
            row.name,
            _part(row.over(lambda run: run.rounds), "mean"),
            *(row.memory(part) for part in ("least", "peak")),
            row.time("total"),
            *(_mean_only(row.time(part)) for part in ("computation", "access")),
            _part(row.speedup, "factor"),
            _mean_only(row.time("communication")),
        )
        for row in setting.rows
    )
    return Table("Memory of a client and simulated time", columns, tuple(rows))


def _memory_table(setting: Setting) -> Table:
    columns = (
        METHOD,
        Column("peak", "Counted", format_size),
        *(Column(part, "Measured", format_size) for part in ("peak", "its limit")),
        Column("of a limit, at most", form=percent),
    )
    rows = [
        (row.name, row.memory("peak"), found.peak, found.limit, found.closest)
        for row in setting.rows
        if (found := row.enforced)
    ]
    return Table("Memory of a client that was enforced: counted by the cost model, and measured", columns, tuple(rows))


def _plans_table(setting: Setting) -> Table:
    rows = [
        (row.name, plan, times, times / found.trainings)
        for row in setting.rows
        if (found := row.enforced)
        for plan, times in found.plans.items()
    ]
    columns = (METHOD, Column("Plan"), Column("Times"), Column("of all", form=percent))
    return Table("Plans by which clients trained within their memory", columns, tuple(rows), labels=2)


def _mean_only(value: Statistic | None) -> Statistic | None:
    """Return the mean alone: with every deviation the table would be too wide."""
    return None if value is None else replace(value, deviation=None)


def _wire_table(setting: Setting) -> Table:
    parts = (("Wire", "sent"), ("Wire", "received"), ("Wire", "total"), ("jFAT's", "total"))
    sizes = [Column(name, group, lambda size: format_size(round(size.mean))) for group, name in parts]
    rows = []
    for row in setting.rows:
        moved = [row.wire(part) for part in WIRE_PARTS.values()]
        total, jfat = moved[-2:]
        if total is not None and jfat is not None:
            rows.append((row.name, *moved, total.mean / jfat.mean if jfat.mean else None, row.faults))
    columns = (METHOD, *sizes, Column("of jFAT's", form=percent), Column("Faults"))
    return Table("Bytes on the wire in all rounds (jFAT's: training only), and clients' faults", columns, tuple(rows))


def _rounds_table(setting: Setting) -> Table:
    columns = [
        Column(heading, name, form)
        for name in ("Best round", "Last round")
        for heading, form in (("number", str), ("clean", percent_text), ("PGD", percent_text))
    ]
    rows = []
    for row in setting.rows:
        reached = [_rounds(row, which) for which in ("best", "last")]
        if all(reached):
            rows.append((row.name, *(value for rounds in reached for value in _reached(rounds))))
    title = "Best and last round in training (personalised, in %; the best round is chosen on the reported data)"
    return Table(title, (METHOD, *columns), tuple(rows))


def _rounds(row: Row, which: str) -> list[Reached]:
    """Return the best or the last rounds of a row's runs, where these have finished."""
    found = (getattr(run, which) for run in row.runs if row.finished)
    return [reached for reached in found if reached is not None]


def _reached(rounds: Sequence[Reached]) -> tuple[str, Statistic | None, Statistic | None]:
    first, last = (pick(reached.round for reached in rounds) for pick in (min, max))
    clean, adversarial = (Statistic.of([getattr(reached, part) for reached in rounds]) for part in ROUND_PARTS[1:])
    return str(first) if first == last else f"{first}–{last}", clean, adversarial


# CSV -----------------------------------------------------------------------------------------------------------------


def csv_text(comparison: Comparison) -> str:
    """Return a line for each row: accuracies in %, sizes in MB of 10^6 bytes, times in seconds; empty: not known."""
    enforced = any(row.enforced for setting in comparison.settings for row in setting.rows)
    chosen = [*_csv_columns(), *(_enforced_columns() if enforced else ())]
    columns = [(Column(name, form=form), value) for name, form, value in chosen]
    rows = [
        (setting.title, *(value(row) for _, value in columns))
        for setting in comparison.settings
        for row in setting.rows
    ]
    return tables.csv_text(Table("", (Column("setting"), *(column for column, _ in columns)), tuple(rows)))


def wire_csv(comparison: Comparison) -> str | None:
    """Return a line for each round, in bytes; empty: not counted. None where no run has counted any.

    jFAT's bytes are those of its training only.
    """
    parts = ("sent", "received", "jfat")
    rows = [
        (run.path, one.round, *(_part(one.wire, WIRE_PARTS[part]) for part in parts), one.faults)
        for setting in comparison.settings
        for run in setting.runs
        for one in run.wire_rounds
    ]
    if not rows:
        return None
    return tables.csv_text(Table("", tuple(map(Column, ("run", "round", *parts, "faults"))), tuple(rows)))


Form = Callable[[Any], str]
_percent, _megabytes, _seconds = (
    lambda share: f"{100 * share:.1f}",
    lambda size: f"{size / 1e6:.6f}",
    lambda seconds: f"{seconds:.3f}",
)


def _joined(values: Sequence[object]) -> str:
    return " ".join(map(str, values))


def _csv_columns() -> Iterator[tuple[str, Form, Callable[[Row], Any]]]:
    """Yield the columns of the CSV file: name, how a value is written, and the value in a row."""
    yield "row", str, lambda row: row.label
    yield "name", str, lambda row: row.name
    yield "method", str, lambda row: row.method
    yield "finished", lambda finished: str(finished).lower(), lambda row: row.finished
    yield "seeds", _joined, lambda row: row.seeds
    yield "rounds", _joined, lambda row: [run.rounds for run in row.runs]
    for kind in KINDS:
        for attack in COLUMN_ATTACKS:
            name, cell = f"{kind}_{attack}", partial(Row.accuracy, kind=kind, column=attack)
            yield f"{name}_percent", _percent, _at(cell, "value", "mean")
            yield f"{name}_deviation", _percent, _at(cell, "value", "deviation")
            yield f"{name}_samples", _joined, _at(cell, "samples")
            if attack != "clean":
                yield f"{name}_attack", str, _at(cell, "attack")
    for which in ("best", "last"):
        for part in ROUND_PARTS:
            name, form = (
                (f"{which}_{part}", "{:g}".format) if part == "round" else (f"{which}_{part}_percent", _percent)
            )
            yield name, form, partial(_mean_reached, which=which, part=part)
    for part in ("least", "peak"):
        yield f"{part}_memory_mb", _megabytes, partial(Row.memory, part=part)
    for part in TIMES:
        yield f"{part}_s", _seconds, _at(partial(Row.time, part=part), "mean")
    for name, part in WIRE_PARTS.items():
        yield f"wire_{name}_mb", _megabytes, _at(partial(Row.wire, part=part), "mean")
    yield "faults", str, lambda row: row.faults
    yield "speedup_over_jfat", "{:.3f}".format, _at(lambda row: row.speedup, "factor")
    yield "speedup_over_row", str, _at(lambda row: row.speedup, "over")
    yield "starting_weights", str, lambda row: row.runs[0].config.model.weights
    yield "versions", _joined, lambda row: sorted({run.version for run in row.runs if run.version})
    yield "runs", _joined, lambda row: [run.path for run in row.runs]


def _enforced_columns() -> Iterator[tuple[str, Form, Callable[[Row], Any]]]:
    """Yield further columns, for where memory was enforced in a run."""
    for part in ("peak", "limit"):
        yield f"enforced_{part}_mb", _megabytes, _at(lambda row: row.enforced, part)
    yield "enforced_closest_percent", _percent, _at(lambda row: row.enforced, "closest")
    yield "plans", _plan_counts, _at(lambda row: row.enforced, "plans")


def _plan_counts(plans: Mapping[str, int]) -> str:
    return "; ".join(f"{plan}: {times}" for plan, times in plans.items())


def _at(value: Callable[[Row], Any], *names: str) -> Callable[[Row], Any]:
    return lambda row: _part(value(row), *names)


def _mean_reached(row: Row, which: str, part: str) -> float | None:
    found = Statistic.of([getattr(reached, part) for reached in _rounds(row, which)])
    return None if found is None else found.mean


# JSON ----------------------------------------------------------------------------------------------------------------


def document(comparison: Comparison) -> dict[str, Any]:
    """Return the comparison as JSON: accuracies in [0, 1], bytes and seconds, unrounded; null: not known."""
    return {
        "settings": [
            {
                "title": setting.title,
                "rows": [_row_document(row) for row in setting.rows],
                "notes": setting_notes(setting),
            }
            for setting in comparison.settings
        ],
        "reading": reading(comparison),
        "notes": list(comparison.notes),
    }


def _row_document(row: Row) -> dict[str, Any]:
    return {
        "label": row.label,
        "name": row.name,
        "method": row.method,
        "differs": dict(row.differs),
        "finished": row.finished,
        "seeds": list(row.seeds),
        **{kind: {column: _as_dict(row.accuracy(kind, column)) for column in COLUMN_ATTACKS} for kind in KINDS},
        "memory_bytes": {part: row.memory(part) for part in ("least", "peak")},
        **_enforced_document(row),
        "simulated_s": {part: _as_dict(row.time(part)) for part in TIMES},
        "wire_bytes": {name: _as_dict(row.wire(part)) for name, part in WIRE_PARTS.items()},
        "faults": row.faults,
        "speedup": _as_dict(row.speedup),
        "runs": [_run_document(run) for run in row.runs],
    }


def _run_document(run: RunSummary) -> dict[str, Any]:
    return {
        "path": str(run.path),
        "seed": run.config.seed,
        "version": run.version,
        "rounds": run.rounds,
        "weights": run.config.model.weights,
        "norm_layers": dict(run.norm_layers),
        "public_samples": run.public_samples,
        **{str(kind): {name: asdict(cell) for name, cell in run.accuracies[kind].items()} for kind in KINDS},
        "best": _as_dict(run.best),
        "last": _as_dict(run.last),
        "simulated_s": {part: getattr(run.time, part) for part in TIMES} if run.time else None,
        "memory_bytes": _as_dict(run.memory),
        **_enforced_document(run),
        "wire_bytes": {name: getattr(run.wire, part) for name, part in WIRE_PARTS.items()} if run.wire else None,
        "faults": run.faults,
        "engine": run.engine,
        "engines": [span.to_json() for span in run.engines],
    }


def _enforced_document(of: Row | RunSummary) -> dict[str, Any]:
    """Return what is there only where memory was enforced."""
    found = of.enforced
    if found is None:
        return {}
    sizes = {"peak_bytes": found.peak, "limit_bytes": found.limit, "closest": found.closest}
    return {"enforced": {**sizes, "plans": dict(found.plans)}}


def _as_dict(value: Any) -> dict[str, Any] | None:
    return None if value is None else asdict(value)
