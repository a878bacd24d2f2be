"""Tables, written for a terminal, as Markdown or as CSV.

In a terminal a page is printed with rich, a wide table in several pieces; piped output is Markdown.
"""

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from fedprophet.console import console_on
from fedprophet.display.lines import say
from fedprophet.display.numbers import NONE

WORDS_WIDTH, LONGEST_WORD = 25, 36
"""Columns of words are wrapped at this width where space is short; a longer word is broken only beyond the second."""
GAP = 2


@dataclass(frozen=True)
class Column:
    """A column: its heading, the group of columns it is part of, and how its values are written.

    Numbers are aligned to the right and never wrapped; `words` are aligned to the left and may be wrapped.
    """

    heading: str
    group: str = ""
    form: Callable[[Any], str] = str
    words: bool = False


@dataclass(frozen=True)
class Table:
    """Values in rows and columns; None is a value that is not known.

    The first `labels` columns say what a row is about. They are words, and every piece of a wide table repeats them.
    """

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Any, ...], ...]
    labels: int = 1

    def cells(self, none: str = NONE) -> list[list[str]]:
        return [
            [none if value is None else column.form(value) for column, value in zip(self.columns, row, strict=True)]
            for row in self.rows
        ]

    def is_words(self, number: int) -> bool:
        """Whether a column is aligned to the left."""
        return number < self.labels or self.columns[number].words


@dataclass(frozen=True)
class Page:
    """A title, lines, tables, further pages and notes, in this order. `figure` is Markdown that names a picture."""

    title: str
    tables: tuple[Table, ...] = ()
    lines: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    parts: tuple["Page", ...] = ()
    figure: str = ""


def show(page: Page, console: Console | None = None) -> None:
    """Print a page: laid out in a terminal, as Markdown elsewhere."""
    console = console or console_on()
    if console.is_terminal:
        _print(page, console)
    else:
        console.out(markdown(page), end="", highlight=False)


# Markdown and CSV ----------------------------------------------------------------------------------------------------


def markdown(page: Page) -> str:
    return "\n\n".join(_blocks(page, 1)) + "\n"


def _blocks(page: Page, level: int) -> Iterator[str]:
    yield f"{'#' * level} {page.title}"
    if page.lines:
        yield _bullets(page.lines)
    if page.figure:
        yield page.figure
    for table in page.tables:
        if table.title:
            yield f"{'#' * (level + 1)} {table.title}"
        yield markdown_table(table)
    for part in page.parts:
        yield from _blocks(part, level + 1)
    if page.notes:
        yield _bullets(page.notes)


def _bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def markdown_table(table: Table) -> str:
    """Return a table as Markdown with padded cells, so that it can be read as plain text too."""
    headings = [f"{column.group} {column.heading}".strip() for column in table.columns]
    lines = [[cell.replace("|", "\\|") for cell in line] for line in (headings, *table.cells())]
    widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
    left = [table.is_words(number) for number in range(len(widths))]
    lines.insert(
        1, ["-" * width if words else f"{'-' * (width - 1)}:" for words, width in zip(left, widths, strict=True)]
    )
    padded = (
        [
            cell.ljust(width) if words else cell.rjust(width)
            for cell, words, width in zip(line, left, widths, strict=True)
        ]
        for line in lines
    )
    return "\n".join(f"| {' | '.join(line)} |" for line in padded)


def csv_text(table: Table) -> str:
    """Return a table as CSV; a value that is not known is empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(column.heading for column in table.columns)
    writer.writerows(table.cells(none=""))
    return text.getvalue()


# Terminal ------------------------------------------------------------------------------------------------------------


def _print(page: Page, console: Console) -> None:
    say(console, page.title, "bold")
    for line in page.lines:
        say(console, line)
    for table in page.tables:
        if table.title:
            say(console, f"\n{table.title}")
        for piece in _pieces(table, console.width):
            console.print(piece)
    for part in page.parts:
        console.print()
        _print(part, console)
    if page.notes:
        console.print()
    for note in page.notes:
        say(console, f"· {note}", "dim")


def _pieces(table: Table, width: int) -> Iterator[RichTable]:
    """Yield the table in as many pieces as the width asks for, so that no number is wrapped or cut."""
    cells = table.cells()
    widths = [_width(table, number, cells) for number in range(len(table.columns))]
    labels = list(range(table.labels))
    room = width - sum(widths[number] + GAP for number in labels)
    pieces: list[list[int]] = [[]]
    left = room
    for number in range(table.labels, len(widths)):
        if pieces[-1] and left < widths[number]:
            pieces.append([])
            left = room
        pieces[-1].append(number)
        left -= widths[number] + GAP
    for piece in pieces:
        yield _rich(table, [*labels, *piece], cells, widths)


def _width(table: Table, number: int, cells: Sequence[Sequence[str]]) -> int:
    column = table.columns[number]
    natural = max(map(len, (column.group, column.heading, *(row[number] for row in cells))))
    if not table.is_words(number):
        return natural
    longest = max(map(len, (word for row in cells for word in row[number].split())), default=0)
    return min(natural, max(WORDS_WIDTH, min(longest, LONGEST_WORD)))


def _rich(table: Table, chosen: Sequence[int], cells: Sequence[Sequence[str]], widths: Sequence[int]) -> RichTable:
    made = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    grouped, previous = any(table.columns[number].group for number in chosen), ""
    for number in chosen:
        column = table.columns[number]
        # A group is named above its first column only.
        above = f"{'' if column.group == previous else column.group}\n" if grouped else ""
        previous = column.group
        if table.is_words(number):
            made.add_column(above + column.heading, min_width=widths[number], overflow="fold")
        else:
            made.add_column(above + column.heading, justify="right", no_wrap=True)
    for row in cells:
        made.add_row(*(Text(row[number]) for number in chosen))
    return made
