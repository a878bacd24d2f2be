"""A run while it is trained: a live display in a terminal, plain lines everywhere else."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from fedprophet.display.numbers import NONE, counted, percent
from fedprophet.durations import clock, format_duration
from fedprophet.errors import CheckpointError
from fedprophet.methods.refresh import measured_text
from fedprophet.methods.registry import METHODS
from fedprophet.runs.files import RunFiles, is_finished, read_results
from fedprophet.runs.journal import Journal
from fedprophet.runs.observer import Observer
from fedprophet.runs.outline import Outline, outline_of
from fedprophet.runs.session import Session
from fedprophet.server.coordinator import Record
from fedprophet.sizes import format_size

WORK_NAMES: Mapping[str, str] = {
    "report": "asking clients",
    "train": "training",
    "evaluate": "evaluating",
    "measure": "measuring perturbations",
    "predict": "predicting the public set",
    "distill": "distilling",
    "adopt": "passing statistics on",
    "refresh": "measuring norm statistics",
}
"""What a kind of task is called; a kind that is not here is called by its own name."""
SHOWN = 8
"""The most missing clients that are named; the journal has all."""
ACCURACIES = ("clean", "PGD")


# A round -------------------------------------------------------------------------------------------------------------


class RunProgress:
    """How far a run is, and the time left at most: a stage may converge early."""

    def __init__(self, outline: Outline) -> None:
        self.outline = outline
        self.done = 0
        self._seconds: list[float] = []

    def round_done(self, record: Record, seconds: float | None) -> None:
        """Count a round; None: how long it took is not known."""
        # Stages that converged early had fewer rounds than the bar gives them, so a round's number is not its place.
        self.done = self.outline.place(record)
        if seconds is not None:
            self._seconds.append(seconds)

    @property
    def pace(self) -> float | None:
        """The mean of the last rounds' seconds; None while there is none to go by.

        The first round of a process does not count: caches are empty, and kernels are not compiled.
        """
        recent = self._seconds[1:][-10:]
        return sum(recent) / len(recent) if recent else None

    @property
    def seconds_left(self) -> int | None:
        """The seconds left at most; None while they cannot be told."""
        if self.pace is None or self.outline.total is None:
            return None
        return math.ceil((self.outline.total - self.done) * self.pace)

    @property
    def left(self) -> str:
        """The time left at most, in words; "" while it cannot be told."""
        return "" if self.seconds_left is None else f"at most about {clock(self.seconds_left)} left"


def facts_of(record: Record, outline: Outline) -> dict[str, str]:
    """Return what a person wants to know of a round, in the order it is shown."""
    if "refresh" in record:
        return {"round": str(record["round"]), "norm statistics": measured_text(record)}
    rounds = outline.config.rounds
    facts = {"round": f"{record['round']}/{rounds}"}
    if "module" in record:
        of = "" if outline.modules is None else f"/{outline.modules}"
        facts = {"round": str(record["round"]), "module": f"{record['module']}{of}"}
        facts["of stage"] = f"{record['stage_round']}/{rounds}"
    facts["eps"] = f"{float(record['epsilon']):.3f}" if record["adversarial_training"] else "warm-up"
    if record.get("alpha") is not None:
        facts["alpha"] = f"{record['alpha']:.2f}"
    shown = METHODS[outline.config.method].method.shown
    if shown is not None:
        facts[shown.label] = shown.text(record)
    facts["loss"] = NONE if record["loss"] is None else f"{float(record['loss']):.3f}"
    if "samples" in record:
        facts |= zip(ACCURACIES, map(percent, (record["clean"], record["adversarial"])), strict=True)
    return facts


def lines_of(record: Record, seconds: float | None, progress: RunProgress) -> Iterator[str]:
    """Yield a round as plain lines: its facts and the time, then what was unusual."""
    facts = "  ".join(f"{name} {value}" for name, value in facts_of(record, progress.outline).items())
    took = ", ".join(filter(None, ("" if seconds is None else format_duration(seconds), progress.left)))
    yield f"{facts}  ({took})" if took else facts
    yield from events_of(record)


def events_of(record: Record) -> Iterator[str]:
    """Yield what was unusual in a round, and a module that was fixed in it."""
    yield from (f"round {record['round']}: {text}" for text in _troubles(record))
    if "fixed" in record:
        fixed = record["fixed"]
        reached = f"clean {percent(fixed['clean'])}, PGD {percent(fixed['adversarial'])}"
        how = f"at its best round {fixed['round']}: {reached}"
        if fixed["clean"] is None:
            how = f"as it was in round {fixed['round']}: nobody evaluated it"
        yield f"module {fixed['module']} fixed {how}"
        if record.get("refreshed"):
            yield f"norm statistics of module {fixed['module']} {measured_text(record)}"


def _troubles(record: Record) -> Iterator[str]:
    for client, reason in record["dropped"].items():
        yield f"client {client} was dropped: {reason}"
    for kind, clients in record.get("missing", {}).items():
        yield f"no answer from {_clients(clients)} ({WORK_NAMES.get(kind, kind)})"
    for client, reason in record.get("faults", {}).items():
        yield f"client {client} failed: {reason}"
    if "too_few" in record:
        few = record["too_few"]
        answers = counted(few["usable"], "usable answer")
        yield f"{answers}, fewer than aggregate.minimum = {few['minimum']}: nothing was averaged"
    if "not_refreshed" in record:
        missed = record["not_refreshed"]
        answers = f"{counted(missed['usable'], 'usable answer')}, aggregate.minimum = {missed['minimum']}"
        yield f"the norm statistics of {', '.join(missed['layers'])} stay as they were ({answers})"
    if "postponed" in record:
        yield f"no client measured module {record['postponed']['module']}, so it trains for another round"
    if "best_round" in record and record["best_round"] is None:
        yield "no client evaluated any round; the last round's model is used"
    for name, loss in record.get("distillation", {}).items():
        if loss is None:
            yield f"the distillation of {name} diverged: not used"


def _clients(clients: Sequence[int]) -> str:
    shown = ", ".join(map(str, clients[:SHOWN])) + (f" and {len(clients) - SHOWN} more" if len(clients) > SHOWN else "")
    return f"client{'s' if len(clients) > 1 else ''} {shown}"


def headline(outline: Outline, path: Path, round: int = 0, finished: bool = False) -> str:
    """Return what a run is and where, and the round that it goes on after, if it is not finished."""
    config = outline.config
    what = f"{config.method} on {outline.dataset}: {config.model.name}{_cut(outline)}"
    what += f", {config.population.cohort} of {config.population.clients} clients a round"
    goes_on = f"; going on after round {round}" if round else ""
    if finished:
        goes_on = f"; finished after round {round}; nothing is left to do"
    return f"{what}{goes_on}\nrun: {path}"


def _is_over(path: Path, round: int) -> bool:
    """Whether a run has the results of this round; one that was taken back to an earlier round goes on."""
    with suppress(CheckpointError):
        return is_finished(RunFiles(path)) and read_results(path).get("rounds") == round
    return False


def _cut(outline: Outline) -> str:
    if outline.modules is None or outline.budget is None or outline.whole is None:
        return ""
    budget, whole = format_size(outline.budget), format_size(outline.whole)
    if outline.modules > 1:
        return f" in {outline.modules} modules of at most {budget} (whole model {whole})"
    return f" (whole model {whole}; every client has at least {budget} available)"


# The displays --------------------------------------------------------------------------------------------------------


def observer_for(console: Console) -> "PlainLines":
    """Return the live display in a terminal, plain lines elsewhere."""
    return LiveDisplay(console) if console.is_terminal else PlainLines(console)


class PlainLines(Observer):
    """One line for each round; quiet in between."""

    _progress: RunProgress
    _soft_wrap = True

    def __init__(self, console: Console) -> None:
        self._console = console

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is left to clean up."""

    def started(self, session: Session, path: Path, round: int) -> None:
        outline = outline_of(session)
        self._progress = RunProgress(outline)
        for record in Journal(RunFiles(path).journal).read() if round else ():
            if record["round"] == round:
                self._progress.round_done(record, None)
        self._print(headline(outline, path, round, _is_over(path, round)))

    def note(self, text: str) -> None:
        self._print(f"note: {text}")

    def round_done(self, record: Record, seconds: float) -> None:
        self._progress.round_done(record, seconds)
        for line in lines_of(record, seconds, self._progress):
            self._print(line)

    def finishing(self) -> None:
        self._print("evaluating the trained model")

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=self._soft_wrap)


class LiveDisplay(PlainLines):
    """A bar, the round's facts and the work at hand, redrawn in place; events stay above it."""

    _soft_wrap = False

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._bar = Progress(BarColumn(40), TextColumn("{task.description}"), console=console)
        self._task = self._bar.add_task("starting")
        self._facts: dict[str, str] = {}
        self._work = "starting"
        self._live = Live(self._render(), console=console, refresh_per_second=8, transient=True)
        self._drawn = 0.0

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def started(self, session: Session, path: Path, round: int) -> None:
        super().started(session, path, round)
        self._bar.update(self._task, total=self._progress.outline.total, completed=self._progress.done)

    def task_done(self, kind: str, done: int, total: int) -> None:
        """Show the work at hand; redraws are rationed, because tasks can be very short."""
        self._work = f"{WORK_NAMES.get(kind, kind)} {done}/{total}"
        if time.monotonic() - self._drawn > 0.1:
            self._draw()

    def round_done(self, record: Record, seconds: float) -> None:
        """Show the round's facts; the accuracies of an evaluation stay until the next one."""
        self._progress.round_done(record, seconds)
        facts = facts_of(record, self._progress.outline)
        reached = {name: self._facts[name] for name in ACCURACIES if name in self._facts and name not in facts}
        self._facts = facts | reached
        for line in events_of(record):
            self._print(line)
        self._bar.update(self._task, completed=self._progress.done, description=self._progress.left)
        self._draw()

    def finishing(self) -> None:
        self._bar.update(self._task, completed=self._progress.outline.total, description="evaluating the trained model")
        self._draw()

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        self._live.update(self._render())

    def _render(self) -> Group:
        facts = (Text.assemble((f"{name} ", "dim"), f"{value}   ") for name, value in self._facts.items())
        return Group(Text.assemble(*facts), self._bar, Text(self._work, style="dim"))
