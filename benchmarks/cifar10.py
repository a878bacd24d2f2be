"""The cells of the paper's CIFAR-10 table: played in bounded time, kept, and made into a table and a figure.

    python benchmarks/cifar10.py cells                                   # their names, and which are kept already
    python benchmarks/cifar10.py play balanced-fedprophet-seed0 balanced-heterofl-seed0 --seconds 540 \
        --data data --weights FILE --runs runs --save kept --pack        # again, until all are finished
    python benchmarks/cifar10.py bring kept                              # finished runs, into results/cifar10/
    python benchmarks/cifar10.py table --write                           # the tables in results/cifar10.md
    python benchmarks/cifar10.py figure                                  # results/cifar10.svg

A cell that is there is resumed, a finished one is skipped, and when the seconds are nearly over a run is stopped at a
round's end, with its checkpoint. What is needed elsewhere lies in --save at all times: each run's small files, and with
--pack what `fedprophet runs unpack` makes the run of again. On another machine give --data and --weights the same
values: they are part of a run's configuration.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from cifar10_table import playing
from cifar10_table.bringing import bring_all, read_kept
from cifar10_table.cells import CELLS, known
from cifar10_table.figure import figure
from cifar10_table.keeping import MOST, SMALL, Keeping
from cifar10_table.tables import between_marks, tables
from machine import commit

from fedprophet.cli.stopping import stopped_once
from fedprophet.engines.row_attacks import ROWS
from fedprophet.errors import ConfigError, FedProphetError
from fedprophet.sizes import parse_size

PAGE = Path(__file__).parent / "results" / "cifar10.md"
KEPT_BACK = 20.0
"""Seconds at the end for the checkpoint, the small files and the pack."""


def arguments_of(words: Sequence[str] | None) -> argparse.Namespace:
    """Return what is asked for; its `run` does it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, default=PAGE, help="the page; its runs are in a folder beside it")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("cells", help="list the cells").set_defaults(run=list_cells)
    add_playing(commands.add_parser("play", help="play cells until the seconds are over"))
    bringing = commands.add_parser("bring", help="take finished runs into the repository")
    bringing.set_defaults(run=bring)
    bringing.add_argument("folder", type=Path, metavar="DIR")
    table = commands.add_parser("table", help="print the tables")
    table.set_defaults(run=tabulate)
    table.add_argument("--write", action="store_true", help="put them into the page")
    commands.add_parser("figure", help="draw the curves").set_defaults(run=draw)
    return parser.parse_args(words)


def add_playing(parser: argparse.ArgumentParser) -> None:
    """Add what `play` is told."""
    parser.set_defaults(run=play)
    add = parser.add_argument
    add("cells", nargs="+", metavar="CELL")
    add("--seconds", type=float, required=True, help="of wall-clock time for everything")
    add("--reserve", type=float, default=KEPT_BACK, help="of these, for what comes after the rounds")
    add("--settle", type=float, default=30.0, help="with --pack, before that: stop at the next best round; 0: do not")
    add("--data", default="", help="the folder of CIFAR-10 (data.root)")
    add("--weights", default="", help="the starting weights (model.weights)")
    add("--runs", type=Path, required=True, help="the folder of the runs")
    add("--save", type=Path, required=True, help="the folder for what is to be kept")
    add("--save-every", type=float, default=60.0, metavar="SECONDS")
    add("--pack", nargs="?", choices=("all", "unfinished"), const="all", default="", help="keep packed runs, too")
    add("--most", type=parse_size, default=MOST, metavar="SIZE", help="of all that is kept; default: 60MiB")
    add("--autoattack", type=int, default=0, metavar="N", help="measure finished runs' clients on N samples")
    add(
        "--batch-seconds",
        type=float,
        default=120.0,
        help=f"what AutoAttack takes for {ROWS} samples: begin only with so much left",
    )
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="for all cells")
    add("--commit", default=commit(), help="what is written down as the commit")


def list_cells(arguments: argparse.Namespace) -> int:
    """Print the names of all cells, and which are kept."""
    kept = read_kept(arguments.page.with_suffix(""))
    print("\n".join(f"{name}{'  (kept)' if name in kept else ''}" for name in CELLS))
    return 0


def play(arguments: argparse.Namespace) -> int:
    """Play cells, and say what became of them."""
    given = {"data.root": arguments.data, "model.weights": arguments.weights}
    how = playing.Playing(
        arguments.seconds,
        arguments.reserve,
        arguments.settle,
        arguments.runs,
        Keeping(arguments.save, arguments.save_every, arguments.pack, arguments.autoattack, arguments.most),
        [f"{key}={value}" for key, value in given.items() if value],
        arguments.set,
        arguments.commit,
        arguments.autoattack,
        arguments.batch_seconds,
    )
    if arguments.seconds <= 0:
        raise ConfigError(f"--seconds {arguments.seconds:g}: give a number above 0")
    began = playing.now()
    outcomes = playing.play_cells([known(name) for name in arguments.cells], how)
    print(playing.outcome_table(outcomes, playing.now() - began))
    reached = playing.closing_text(outcomes, arguments.runs)
    if reached:
        print(f"\n{reached}")
    return int(any(outcome.state.startswith("failed") for outcome in outcomes))


def bring(arguments: argparse.Namespace) -> int:
    """Take finished runs into the folder beside the page."""
    if not any(arguments.folder.glob(f"*{SMALL}")):
        raise ConfigError(f"{arguments.folder} has no run to bring: no file *{SMALL}. Give the folder of --save")
    return int(bring_all(arguments.folder, arguments.page.with_suffix("")) > 0)


def tabulate(arguments: argparse.Namespace) -> int:
    """Print the tables, and put them into the page if that is asked for."""
    page: Path = arguments.page
    if not page.is_file():
        raise ConfigError(f"there is no page {page}. Give one with --page")
    made = tables(read_kept(page.with_suffix("")))
    print(made)
    if arguments.write:
        page.write_text(between_marks(page.read_text("utf-8"), made), "utf-8")
    return 0


def draw(arguments: argparse.Namespace) -> int:
    """Draw the curves beside the page."""
    page: Path = arguments.page
    page.with_suffix(".svg").write_bytes(figure(read_kept(page.with_suffix(""))))
    return 0


def main(words: Sequence[str] | None = None) -> int:
    """Do what is asked for, and say what is wrong without a traceback."""
    try:
        arguments = arguments_of(words)
        return int(arguments.run(arguments))
    except FedProphetError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    with stopped_once():
        code = main()
    sys.exit(code)
