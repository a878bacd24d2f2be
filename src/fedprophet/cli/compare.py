"""`fedprophet compare`: runs side by side, as in the paper's main table."""

import os
from pathlib import Path
from typing import Annotated

import typer

from fedprophet.cli.options import open_folder, print_result, tell
from fedprophet.report.compare import Comparison, compare
from fedprophet.report.figures import check_plots, comparison_png
from fedprophet.report.tables import csv_text, document, markdown, page, wire_csv
from fedprophet.storage.files import write_atomic_all

STEM = "comparison"
WIRE = "wire.csv"
"""The bytes of each round, where any run has counted them."""


def compare_command(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="The folders of runs, of any methods.")],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help=f"Also write {STEM}.md, {STEM}.csv and {STEM}.png to this folder, and {WIRE} for runs on Flower.",
        ),
    ] = None,
    plot: Annotated[bool, typer.Option("--plot/--no-plot", help="With --out: draw the figure too.")] = True,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON: accuracies in [0, 1], bytes, seconds.")] = False,
) -> None:
    """Compare runs: accuracy, memory, simulated time and the speed-up over jFAT.

    Runs that differ only in their seed share a row. Each dataset and fleet has its own tables. Piped output is
    Markdown.

    Examples:

      fedprophet compare runs/*

      fedprophet compare runs/digits-jfat-1 runs/digits-fedprophet-1 --out comparison
    """
    if out is not None and plot:
        check_plots()
    comparison = compare(runs)
    open_folder(out)  # before anything is printed, and only for runs that can be read
    print_result(document(comparison), page(comparison), json_)
    if out is not None:
        tell(f"written: {', '.join(map(str, _write(comparison, out, plot)))}", err=True)


def _write(comparison: Comparison, out: Path, plot: bool) -> list[Path]:
    picture, sheet, wire = out / f"{STEM}.png", out / WIRE, wire_csv(comparison)
    files = {
        # Names of folders that are no valid text are written as they are.
        out / f"{STEM}.md": os.fsencode(markdown(comparison, picture.name if plot else None)),
        out / f"{STEM}.csv": os.fsencode(csv_text(comparison)),
        **({} if wire is None else {sheet: os.fsencode(wire)}),
        **({picture: comparison_png(comparison)} if plot else {}),
    }
    write_atomic_all(files.items())
    for old in (file for file in (picture, sheet) if file not in files and file.exists()):
        tell(f"note: {old} is from an earlier comparison", err=True)
    return list(files)
