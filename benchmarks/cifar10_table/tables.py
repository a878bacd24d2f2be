"""The tables of the page: our numbers beside the paper's, and what the runs were played with."""

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress

from cifar10_table.bringing import Kept
from cifar10_table.cells import GROUPS, Row
from cifar10_table.columns import COLUMNS, PAPER_COLUMN
from cifar10_table.keeping import CELL
from fedprophet.errors import ConfigError
from fedprophet.report.runs import ReadFolder
from fedprophet.reproduce.paper import numbers_of
from fedprophet.storage.files import parse_json

BEGIN = "<!-- Made by `python benchmarks/cifar10.py table --write`: change that program instead. -->"
END = "<!-- End of what is made. -->"
PAPER_CELLS: Mapping[str, tuple[str, ...]] = {PAPER_COLUMN: ("clean", "PGD"), f"{PAPER_COLUMN}'s": ("AA",)}


def papers(row: Row) -> dict[str, str]:
    """Return the paper's cells of a row."""
    if row.paper is None:
        return {}
    experiment, part, line = row.paper
    numbers = numbers_of(experiment, part)[line]
    return {
        column: " / ".join(f"{numbers[name].value:.1f}" for name in names)
        for column, names in PAPER_CELLS.items()
        if all(name in numbers for name in names)
    }


def row_lines(row: Row, kept: Kept) -> Iterator[str]:
    """Yield a line for each seed that was run, and that of their mean; the paper's numbers are in the last of them."""
    runs = {str(cell.seed): [kept[cell.name]] for cell in row.cells if cell.name in kept}
    if len(runs) > 1:
        runs["mean ± standard deviation"] = [run for (run,) in list(runs.values())]
    runs = runs or {", ".join(map(str, row.seeds)): []}
    for place, (seed, found) in enumerate(runs.items(), start=1):
        ours = {column: make(found) if found else "" for column, make in COLUMNS.items()}
        cells = [row.title, seed, *(ours | (papers(row) if place == len(runs) else {})).values()]
        yield re.sub(" +", " ", f"| {' | '.join(cells)} |")


def tables(kept: Kept) -> str:
    """Return all tables, each under a heading, and what the runs were played with."""
    heading = f"| method | seed | {' | '.join(COLUMNS)} |\n|{' --- |' * (len(COLUMNS) + 2)}"
    parts = []
    for title, rows in GROUPS.items():
        lines = [line for row in rows if row.paper for line in row_lines(row, kept)]
        if lines:
            parts.append("\n".join([f"### {title}\n", heading, *lines]))
    played = [line for name, run in kept.items() for line in played_with(name, run)]
    return "\n\n".join([*parts, *(["Played with:\n\n" + "\n".join(played)] if played else [])])


def played_with(name: str, run: ReadFolder) -> Iterator[str]:
    """Yield a line on the machines of a run, its commit and its settings of its own; runs of old did not record it."""
    facts = [
        ", ".join(str(part) for part in (machine.get("gpu") or machine.get("processor"), f"torch {machine['torch']}"))
        for machine in run.setup.machines
        if "torch" in machine
    ]
    with suppress(FileNotFoundError):
        about = parse_json((run.summary.path / CELL).read_bytes())
        facts += [f"commit {about['commit']}"] if about.get("commit") else []
        facts += [f"`{setting}`" for setting in about.get("settings", ())]
    if facts:
        yield f"- {name}: {'; '.join(dict.fromkeys(facts))}"


def between_marks(page: str, made: str) -> str:
    """Return the page with what is between its two marks replaced."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ConfigError(f"the page lacks one of the lines between which the tables stand: {BEGIN} and {END}")
    return f"{before}{begin}\n\n{made}\n\n{end}{after}"
