"""A comparison as tables for people, as Markdown, as CSV and as JSON."""

import csv
import io
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fedprophet.durations import Unit, format_duration, unit_of
from fedprophet.report.compare import ATTACKS, Accuracy, Comparison, Row, Setting, Statistic
from fedprophet.report.notes import FAST_MARK, reading, setting_notes
from fedprophet.report.runs import KINDS, Kind, Reached, RunSummary

NONE = "–"
WIRE_PARTS = ("sent", "received", "total", "jfat")
_WIRE_COUNTED = ("sent", "received", "jfat")
TIMES = ("total", "computation", "access", "communication")


@dataclass(frozen=True)
class TextTable:
    """A table for people. A column's heading has two parts: the group it belongs to ("" for none), and its own."""

    title: str
    headings: tuple[tuple[str, str], ...]
    rows: tuple[tuple[str, ...], ...]


# Numbers for people --------------------------------------------------------------------------------------------------


def percent_text(value: Statistic | None) -> str:
    """Return an accuracy in %: `79.7` or `79.7 ± 0.4`."""
    return NONE if value is None else _with_deviation(value, 100.0)


def time_unit(rows: Sequence[Row], part: str = "total") -> Unit:
    """Return the one unit for all rows, so that they can be compared: the one that suits the middle of final times."""
    rows = [row for row in rows if row.finished] or rows
    middle = statistics.median([value.mean for row in rows if (value := row.time(part))] or [0.0])
    return unit_of(middle)


def time_text(value: Statistic | None, unit: Unit) -> str:
    """Return a time span: `7.2 h` or `7.2 ± 0.1 h`; what would be rounded away has the unit that suits it, `36.0 s`."""
    if value is None:
        return NONE
    if 0 < value.mean < 0.1 * unit.seconds:
        return format_duration(value.mean)
    return f"{_with_deviation(value, 1 / unit.seconds)} {unit.name}"


def memory_text(size: int | None) -> str:
    """Return a size in MB of 10^6 bytes; small ones with more digits."""
    if size is None:
        return NONE
    megabytes = size / 1e6
    return (
        f"{megabytes:.1f} MB"
        if megabytes >= 10
        else f"{megabytes:.2f} MB"
        if megabytes >= 0.1
        else f"{megabytes:.2g} MB"
    )


def speedup_text(row: Row) -> str:
    """Return how many times faster than jFAT."""
    if row.speedup is None:
        return NONE
    return f"{row.speedup.factor:.1f}×" if row.speedup.factor >= 1 else f"{row.speedup.factor:.2f}×"


def _with_deviation(value: Statistic, scale: float) -> str:
    spread = "" if value.deviation is None else f" ± {scale * value.deviation:.1f}"
    return f"{scale * value.mean:.1f}{spread}"


def _accuracy_text(accuracy: Accuracy | None) -> str:
    mark = FAST_MARK if accuracy and accuracy.attack == "aa-fast" else ""
    return percent_text(accuracy.value if accuracy else None) + mark


# Tables for people ---------------------------------------------------------------------------------------------------


def text_tables(setting: Setting) -> list[TextTable]:
    """Return the tables of a setting: accuracy, cost, and what only some runs have: bytes on the wire, best rounds."""
    tables = (_accuracy_table(setting), _cost_table(setting), _wire_table(setting), _rounds_table(setting))
    return [table for table in tables if table.rows]


def _accuracy_table(setting: Setting) -> TextTable:
    names = {"clean": "clean", "pgd": _pgd_name(setting), "aa": "AA"}
    headings = [("", "Method"), ("", "Seeds")]
    headings += [(kind.capitalize(), name) for kind in KINDS for name in names.values()]
    rows = (
        (row.label, str(len(row.runs)), *(_accuracy_text(row.accuracy(kind, name)) for kind in KINDS for name in names))
        for row in setting.rows
    )
    return TextTable("Accuracy of the trained model, in %", tuple(headings), tuple(rows))


def _pgd_name(setting: Setting) -> str:
    """Return `PGD-20`; where rows were attacked with different numbers of steps, a note says so."""
    steps = {run.config.evaluate.steps for run in setting.runs}
    return f"PGD-{steps.pop()}" if len(steps) == 1 else "PGD"


def _cost_table(setting: Setting) -> TextTable:
    headings = [("", "Method"), ("", "Rounds"), ("Memory", "least"), ("Memory", "peak"), ("Time", "total")]
    headings += [("Time", "computation"), ("Time", "access"), ("Speed-up", "over jFAT")]
    headings += [("Network", "time")]
    unit, network = time_unit(setting.rows), time_unit(setting.rows, "communication")
    rows = []
    for row in setting.rows:
        rounds = row.over(lambda run: run.rounds)
        memory = (memory_text(row.memory(part)) for part in ("least", "peak"))
        parts = (time_text(_plain(row.time(part)), unit) for part in ("computation", "access"))
        spent = (time_text(row.time("total"), unit), *parts, speedup_text(row))
        waited = time_text(_plain(row.time("communication")), network)
        rows.append((row.label, f"{rounds.mean:.0f}" if rounds else NONE, *memory, *spent, waited))
    return TextTable("Memory of a client and simulated time", tuple(headings), tuple(rows))


def _plain(value: Statistic | None) -> Statistic | None:
    """Return the mean alone: a table that shows every deviation is too wide to be read."""
    return Statistic(value.mean, None, value.count) if value else None


def _wire_table(setting: Setting) -> TextTable:
    headings = [("", "Method"), ("Wire", "sent"), ("Wire", "received"), ("Wire", "total"), ("jFAT's", "total")]
    headings += [("", "of jFAT's"), ("", "Faults")]
    rows = []
    for row in setting.rows:
        total, reference = row.wire("total"), row.wire("jfat")
        if total is None or reference is None:
            continue
        sizes = (memory_text(round(size.mean)) for part in WIRE_PARTS if (size := row.wire(part)))
        share = f"{100 * total.mean / reference.mean:.1f} %" if reference.mean else NONE
        rows.append((row.label, *sizes, share, str(row.faults)))
    title = "Bytes on the wire in all rounds (jFAT's: its training alone), and faults of clients"
    return TextTable(title, tuple(headings), tuple(rows))


def _rounds_table(setting: Setting) -> TextTable:
    headings = [("", "Method")]
    headings += [(name, heading) for name in ("Best round", "Last round") for heading in ("number", "clean", "PGD")]
    rows = []
    for row in setting.rows:
        reached = [_rounds(row, which) for which in ("best", "last")]
        if all(reached):
            rows.append((row.label, *(text for rounds in reached for text in _reached_texts(rounds))))
    title = "Best and last round in training (personalised, in %; the best is chosen on the data that is reported)"
    return TextTable(title, tuple(headings), tuple(rows))


def _rounds(row: Row, which: str) -> list[Reached]:
    """Return the best or the last rounds of a row's runs, where these are final."""
    found = (getattr(run, which) for run in row.runs if row.finished)
    return [reached for reached in found if reached is not None]


def _reached_texts(rounds: Sequence[Reached]) -> tuple[str, str, str]:
    numbers = sorted({reached.round for reached in rounds})
    where = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}–{numbers[-1]}"
    clean, adversarial = (
        Statistic.of([getattr(reached, name) for reached in rounds]) for name in ("clean", "adversarial")
    )
    return where, percent_text(clean), percent_text(adversarial)


def run_lines(setting: Setting) -> list[str]:
    """Return which folders are behind each row."""
    return [f"Runs of {row.label}: {_folders(row)}" for row in setting.rows]


def _folders(row: Row) -> str:
    seeds = f"seed{'s' if len(row.seeds) > 1 else ''} {', '.join(map(str, row.seeds))}"
    return f"{', '.join(str(run.path) for run in row.runs)} ({seeds})"


# Markdown ------------------------------------------------------------------------------------------------------------


def markdown(comparison: Comparison, figure: str | None = None) -> str:
    """Return the comparison as a Markdown page; `figure` is the picture's file beside it."""
    blocks = ["# Comparison", "\n".join(f"- {line}" for line in (*reading(comparison), *comparison.notes))]
    if figure:
        blocks.append(f"![Accuracies and simulated time of each method]({figure})")
    for setting in comparison.settings:
        blocks.append(f"## {setting.title}")
        for table in text_tables(setting):
            blocks += [f"### {table.title}", _markdown_table(table)]
        lines = (*setting_notes(setting), *run_lines(setting))
        blocks.append("\n".join(f"- {line}" for line in lines))
    return "\n\n".join(blocks) + "\n"


def _markdown_table(table: TextTable) -> str:
    """Return a table whose columns are aligned in the text as well: it is read as it is where output is piped."""
    heads = [f"{group} {name}".strip() for group, name in table.headings]
    lines = [[cell.replace("|", "\\|") for cell in line] for line in (heads, *table.rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rule = [f"{'-' * width}" if number == 0 else f"{'-' * (width - 1)}:" for number, width in enumerate(widths)]
    lines.insert(1, rule)
    return "\n".join(
        "| "
        + " | ".join(
            cell.ljust(width) if number == 0 else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        + " |"
        for line in lines
    )


# CSV and JSON --------------------------------------------------------------------------------------------------------


def csv_text(comparison: Comparison) -> str:
    """Return a line for each row: accuracies in %, sizes in MB of 10^6 bytes, times in seconds; empty: not known."""
    lines = [
        {name: value(setting, row) for name, value in _CSV.items()}
        for setting in comparison.settings
        for row in setting.rows
    ]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(_CSV), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def wire_csv(comparison: Comparison) -> str | None:
    """Return a line for each round, in bytes; empty: not counted. None where no run has counted any.

    jFAT's are those of its training alone.
    """
    runs = [run for setting in comparison.settings for run in setting.runs if run.wire_rounds]
    if not runs:
        return None
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("run", "round", *_WIRE_COUNTED, "faults"))
    for run in runs:
        for one in run.wire_rounds:
            sizes = (getattr(one.wire, part) if one.wire else "" for part in _WIRE_COUNTED)
            writer.writerow((str(run.path), one.round, *sizes, one.faults))
    return text.getvalue()


def _csv_number(value: float | None, decimals: int) -> str:
    return "" if value is None else f"{value:.{decimals}f}"


def _csv_percent(kind: Kind, column: str, part: str) -> Callable[[Setting, Row], str]:
    def text(setting: Setting, row: Row) -> str:
        accuracy = row.accuracy(kind, column)
        value = getattr(accuracy.value, part) if accuracy else None
        return _csv_number(None if value is None else 100 * value, 1)

    return text


def _csv_attack(kind: Kind, column: str) -> Callable[[Setting, Row], str]:
    return lambda setting, row: accuracy.attack if (accuracy := row.accuracy(kind, column)) else ""


def _csv_samples(kind: Kind, column: str) -> Callable[[Setting, Row], str]:
    return lambda setting, row: " ".join(map(str, a.samples)) if (a := row.accuracy(kind, column)) else ""


def _csv_memory(part: str) -> Callable[[Setting, Row], str]:
    return lambda setting, row: _csv_number(None if (size := row.memory(part)) is None else size / 1e6, 6)


def _csv_wire(part: str) -> Callable[[Setting, Row], str]:
    return lambda setting, row: _csv_number(value.mean / 1e6 if (value := row.wire(part)) else None, 6)


def _csv_time(part: str) -> Callable[[Setting, Row], str]:
    return lambda setting, row: _csv_number(value.mean if (value := row.time(part)) else None, 3)


def _csv_accuracies() -> dict[str, Callable[[Setting, Row], str]]:
    columns: dict[str, Callable[[Setting, Row], str]] = {}
    for kind in KINDS:
        for column in ATTACKS:
            columns[f"{kind}_{column}_percent"] = _csv_percent(kind, column, "mean")
            columns[f"{kind}_{column}_deviation"] = _csv_percent(kind, column, "deviation")
            columns[f"{kind}_{column}_samples"] = _csv_samples(kind, column)
            if column != "clean":
                columns[f"{kind}_{column}_attack"] = _csv_attack(kind, column)
    return columns


def _csv_reached(which: str, part: str) -> Callable[[Setting, Row], str]:
    def text(setting: Setting, row: Row) -> str:
        value = Statistic.of([getattr(reached, part) for reached in _rounds(row, which)])
        return "" if value is None else f"{value.mean:g}" if part == "round" else f"{100 * value.mean:.1f}"

    return text


_CSV: Mapping[str, Callable[[Setting, Row], str]] = {
    "setting": lambda setting, row: setting.title,
    "row": lambda setting, row: row.label,
    "method": lambda setting, row: row.method,
    "finished": lambda setting, row: str(row.finished).lower(),
    "seeds": lambda setting, row: " ".join(map(str, row.seeds)),
    "rounds": lambda setting, row: " ".join(str(run.rounds) for run in row.runs),
    **_csv_accuracies(),
    **{
        f"{which}_{part}{'' if part == 'round' else '_percent'}": _csv_reached(which, part)
        for which in ("best", "last")
        for part in ("round", "clean", "adversarial")
    },
    "least_memory_mb": _csv_memory("least"),
    "peak_memory_mb": _csv_memory("peak"),
    **{f"{part}_s": _csv_time(part) for part in TIMES},
    **{f"wire_{part}_mb": _csv_wire(part) for part in WIRE_PARTS},
    "faults": lambda setting, row: str(row.faults),
    "speedup_over_jfat": lambda setting, row: _csv_number(row.speedup.factor if row.speedup else None, 3),
    "speedup_over_row": lambda setting, row: row.speedup.over if row.speedup else "",
    "starting_weights": lambda setting, row: row.runs[0].config.model.weights,
    "versions": lambda setting, row: " ".join(sorted({run.version for run in row.runs if run.version})),
    "runs": lambda setting, row: " ".join(str(run.path) for run in row.runs),
}


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
        "method": row.method,
        "differs": dict(row.differs),
        "finished": row.finished,
        "seeds": list(row.seeds),
        **{kind: {column: _as_dict(row.accuracy(kind, column)) for column in ATTACKS} for kind in KINDS},
        "memory_bytes": {part: row.memory(part) for part in ("least", "peak")},
        "simulated_s": {part: _as_dict(row.time(part)) for part in TIMES},
        "wire_bytes": {part: _as_dict(row.wire(part)) for part in WIRE_PARTS},
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
        "wire_bytes": {part: getattr(run.wire, part) for part in WIRE_PARTS} if run.wire else None,
        "faults": run.faults,
        "engine": run.engine,
        "engines": [span.to_json() for span in run.engines],
    }


def _as_dict(value: Any) -> dict[str, Any] | None:
    return None if value is None else asdict(value)
