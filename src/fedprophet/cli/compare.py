"""`fedprophet compare`: runs side by side, as in the paper's main table."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedprophet.cli.out import open_folder
from fedprophet.report.compare import Comparison, compare
from fedprophet.report.figures import check_plots, comparison_png
from fedprophet.report.notes import reading, setting_notes
from fedprophet.report.tables import TextTable, csv_text, document, markdown, run_lines, text_tables, wire_csv
from fedprophet.storage.files import write_atomic_all

STEM = "comparison"
WIRE = "wire.csv"
"""The bytes of each round, where any run has counted them."""
LABEL_WIDTH, GAP = 25, 3


def compare_command(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="The folders of runs, of any methods.")],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help=f"Also write {STEM}.md, {STEM}.csv and {STEM}.png there, and {WIRE} where runs were on Flower.",
        ),
    ] = None,
    plot: Annotated[bool, typer.Option("--plot/--no-plot", help="With --out: draw the figure too.")] = True,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON: accuracies in [0, 1], bytes, seconds.")] = False,
) -> None:
    """Put runs side by side: accuracy, memory, simulated time and the speed-up over jFAT.

    Runs that differ in their seed alone share a row; each dataset and fleet has its own tables. Output that is not
    read in a terminal is Markdown.

    Examples:

      fedprophet compare runs/*

      fedprophet compare runs/digits-jfat-1 runs/digits-fedprophet-1 --out comparison
    """
    if out is not None and plot:
        check_plots()
    comparison = compare(runs)
    if out is not None:
        open_folder(out)  # before anything is printed, and only for runs that can be read
    console = Console(highlight=False)
    if json_:
        typer.echo(json.dumps(document(comparison), indent=2))
    elif console.is_terminal:
        _show(comparison, console)
    else:
        typer.echo(markdown(comparison), nl=False)
    if out is not None:
        typer.echo(f"written: {', '.join(map(str, _write(comparison, out, plot)))}", err=True)


def _write(comparison: Comparison, out: Path, plot: bool) -> list[Path]:
    picture, sheet, wire = out / f"{STEM}.png", out / WIRE, wire_csv(comparison)
    files = {
        out / f"{STEM}.md": markdown(comparison, picture.name if plot else None).encode(),
        out / f"{STEM}.csv": csv_text(comparison).encode(),
        **({} if wire is None else {sheet: wire.encode()}),
        **({picture: comparison_png(comparison)} if plot else {}),
    }
    write_atomic_all(files.items())
    for old in (file for file in (picture, sheet) if file not in files and file.exists()):
        typer.echo(f"note: {old} is of an earlier comparison", err=True)
    return list(files)


def _show(comparison: Comparison, console: Console) -> None:
    for setting in comparison.settings:
        console.print(Text(setting.title, style="bold"), soft_wrap=True)
        for table in text_tables(setting):
            console.print(Text(f"\n{table.title}"), soft_wrap=True)
            for piece in _rich(table, console.width):
                console.print(piece)
        _lines(console, [*setting_notes(setting), *run_lines(setting)])
        console.print()
    _lines(console, [*reading(comparison), *comparison.notes])


def _lines(console: Console, lines: list[str]) -> None:
    for line in lines:
        console.print(f"· {line}", markup=False, style="dim", soft_wrap=True)


def _rich(table: TextTable, width: int) -> Iterator[Table]:
    """Yield the table for a terminal: in pieces where it is too wide, so that no number is wrapped or cut."""
    label = min(max(len(row[0]) for row in table.rows), LABEL_WIDTH)
    columns = list(zip(table.headings, *table.rows, strict=True))
    for piece in _pieces([_width(column) for column in columns[1:]], width - label):
        shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        shown.add_column(f"\n{table.headings[0][1]}", min_width=label, overflow="fold")
        previous = ""
        for number in piece:
            group, name = table.headings[number]
            # A group is named above its first column alone.
            shown.add_column(f"{'' if group == previous else group}\n{name}", justify="right", no_wrap=True)
            previous = group
        for row in table.rows:
            shown.add_row(Text(row[0]), *(Text(row[number]) for number in piece))
        yield shown


def _width(column: tuple[tuple[str, str], *tuple[str, ...]]) -> int:
    (group, name), *cells = column
    return max(map(len, (group, name, *cells)))


def _pieces(widths: list[int], room: int) -> list[list[int]]:
    """Return the numbers of the columns (from 1) that fit beside the label together."""
    pieces: list[list[int]] = [[]]
    left = room
    for number, width in enumerate(widths, start=1):
        if pieces[-1] and left < width + GAP:
            pieces.append([])
            left = room
        pieces[-1].append(number)
        left -= width + GAP
    return pieces
