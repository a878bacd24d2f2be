"""The tables of the page: our numbers beside the paper's, and what the runs were played with."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from cifar10_table.bringing import Kept
from cifar10_table.cells import GROUPS, Group, Row
from cifar10_table.columns import COLUMNS
from cifar10_table.keeping import CELL
from fedprophet.errors import ConfigError
from fedprophet.report.runs import ReadFolder
from fedprophet.reproduce.paper import numbers_of
from fedprophet.storage.files import parse_json

BEGIN = "<!-- Made by `python benchmarks/cifar10.py table --write`: change that program instead. -->"
END = "<!-- End of what is made. -->"
PAPER_COLUMNS: Mapping[str, tuple[str, ...]] = {"the paper": ("clean", "PGD"), "the paper's": ("AA",)}
"""The columns of the paper's numbers, and what these are called there."""


def papers(row: Row) -> dict[str, str]:
    """Return the paper's cells of a row."""
    if row.paper is None:
        return {}
    experiment, part, line = row.paper
    numbers = numbers_of(experiment, part)[line]
    return {
        column: " / ".join(f"{numbers[name].value:.1f}" for name in names)
        for column, names in PAPER_COLUMNS.items()
        if all(name in numbers for name in names)
    }


def row_lines(row: Row, columns: Sequence[str], kept: Kept) -> Iterator[str]:
    """Yield a line for each seed that was run, and that of their mean; the paper's numbers are in the last of them."""
    runs = {str(cell.seed): [kept[cell.name]] for cell in row.cells if cell.name in kept}
    if len(runs) > 1:
        runs["mean ± standard deviation"] = [run for (run,) in list(runs.values())]
    runs = runs or {", ".join(map(str, row.seeds)): []}
    for place, (seed, found) in enumerate(runs.items(), start=1):
        ours = {column: make(found) for column, make in COLUMNS.items()} if found else {}
        known = ours | (papers(row) if place == len(runs) else {})
        cells = [row.title, seed, *(known.get(column, "") for column in columns)]
        yield re.sub(" +", " ", f"| {' | '.join(cells)} |")


def table(group: Group, kept: Kept) -> str:
    """Return the table of a group under a heading."""
    heading = f"| method | seed | {' | '.join(group.columns)} |\n|{' --- |' * (len(group.columns) + 2)}"
    lines = (line for row in group.rows for line in row_lines(row, group.columns, kept))
    return "\n".join([f"### {group.title}\n", heading, *lines])


def tables(kept: Kept) -> str:
    """Return all tables, each under a heading, and what the runs were played with."""
    played = "\n".join(played_with(kept))
    return "\n\n".join([*(table(group, kept) for group in GROUPS), *([f"Played with:\n\n{played}"] if played else [])])


def played_with(kept: Kept) -> Iterator[str]:
    """Yield a line for the runs that were played with the same; runs of old did not record it."""
    alike: dict[str, list[str]] = {}
    for name, run in kept.items():
        alike.setdefault("; ".join(facts_of(run)), []).append(name)
    for facts, names in alike.items():
        if facts:
            yield f"- {', '.join(names)}: {facts}"


def facts_of(run: ReadFolder) -> list[str]:
    """Return the machines of a run, its commit and its settings of its own, each once."""
    facts = [
        ", ".join(str(part) for part in (machine.get("gpu") or machine.get("processor"), f"torch {machine['torch']}"))
        for machine in run.setup.machines
        if "torch" in machine
    ]
    with suppress(FileNotFoundError):
        about = parse_json((run.summary.path / CELL).read_bytes())
        facts += [f"commit {about['commit']}"] if about.get("commit") else []
        facts += [f"`{setting}`" for setting in about.get("settings", ())]
    return list(dict.fromkeys(facts))


def between_marks(page: str, made: str) -> str:
    """Return the page with what is between its two marks replaced."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ConfigError(f"the page lacks one of the lines between which the tables stand: {BEGIN} and {END}")
    return f"{before}{begin}\n\n{made}\n\n{end}{after}"
