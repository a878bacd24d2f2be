"""What an experiment found, for people and for programs: our numbers beside the paper's, claims, files."""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedprophet.display.tables import Column, Page, Table, markdown
from fedprophet.report.compare import Statistic
from fedprophet.reproduce.drawing import picture
from fedprophet.reproduce.experiment import Experiment
from fedprophet.reproduce.findings import Part, Quantity, statistic_json, verdict_text
from fedprophet.reproduce.paper import Numbers, numbers_of
from fedprophet.reproduce.runs import Setup, Variant, key_of
from fedprophet.storage.files import write_atomic_all

ANOTHER_SCALE = (
    "Another data set and model than the paper's: its numbers stand here to compare the order of rows, not the values."
)


@dataclass(frozen=True)
class Outcome:
    """An experiment, its setup, and what it found; `failures` are runs that could not go on, with the reason."""

    experiment: Experiment
    setup: Setup
    parts: tuple[Part, ...]
    failures: Mapping[str, str] = field(default_factory=dict)

    @property
    def comparable(self) -> bool:
        """Whether our numbers are of the paper's data and model; those that are computed always are."""
        return self.setup.scale.like_the_paper or not self.experiment.source.runs(self.setup)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to show yet: no number, no curve, and no failure to tell of."""
        found = any(part.curves or any(part.values.values()) for part in self.parts)
        return not found and not self.failures

    @property
    def changed(self) -> tuple[str, ...]:
        """What --set has changed in one row at least."""
        return tuple(change for change, rows in self._left_aside() if len(rows) < len(self._rows))

    @property
    def unheeded(self) -> tuple[str, ...]:
        """What --set has not changed, as sentences: what makes a row what it is, is stronger."""
        return tuple(
            f"--set {change} changes nothing: every row sets {key_of(change)} itself"
            if len(rows) == len(self._rows)
            else f"--set {change} does not change the rows that set {key_of(change)} themselves: {', '.join(rows)}"
            for change, rows in self._left_aside()
            if rows
        )

    @property
    def _rows(self) -> Mapping[str, Variant]:
        return self.experiment.source.rows

    def _left_aside(self) -> Iterator[tuple[str, list[str]]]:
        """Yield each change by --set that reaches the experiment, and the rows that set its key themselves."""
        heeded = self.setup.overrides if self.experiment.source.heeds_changes(self.setup) else ()
        for change in heeded:
            yield change, [row for row, variant in self._rows.items() if key_of(change) in variant.own_keys]

    @property
    def title(self) -> str:
        scale = "" if self.comparable else f", scale {self.setup.scale.name}"
        return f"{self.experiment.label}. {self.experiment.title}{scale}"

    def numbers(self, part: Part) -> Numbers:
        """Return the paper's numbers beside a part."""
        return numbers_of(self.experiment.name, part.paper)

    def claims(self) -> Iterator[tuple[str, str, bool | None]]:
        """Yield each part's label, each claim's text, and its verdict."""
        for part in self.parts:
            for claim in self.experiment.claims:
                if part.label.endswith(claim.about):
                    yield part.label, claim.text, claim.verdict(part)


# Tables --------------------------------------------------------------------------------------------------------------


def page(outcome: Outcome, figure: str = "") -> Page:
    """Return what is printed."""
    scale = outcome.setup.scale
    lines = [] if outcome.comparable else [f"Scale {scale.name}: {scale.help}. {ANOTHER_SCALE}"]
    lines += [f"changed by --set: {', '.join(outcome.changed)}"] if outcome.changed else []
    verdicts = [f"claim ({label}): {text}: {verdict_text(verdict)}" for label, text, verdict in outcome.claims()]
    failures = (f"{name} has failed: {reason}" for name, reason in outcome.failures.items())
    abouts = dict.fromkeys(note for part in outcome.parts for note in part.notes)
    return Page(
        outcome.title,
        tuple(_table(outcome, part) for part in outcome.parts),
        lines=(*lines, *outcome.unheeded),
        parts=(Page("What the paper says of it", lines=tuple(verdicts)),),
        notes=(*outcome.experiment.notes, *abouts, *failures),
        figure=f"![{outcome.title}]({figure})" if figure else "",
    )


def _table(outcome: Outcome, part: Part) -> Table:
    numbers = outcome.numbers(part)
    shown = [quantity for quantity in outcome.experiment.quantities if _known(part, numbers, quantity)]
    columns = [Column("")]
    for quantity in shown:
        columns += _columns(quantity, outcome, part, any(quantity.name in cells for cells in numbers.values()))
    rows = tuple(
        (row, *(cell for quantity in shown for cell in _cells(outcome, part, row, quantity, numbers)))
        for row in part.values
    )
    return Table(part.label, tuple(columns), rows)


def _known(part: Part, numbers: Numbers, quantity: Quantity) -> bool:
    return any(quantity.name in cells for table in (part.values, numbers) for cells in table.values())


def _columns(quantity: Quantity, outcome: Outcome, part: Part, in_paper: bool) -> list[Column]:
    """Return our column, and the paper's and the difference where the paper has numbers of the same thing."""

    def ours(value: Statistic) -> str:
        spread = "" if value.deviation is None else f" ± {quantity.form.format(value.deviation)}"
        return quantity.form.format(value.mean) + spread

    here = Column("here", quantity.heading, ours)
    if not in_paper:
        return [here]
    source = "paper" if outcome.comparable else f"paper ({part.paper})"
    theirs = Column(source, quantity.heading, quantity.form.format)
    difference = Column("difference", quantity.heading, _signed(quantity.form))
    return [here, theirs, *([difference] if outcome.comparable else [])]


def _signed(form: str) -> Any:
    return form.replace("{:", "{:+").format


def _cells(outcome: Outcome, part: Part, row: str, quantity: Quantity, numbers: Numbers) -> list[Any]:
    ours = part.values[row].get(quantity.name)
    if not any(quantity.name in cells for cells in numbers.values()):
        return [ours]
    paper = numbers.get(row, {}).get(quantity.name)
    theirs = None if paper is None else paper.value
    difference = None if ours is None or theirs is None else ours.mean - theirs
    return [ours, theirs, *([difference] if outcome.comparable else [])]


# For programs --------------------------------------------------------------------------------------------------------


def lines_of(outcome: Outcome) -> Iterator[dict[str, Any]]:
    """Yield every number: ours, the paper's with its place, and the difference where they are of the same thing."""
    for part in outcome.parts:
        numbers = outcome.numbers(part)
        for row, cells in part.values.items():
            for quantity in outcome.experiment.quantities:
                ours, paper = cells.get(quantity.name), numbers.get(row, {}).get(quantity.name)
                if ours is None and paper is None:
                    continue
                both = outcome.comparable and ours is not None and paper is not None
                yield {
                    "part": part.label,
                    "row": row,
                    "quantity": quantity.name,
                    "unit": quantity.unit,
                    "here": statistic_json(ours),
                    "paper": paper.value if paper else None,
                    "paper_part": part.paper if paper else None,
                    "where": paper.where if paper else None,
                    "derived": paper.derived if paper else "",
                    "difference": ours.mean - paper.value if both and ours and paper else None,
                }


def document(outcome: Outcome) -> dict[str, Any]:
    """Return everything as JSON."""
    experiment, setup = outcome.experiment, outcome.setup
    return {
        "experiment": experiment.name,
        "title": experiment.title,
        "scale": setup.scale.name,
        "comparable": outcome.comparable,
        "changed": list(outcome.changed),
        "unheeded": list(outcome.unheeded),
        "numbers": list(lines_of(outcome)),
        "claims": [{"part": label, "claim": text, "holds": verdict} for label, text, verdict in outcome.claims()],
        "runs": [{"path": str(run.path), "state": run.state} for run in experiment.source.runs(setup)],
        "failures": dict(outcome.failures),
        "notes": [*experiment.notes, *dict.fromkeys(note for part in outcome.parts for note in part.notes)],
    }


SHEET = ("part", "row", "quantity", "unit", "here", "deviation", "runs", "paper", "difference", "where")


def sheet(outcome: Outcome) -> str:
    """Return every number as CSV."""
    rows = ({**line, "here": None, **dict(_flat(line["here"]))} for line in lines_of(outcome))
    return _csv(SHEET, ([row.get(name) for name in SHEET] for row in rows))


def _flat(here: Mapping[str, Any] | None) -> Iterator[tuple[str, Any]]:
    if here is not None:
        yield from (("here", here["mean"]), ("deviation", here["deviation"]), ("runs", here["runs"]))


def curve_sheet(outcome: Outcome) -> str | None:
    """Return the points of all curves as CSV; None where there are none."""
    points = [
        (part.label, curve.label, x, y)
        for part in outcome.parts
        for curve in part.curves
        for x, y in zip(curve.x, curve.y, strict=True)
    ]
    return _csv(("part", "curve", "x", "y"), points) if points else None


def _csv(heading: Sequence[str], rows: Any) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(heading)
    writer.writerows(rows)
    return text.getvalue()


def write(outcome: Outcome, plot: bool) -> list[Path]:
    """Write the experiment's page, its numbers and its picture to the folder of --out; return the files."""
    name, out, experiment = outcome.experiment.name, outcome.setup.out, outcome.experiment
    points = curve_sheet(outcome)
    drawn = [(part, outcome.numbers(part)) for part in outcome.parts]
    files = {
        out / f"{name}.md": markdown(page(outcome, f"{name}.png" if plot else "")).encode(),
        out / f"{name}.csv": sheet(outcome).encode(),
        **({} if points is None else {out / f"{name}-points.csv": points.encode()}),
        **(
            {out / f"{name}.png": picture(outcome.title, drawn, experiment.quantities, experiment.draw)} if plot else {}
        ),
    }
    write_atomic_all(files.items())
    return list(files)
