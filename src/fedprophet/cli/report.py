"""`fedprophet report`: runs as a page that is read in two minutes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fedprophet.cli.options import print_json, tell
from fedprophet.errors import FedProphetError
from fedprophet.report.document import report_of
from fedprophet.report.page import write_page
from fedprophet.runs.files import RunFiles


def report_command(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="The folders of runs, finished or not.")],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The page. Default: report.html in the run's folder; here for several runs."),
    ] = None,
    json_: Annotated[
        bool, typer.Option("--json", help="Print the page's numbers as JSON, and write the page only with --out.")
    ] = False,
) -> None:
    """Make a page of one run, or of several laid over each other: one HTML file that needs no network.

    It has the accuracies, the modules and their memory, the attack of each stage, who trained what, simulated time,
    bytes on the wire, dropped updates and the machine.

    Examples:

      fedprophet report runs/digits-fedprophet-1

      fedprophet report runs/digits-fedprophet-1 runs/digits-jfat-1 --out comparison.html
    """
    report = report_of(runs)
    file = out or (None if json_ else _beside(runs))
    if file is not None:
        write_page(report, file)
    if json_:
        print_json(report.to_json())
    else:
        tell(f"Report: {file}")


def make_report(run: Path, quietly: bool = False) -> None:
    """Make a page of a finished run, which is whole without it, and say where it is."""
    file = RunFiles(run).report
    try:
        write_page(report_of([run]), file)
    except (FedProphetError, OSError) as error:
        tell(f"note: no report was made: {error}", err=True)
        return
    if not quietly:
        tell(f"Report: {file}")


def _beside(runs: Sequence[Path]) -> Path:
    (first, *others) = {run.resolve(): run for run in runs}.values()
    return Path("report.html") if others else RunFiles(first).report
