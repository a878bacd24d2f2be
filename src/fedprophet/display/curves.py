"""Curves in a terminal, made of blocks of an eighth of a row, with a line where a stage begins."""

from collections.abc import Collection, Sequence

BLOCKS = " ▁▂▃▄▅▆▇█"
BORDER = "│"
WIDEST = 4
"""The most columns for one value."""


def spread(count: int, columns: int) -> list[range]:
    """Return which of `count` values each column shows: several, or where there is room, one in several columns."""
    if count > columns:
        return [range(column * count // columns, (column + 1) * count // columns) for column in range(columns)]
    each = min(columns // max(count, 1), WIDEST)
    return [range(index, index + 1) for index in range(count) for _ in range(each)]


def edges(parts: Sequence[range], borders: Collection[int]) -> list[bool]:
    """Return in which columns a stage begins; `borders` are the values that it begins with."""
    before = [range(0), *parts]
    return [part != last and any(index in part for index in borders) for last, part in zip(before, parts, strict=False)]


def area(shares: Sequence[float | None], borders: Collection[int], columns: int, rows: int) -> list[str]:
    """Return a curve of shares (0 … 1) as lines of text, the highest first.

    A column shows the mean of its values; if none is known, that of the column before it.
    """
    parts = spread(len(shares), columns)
    heights, last = [], 0.0
    for part in parts:
        known = [share for share in (shares[index] for index in part) if share is not None]
        last = sum(known) / len(known) if known else last
        heights.append(round(8 * rows * last))
    lines = zip(heights, edges(parts, borders), strict=True)
    cells = [
        [BORDER if edge else BLOCKS[min(max(height - 8 * row, 0), 8)] for row in range(rows)] for height, edge in lines
    ]
    return ["".join(column[row] for column in cells) for row in reversed(range(rows))]


def axis(names: Sequence[str], borders: Sequence[int], count: int, columns: int) -> str:
    """Return a line that names the stages: the first at the left, the others behind their borders, if there is room."""
    parts = spread(count, columns)
    starts = [0, *(column for column, edge in enumerate(edges(parts, borders)) if edge)]
    line = [" "] * len(parts)
    for name, start, end in zip(names, starts, [*starts[1:], len(parts)], strict=False):
        text = f"{BORDER if start else ''}{name}"
        line[start:end] = f"{text if len(text) <= end - start else BORDER[: bool(start)]:{end - start}}"
    return "".join(line)
