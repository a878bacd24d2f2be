"""A run while it is trained: a live display in a terminal, plain lines everywhere else."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from fedprophet.display.numbers import NONE, percent
from fedprophet.durations import clock, format_duration
from fedprophet.methods.registry import METHODS
from fedprophet.runs.files import RunFiles
from fedprophet.runs.journal import Journal
from fedprophet.runs.observer import Observer
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


class _RunProgress:
    """How far a run is, and the time left at most: a stage may converge early."""

    def __init__(self, session: Session, path: Path, round: int) -> None:
        self.session = session
        self.total = len(session.world.modules) * session.config.rounds + session.world.refreshes
        self.done = 0
        self._seconds: list[float] = []
        # Stages that converged early had fewer rounds than the bar gives them, so a round's number is not its place.
        for record in Journal(RunFiles(path).journal).read() if round else ():
            if record["round"] == round:
                self._place(record)

    def round_done(self, record: Record, seconds: float) -> None:
        self._seconds.append(seconds)
        self._place(record)

    def _place(self, record: Record) -> None:
        rounds = self.session.config.rounds
        if "refresh" in record:
            self.done = self.total
            return
        before = (record.get("module", 1) - 1) * rounds
        self.done = before + (rounds if "fixed" in record else record.get("stage_round", record["round"]))

    @property
    def left(self) -> str:
        """The time left at most, from the mean of the last rounds; "" while there is none to go by.

        The first round of a process does not count: caches are empty, and kernels are not compiled.
        """
        recent = self._seconds[1:][-10:]
        if not recent:
            return ""
        return f"at most about {clock(math.ceil((self.total - self.done) * sum(recent) / len(recent)))} left"


def _facts(record: Record, session: Session) -> dict[str, str]:
    """Return what a person wants to know of a round, in the order it is shown."""
    if "refresh" in record:
        found = f"measured anew on {record['refresh']} images" if record["refreshed"] else "not measured: as they were"
        return {"round": str(record["round"]), "norm statistics": found}
    facts = {"round": f"{record['round']}/{session.config.rounds}"}
    if "module" in record:
        facts = {"round": str(record["round"]), "module": f"{record['module']}/{len(session.world.modules)}"}
        facts["of stage"] = f"{record['stage_round']}/{session.config.rounds}"
    facts["eps"] = f"{record['epsilon']:.3f}" if record["adversarial_training"] else "warm-up"
    if record.get("alpha") is not None:
        facts["alpha"] = f"{record['alpha']:.2f}"
    shown = METHODS[session.config.method].method.shown
    if shown is not None:
        facts[shown.label] = shown.text(record)
    facts["loss"] = NONE if record["loss"] is None else f"{record['loss']:.3f}"
    if "samples" in record:
        # Without a held-out sample there is no accuracy, not one of zero.
        reached = (record["clean"], record["adversarial"]) if record["samples"] else (None, None)
        facts |= zip(ACCURACIES, map(percent, reached), strict=True)
    return facts


def _events(record: Record) -> Iterator[str]:
    """Yield what was unusual in a round, and a module that was fixed in it."""
    yield from (f"round {record['round']}: {text}" for text in _troubles(record))
    if "fixed" in record:
        fixed = record["fixed"]
        reached = f"clean {percent(fixed['clean'])}, PGD {percent(fixed['adversarial'])}"
        how = f"at its best round {fixed['round']}: {reached}"
        if fixed["clean"] is None:
            how = f"as it was in round {fixed['round']}: nobody evaluated it"
        yield f"module {fixed['module']} fixed {how}"


def _troubles(record: Record) -> Iterator[str]:
    for client, reason in record["dropped"].items():
        yield f"client {client} was dropped: {reason}"
    for kind, clients in record.get("missing", {}).items():
        yield f"no answer from {_clients(clients)} ({WORK_NAMES.get(kind, kind)})"
    for client, reason in record.get("faults", {}).items():
        yield f"client {client} failed: {reason}"
    if "too_few" in record:
        few = record["too_few"]
        yield f"{few['usable']} usable updates, fewer than aggregate.minimum = {few['minimum']}: nothing was averaged"
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


def _headline(session: Session, path: Path, round: int) -> str:
    config, world = session.config, session.world
    budget, whole, modules = format_size(session.budget), format_size(world.cost.total_memory), len(world.modules)
    cut = f"in {modules} modules of at most {budget} (whole model {whole})"
    what = f"{config.method} on {session.dataset.name}: {config.model.name} "
    what += cut if modules > 1 else f"(whole model {whole}; every client has at least {budget} available)"
    what += f", {config.population.cohort} of {config.population.clients} clients a round"
    return what + (f"; going on after round {round}" if round else "") + f"\nrun: {path}"


# The displays --------------------------------------------------------------------------------------------------------


def observer_for(console: Console) -> "PlainLines":
    """Return the live display in a terminal, plain lines elsewhere."""
    return LiveDisplay(console) if console.is_terminal else PlainLines(console)


class PlainLines(Observer):
    """One line for each round; quiet in between."""

    _progress: _RunProgress
    _soft_wrap = True

    def __init__(self, console: Console) -> None:
        self._console = console

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is left to clean up."""

    def started(self, session: Session, path: Path, round: int) -> None:
        self._progress = _RunProgress(session, path, round)
        self._print(_headline(session, path, round))

    def note(self, text: str) -> None:
        self._print(f"note: {text}")

    def round_done(self, record: Record, seconds: float) -> None:
        self._progress.round_done(record, seconds)
        facts = "  ".join(f"{name} {value}" for name, value in _facts(record, self._progress.session).items())
        self._print(f"{facts}  ({', '.join(filter(None, (format_duration(seconds), self._progress.left)))})")
        for line in _events(record):
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
        self._bar.update(self._task, total=self._progress.total, completed=self._progress.done)

    def task_done(self, kind: str, done: int, total: int) -> None:
        """Show the work at hand; redraws are rationed, because tasks can be very short."""
        self._work = f"{WORK_NAMES.get(kind, kind)} {done}/{total}"
        if time.monotonic() - self._drawn > 0.1:
            self._draw()

    def round_done(self, record: Record, seconds: float) -> None:
        """Show the round's facts; the accuracies of an evaluation stay until the next one."""
        self._progress.round_done(record, seconds)
        facts = _facts(record, self._progress.session)
        reached = {name: self._facts[name] for name in ACCURACIES if name in self._facts and name not in facts}
        self._facts = facts | reached
        for line in _events(record):
            self._print(line)
        self._bar.update(self._task, completed=self._progress.done, description=self._progress.left)
        self._draw()

    def finishing(self) -> None:
        self._bar.update(self._task, completed=self._progress.total, description="evaluating the trained model")
        self._draw()

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        self._live.update(self._render())

    def _render(self) -> Group:
        facts = (Text.assemble((f"{name} ", "dim"), f"{value}   ") for name, value in self._facts.items())
        return Group(Text.assemble(*facts), self._bar, Text(self._work, style="dim"))
