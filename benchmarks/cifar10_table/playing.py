"""Cells played one after the other within a time, and what became of each."""

import math
import re
import time
import traceback
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fedprophet
from cifar10_table import measured
from cifar10_table.cells import Cell
from cifar10_table.closing import closing_lines
from cifar10_table.keeping import Keeping
from cifar10_table.measured import SUITE
from fedprophet.config.compare import differences
from fedprophet.config.config import Config, machine_keys
from fedprophet.config.load import load_config
from fedprophet.engines.row_attacks import ROWS
from fedprophet.errors import ConfigError, FedProphetError
from fedprophet.report.folders import read_folder
from fedprophet.runs.evaluation import evaluate_run
from fedprophet.runs.files import RunFiles, is_finished
from fedprophet.runs.journal import Journal
from fedprophet.runs.observer import Observer
from fedprophet.runs.run import RunStoppedError, open_to_read
from fedprophet.server.coordinator import Record

now = time.monotonic
SHOWN_EVERY = 20
TOGETHER = 1.0
"""Answers of a batch of rows come within so many seconds of each other."""
PUT_OFF = "finished, AutoAttack put off"


class Within(Observer):
    """Stops a run at the end of the last round for which there is time, as Ctrl-C does; shows how it goes.

    From `settle` on it stops at a new best round, too: a run that is saved there has one model, and is packed in half
    the space. A round that takes much longer than those before it, and the closing evaluation, are stopped when time is
    over, at the next client's answer: the round is played again.
    """

    def __init__(self, cell: str, last: float, settle: float = math.inf) -> None:
        self._cell, self._last, self._settle = cell, last, settle
        self._recent: list[float] = []

    def started(self, session: object, path: Path, round: int) -> None:
        print(f"{self._cell}: {f'goes on after round {round}' if round else 'begins'}", flush=True)

    def note(self, text: str) -> None:
        print(f"{self._cell}: {text}", flush=True)

    def task_done(self, kind: str, done: int, total: int) -> None:
        if now() > self._last:
            raise KeyboardInterrupt

    def round_done(self, record: Record, seconds: float) -> None:
        if record["round"] % SHOWN_EVERY == 0 or "fixed" in record:
            module = f" (module {record['module']})" if "module" in record else ""
            print(f"{self._cell}: round {record['round']}{module}{reached(record)}, {seconds:.2f} s", flush=True)
        self._recent = [*self._recent[-9:], seconds]
        settled = now() > self._settle and record.get("best_round") == record["round"]
        if settled or now() + max(self._recent) > self._last:
            raise KeyboardInterrupt


@dataclass
class Measuring:
    """Stops a measurement at the time `last`. AutoAttack is put off before a batch of rows for which there is no time.

    A batch takes `batch_seconds`, and the answers of its clients come together when it is over: all are taken in. Where
    an answer within a batch has to be waited for, clients are attacked one by one, which stops at any of them.
    """

    samples: int
    last: float
    batch_seconds: float
    put_off: bool = False
    _before: float = math.inf

    def watch(self, what: str, done: int, total: int | None) -> None:
        """Take in how far a measurement is."""
        over, waited = now() > self.last, now() > self._before + TOGETHER
        self._before = now()
        if what.startswith(SUITE) and total:
            clients = max(1, ROWS // math.ceil(self.samples / total))
            begins = done < total and done % clients == 0
            self.put_off = begins and now() + self.batch_seconds > self.last
            over = over and waited and done % clients > 1
        if over or self.put_off:
            raise KeyboardInterrupt


def reached(record: Record) -> str:
    """Return a round's accuracies as text; nothing where none was measured."""
    if not record.get("samples"):
        return ""
    return f": clean {100 * record['clean']:.1f} %, PGD {100 * record['adversarial']:.1f} %"


@dataclass(frozen=True)
class Outcome:
    """What became of a cell."""

    cell: str
    state: str
    rounds: int = 0
    played: int = 0
    seconds: float = 0.0


def play_cell(path: Path, config: Config, within: Within) -> str:
    """Start a run or go on with it; return what became of it."""
    files = RunFiles(path)
    if is_finished(files):
        return "finished before"
    try:
        if not files.config.exists():
            fedprophet.train(config, out=path, observer=within)
        else:
            fedprophet.resume(path, observer=within)
    except RunStoppedError:
        return "stopped"
    return "finished"


def expect_same(config: Config, run: Path) -> None:
    """Refuse to go on with a run of other settings."""
    if not RunFiles(run).config.exists():
        return
    differs = differences(config, load_config(RunFiles(run).config), machine_keys())
    if differs:
        raise ConfigError(f"{run} has other settings ({'; '.join(differs)}). Give the same ones, or move it away")


def measure(path: Path, measuring: Measuring) -> str:
    """Measure a finished run's clients with AutoAttack, too, or go on with that; return how far it came."""
    if measured.is_measured(path, measuring.samples):
        return "finished, AutoAttack measured before"
    if now() + measuring.batch_seconds > measuring.last:
        return PUT_OFF
    run = open_to_read(path)
    with closing(run.session):
        try:
            # The table has personalised accuracies; AutoAttack on the exported model would take as long again.
            evaluate_run(run, measured.ATTACKS, measuring.samples, False, measuring.watch, of="personalised")
        except RunStoppedError:
            return PUT_OFF if measuring.put_off else "finished, AutoAttack stopped"
    return "finished, AutoAttack measured"


@dataclass(frozen=True)
class Playing:
    """How cells are played: for how long, where, with which settings, and what is kept of them.

    Of the seconds, `reserve` are for what comes after the rounds; from `settle` before that on, a run is stopped at its
    next best round. `given` are settings of the machine, `settings` those that the runs are said to have. Finished runs
    are measured with AutoAttack on so many samples, where `batch_seconds` for a batch of rows are left.
    """

    seconds: float
    reserve: float
    settle: float
    runs: Path
    keeping: Keeping
    given: Sequence[str] = ()
    settings: Sequence[str] = ()
    commit: str = ""
    autoattack: int = 0
    batch_seconds: float = 0.0

    def about(self, cell: Cell) -> dict[str, Any]:
        """Return what is written down of a run, with the names of files instead of their paths."""
        own = [re.sub("=/.*/", "=", setting) for setting in self.settings]
        return {"cell": cell.name, "preset": cell.row.preset, "settings": own, "commit": self.commit}


def play_cells(cells: Sequence[Cell], playing: Playing) -> list[Outcome]:
    """Play cells one after the other until all are finished or time is over.

    What is wrong with the settings of any of them is said before the first one begins. A cell that fails later does not
    take the others their time.
    """
    last = now() + playing.seconds - playing.reserve
    configs = [cell.config([*playing.given, *playing.settings]) for cell in cells]
    for cell, config in zip(cells, configs, strict=True):
        expect_same(config, playing.runs / cell.name)
    outcomes: list[Outcome] = []
    for cell, config in zip(cells, configs, strict=True):
        path, began = playing.runs / cell.name, now()
        if began > last or any(outcome.state.endswith("stopped") for outcome in outcomes):
            outcomes.append(Outcome(cell.name, "no time left", rounds_of(path)))
            continue
        before = rounds_of(path)
        state = what_became_of(cell, config, last, playing)
        rounds = rounds_of(path)
        outcomes.append(Outcome(cell.name, state, rounds, rounds - before, now() - began))
    return outcomes


def what_became_of(cell: Cell, config: Config, last: float, playing: Playing) -> str:
    """Play a cell until it is finished or time is over, keep and measure it; return what became of it."""
    path = playing.runs / cell.name
    settle = last - playing.settle if playing.keeping.packs and playing.settle else math.inf
    try:
        playing.keeping.give_back(path)
        with playing.keeping.kept(path, playing.about(cell)):
            state = play_cell(path, config, Within(cell.name, last, settle))
            if state.startswith("finished") and playing.autoattack and now() < last:
                state = measure(path, Measuring(playing.autoattack, last, playing.batch_seconds))
    except FedProphetError as error:
        return failed(error)
    except RuntimeError as error:  # of torch and Triton, such as memory that a GPU does not have
        traceback.print_exc()
        return failed(error)
    return state


def failed(error: Exception) -> str:
    """Return an error as what became of a cell, on one line."""
    return f"failed: {' '.join(str(error).split()) or type(error).__name__}"


def rounds_of(run: Path) -> int:
    """Return how many rounds of a run are played and saved or finished."""
    lines = Journal(RunFiles(run).journal).read()
    return len(lines)


def outcome_table(outcomes: Sequence[Outcome], seconds: float) -> str:
    """Return what was played as a Markdown table, and the wall-clock seconds of the whole."""
    lines = ["| cell | state | rounds | played now | seconds |", "| --- | --- | --- | --- | --- |"]
    for outcome in outcomes:
        numbers = f"{outcome.rounds:,} | {outcome.played:,} | {outcome.seconds:,.0f}"
        lines.append(f"| {outcome.cell} | {outcome.state} | {numbers} |")
    return "\n".join([*lines, "", f"{seconds:,.0f} s in all"])


def closing_text(outcomes: Sequence[Outcome], runs: Path) -> str:
    """Return what the finished cells have reached, a paragraph for each; nothing where none is finished."""
    finished = [outcome.cell for outcome in outcomes if is_finished(RunFiles(runs / outcome.cell))]
    return "\n\n".join("\n".join(closing_lines(name, read_folder(runs / name))) for name in finished)
