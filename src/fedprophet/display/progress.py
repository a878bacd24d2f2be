"""How a run shows itself: a live display in a terminal, plain lines everywhere else."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from fedprophet.durations import clock, format_duration
from fedprophet.messages.task import TaskKind
from fedprophet.runs.engine_history import spans_of, told
from fedprophet.runs.journal import Journal
from fedprophet.runs.results import attack_label
from fedprophet.runs.run import Observer, RunFiles
from fedprophet.runs.session import Session
from fedprophet.server.coordinator import Record
from fedprophet.sizes import format_size

WORK_NAMES: Mapping[TaskKind, str] = {
    "report": "asking clients",
    "train": "training",
    "evaluate": "evaluating",
    "measure": "measuring perturbations",
    "predict": "predicting the public set",
    "distill": "distilling",
    "adopt": "passing statistics on",
}

SHOWN = 8
"""So many clients that did not answer are named; the journal has all."""


def observer_for(console: Console) -> "PlainLines | LiveDisplay":
    """Return the live display in a terminal, plain lines otherwise."""
    return LiveDisplay(console) if console.is_terminal else PlainLines(console)


def percent(value: float | None) -> str:
    """Return an accuracy for people."""
    return "–" if value is None else f"{100 * value:.1f} %"


class _Clock:
    """Estimates the time left. A stage may converge early, so what it says is a bound, by the rounds seen so far."""

    def __init__(self) -> None:
        self.total = 0
        self.done = 0
        self._seconds: list[float] = []

    def start(self, session: Session, path: Path, round: int) -> None:
        self.total = len(session.world.modules) * session.config.rounds
        # Stages that converged early had fewer rounds than the bar gives them, so a round's number is not its place.
        for record in Journal(RunFiles(path).journal).read() if round else ():
            if record["round"] == round:
                self._place(record, session)

    def round_done(self, record: Record, session: Session, seconds: float) -> None:
        self._seconds.append(seconds)
        self._place(record, session)

    def _place(self, record: Record, session: Session) -> None:
        before = (record.get("module", 1) - 1) * session.config.rounds
        self.done = before + record.get("stage_round", record["round"])
        if "fixed" in record:
            self.done = before + session.config.rounds

    @property
    def left(self) -> str:
        """The time left at most, from the mean of the last rounds; "" while this process has timed none.

        Its first round does not count, be it a run's first or the first after a resume: caches are empty, kernels are
        not compiled.
        """
        recent = self._seconds[1:][-10:]
        if not recent:
            return ""
        return f"at most about {clock(math.ceil((self.total - self.done) * sum(recent) / len(recent)))} left"


def _widths(record: Record) -> str:
    shown = sorted({f"{width:.2f}" for width in record["widths"].values()})
    return "–".join(dict.fromkeys((*shown[:1], *shown[-1:])))


def _architectures(record: Record) -> str:
    return ", ".join(f"{count} {name}" for name, count in Counter(record["architectures"].values()).items())


OF_METHODS: Mapping[str, tuple[str, Callable[[Record], str]]] = {
    "widths": ("width", _widths),
    "architectures": ("models", _architectures),
    "attacked": ("under attack", lambda record: f"{len(record['attacked'])}/{len(record['times'])} clients"),
}
"""What only some methods note of a round, by its key in the journal: its name, and how it is shown."""


def _facts(record: Record, session: Session) -> list[tuple[str, str]]:
    """Return what a person wants to know of a round, in the order it is shown."""
    modules = len(session.world.modules)
    if "module" in record:
        facts = [("round", str(record["round"])), ("module", f"{record['module']}/{modules}")]
        facts.append(("of stage", f"{record['stage_round']}/{session.config.rounds}"))
    else:
        facts = [("round", f"{record['round']}/{session.config.rounds}")]
    facts.append(("eps", f"{record['epsilon']:.3f}" if record["adversarial_training"] else "warm-up"))
    if record.get("alpha") is not None:
        facts.append(("alpha", f"{record['alpha']:.2f}"))
    facts += [(name, tell(record)) for key, (name, tell) in OF_METHODS.items() if key in record]
    facts.append(("loss", "–" if record["loss"] is None else f"{record['loss']:.3f}"))
    if "samples" in record:
        # Without a held-out sample there is no accuracy, not one of zero.
        reached = (record["clean"], record["adversarial"]) if record["samples"] else (None, None)
        facts += zip(("clean", "PGD"), map(percent, reached), strict=True)
    return facts


def _events(record: Record) -> list[str]:
    """Return what happened in a round beside the ordinary."""
    lines = [f"round {record['round']}: client {c} was dropped: {why}" for c, why in record["dropped"].items()]
    lines += [f"round {record['round']}: {text}" for text in _absences(record)]
    diverged = [name for name, loss in record.get("distillation", {}).items() if loss is None]
    lines += [f"round {record['round']}: the distillation of {name} diverged: not used" for name in diverged]
    if "fixed" in record:
        lines.append(_fixed(record["fixed"]))
    return lines


def _absences(record: Record) -> Iterator[str]:
    """Yield what came of answers that did not come, or failed on their way."""
    for kind, clients in record.get("missing", {}).items():
        yield f"no answer from {_clients(clients)} ({WORK_NAMES[kind]})"
    for client, reason in record.get("faults", {}).items():
        yield f"client {client} failed: {reason}"
    if "too_few" in record:
        few = record["too_few"]
        yield f"{few['usable']} usable updates, fewer than flower.minimum = {few['minimum']}: nothing was averaged"
    if "postponed" in record:
        yield f"nobody measured module {record['postponed']['module']}: it is trained for another round"
    if "best_round" in record and record["best_round"] is None:
        yield "nobody has evaluated any round: the model of the last one is kept"


def _clients(clients: Sequence[int]) -> str:
    """Return whose answers are meant: all of a few, or some of many."""
    shown = ", ".join(map(str, clients[:SHOWN])) + (f" and {len(clients) - SHOWN} more" if len(clients) > SHOWN else "")
    return f"client{'s' if len(clients) > 1 else ''} {shown}"


def _fixed(fixed: Mapping[str, Any]) -> str:
    if fixed["clean"] is None:
        return f"module {fixed['module']} fixed as it was in round {fixed['round']}: nobody evaluated it"
    reached = f"clean {percent(fixed['clean'])}, PGD {percent(fixed['adversarial'])}"
    return f"module {fixed['module']} fixed at its best round {fixed['round']}: {reached}"


def _headline(session: Session, path: Path, round: int) -> str:
    config, world = session.config, session.world
    budget, whole, modules = format_size(session.budget), format_size(world.cost.total_memory), len(world.modules)
    cut = f"in {modules} modules of at most {budget} (whole model {whole})"
    what = f"{config.method} on {session.dataset.name}: {config.model.name} "
    what += cut if modules > 1 else f"(whole model {whole}; every client can spare at least {budget})"
    what += f", {config.population.cohort} of {config.population.clients} clients a round"
    return what + (f"; going on after round {round}" if round else "") + f"\nrun: {path}"


class PlainLines:
    """One line for each round; quiet in between."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._clock = _Clock()
        self._session: Session | None = None

    def __enter__(self) -> "PlainLines":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def started(self, session: Session, path: Path, round: int) -> None:
        """Say what is going to be trained."""
        self._session = session
        self._clock.start(session, path, round)
        self._print(_headline(session, path, round))

    def note(self, text: str) -> None:
        """Pass on something the user should know."""
        self._print(f"note: {text}")

    def task_done(self, kind: TaskKind, done: int, total: int) -> None:
        """Say nothing between rounds."""

    def round_done(self, record: Record, seconds: float) -> None:
        """Print the round's line."""
        assert self._session is not None
        self._clock.round_done(record, self._session, seconds)
        facts = "  ".join(f"{name} {value}" for name, value in _facts(record, self._session))
        self._print(f"{facts}  ({', '.join(filter(None, (format_duration(seconds), self._clock.left)))})")
        for line in _events(record):
            self._print(line)

    def finishing(self) -> None:
        """Say what comes after the last round."""
        self._print("evaluating the trained model")

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class LiveDisplay:
    """A bar, the round's facts and the work at hand, redrawn in place; events stay above it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._clock = _Clock()
        self._bar = Progress(BarColumn(40), TextColumn("{task.description}"), console=console)
        self._task = self._bar.add_task("starting")
        self._latest: list[tuple[str, str]] = []
        self._accuracies: dict[str, str] = {}
        self._work = "starting"
        self._live = Live(self._render(), console=console, refresh_per_second=8, transient=True)
        self._session: Session | None = None
        self._drawn = 0.0

    def __enter__(self) -> "LiveDisplay":
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def started(self, session: Session, path: Path, round: int) -> None:
        """Say what is going to be trained and set up the bar."""
        self._session = session
        self._clock.start(session, path, round)
        self._console.print(_headline(session, path, round), markup=False, highlight=False)
        self._bar.update(self._task, total=self._clock.total, completed=self._clock.done)

    def note(self, text: str) -> None:
        """Pass on something the user should know."""
        self._console.print(f"note: {text}", markup=False, highlight=False)

    def task_done(self, kind: TaskKind, done: int, total: int) -> None:
        """Show which client's work is done; redraws are rationed, tasks can be very short."""
        self._work = f"{WORK_NAMES[kind]} {done}/{total}"
        if time.monotonic() - self._drawn > 0.1:
            self._draw()

    def round_done(self, record: Record, seconds: float) -> None:
        """Show the round's facts; an evaluation's accuracies stay until the next one."""
        assert self._session is not None
        self._clock.round_done(record, self._session, seconds)
        facts = _facts(record, self._session)
        self._latest = [fact for fact in facts if fact[0] not in ("clean", "PGD")]
        self._accuracies |= {name: value for name, value in facts if name in ("clean", "PGD")}
        for line in _events(record):
            self._console.print(line, markup=False, highlight=False)
        self._bar.update(self._task, completed=self._clock.done, description=self._clock.left)
        self._draw()

    def finishing(self) -> None:
        """Show that only the closing evaluation is left."""
        self._bar.update(self._task, completed=self._clock.total, description="evaluating the trained model")
        self._draw()

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        self._live.update(self._render())

    def _render(self) -> Table:
        grid = Table.grid(padding=(0, 1))
        facts = Text()
        for name, value in [*self._latest, *self._accuracies.items()]:
            facts.append(f"{name} ", style="dim")
            facts.append(f"{value}   ")
        grid.add_row(facts)
        grid.add_row(self._bar)
        grid.add_row(Text(self._work, style="dim"))
        return grid


def closing_table(results: Mapping[str, Any], path: Path, console: Console) -> None:
    """Print what the run reached, for a person."""
    if "stages" in results:
        console.print(_module_table(results))
    show_accuracies(results, console)
    say(console, _remarks(results))
    console.print(f"Files: {path}", highlight=False, markup=False, soft_wrap=True)


def _module_table(results: Mapping[str, Any]) -> Table:
    budget, whole = results["budget_bytes"], results["whole_model_bytes"]
    table = Table(title="Modules", title_justify="left")
    for heading in ("Module", "Layers"):
        table.add_column(heading)
    for heading in ("Memory", "of budget", "of whole model", "Clean", "PGD"):
        table.add_column(heading, justify="right")
    for row, stage in zip(results["modules"], results["stages"], strict=True):
        memory = row["memory_bytes"]
        shares = (f"{100 * memory / budget:.0f} %", f"{100 * memory / whole:.0f} %")
        reached = (percent(stage["clean"]), percent(stage["adversarial"]))
        table.add_row(str(row["index"]), ", ".join(row["layers"]), format_size(memory), *shares, *reached)
    return table


def _remarks(results: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a reader should know beside the tables."""
    yield _need(results)
    if "best" in results:
        yield from (_reached(name, results[name]) for name in ("best", "last"))
    time = results.get("simulated")
    if time is not None:
        total, computation, access = (format_duration(time[f"{part}_s"]) for part in ("total", "computation", "access"))
        yield (
            f"On the devices of the pool it would have taken {total}: computation {computation}, storage access "
            f"{access} (simulated)."
        )
    yield from _wire(results)
    if results.get("engines"):
        yield f"Engine: {told(spans_of(results['engines']))}."
    yield f"Rounds: {results['rounds']}, seed {results['seed']}."


def _wire(results: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the rounds moved over the network, and how many answers were lost, where the engine counted them."""
    moved = results.get("wire")
    if moved is not None:
        sent, received, jfat = (format_size(moved[part]) for part in ("sent", "received", "jfat"))
        yield f"On the wire: {sent} sent, {received} received; jFAT's training alone would have moved {jfat}."
    lost = results.get("faults", 0)
    if lost:
        yield f"{lost} {'answers were' if lost > 1 else 'answer was'} missing or dropped; the journal says why."


def _need(results: Mapping[str, Any]) -> str:
    """Say how much memory the training took a client."""
    whole, memory = results["whole_model_bytes"], results.get("memory")
    if "stages" in results:
        largest = max(row["memory_bytes"] for row in results["modules"])
        need = f"A client needs {format_size(largest)} to train "
        return need + (f"a module; the whole model would take {format_size(whole)}." if largest < whole else "it.")
    if memory is None:
        return f"Training the whole model takes {format_size(whole)}."
    least, peak = memory["least_bytes"], memory["peak_bytes"]
    if least == peak == whole:
        swapping = "; where it could spare less, the simulated time includes swapping"
        return (
            f"Every client trained the whole model, which takes {format_size(whole)}"
            f"{swapping if results.get('simulated') else ''}."
        )
    return (
        f"With {format_size(least)} a client could have done the smallest task of every round; the largest task took "
        f"{format_size(peak)}, and the whole model takes {format_size(whole)}."
    )


def _reached(name: str, round: Mapping[str, Any]) -> str:
    accuracies = f"clean {percent(round['clean'])}, PGD {percent(round['adversarial'])}"
    return f"{name.capitalize()} round ({round['round']}): {accuracies}."


MEASURED_ON = {
    "personalised": "on each client's own held-out data",
    "global": "the exported model on the test set",
}


def show_accuracies(results: Mapping[str, Any], console: Console) -> None:
    """Print the accuracies for people, and below them what they were measured with."""
    console.print(accuracy_table(results))
    say(console, _measured_with(results))


def accuracy_table(results: Mapping[str, Any]) -> Table:
    """Return a row for each attack, first for the clients, then for the test set."""
    table = Table(title="Accuracy of the trained model", title_justify="left")
    for heading in ("Measured", "Attack"):
        table.add_column(heading)
    for heading in ("Accuracy", "95 % interval", "Samples"):
        table.add_column(heading, justify="right")
    for part in MEASURED_ON:
        for number, (name, cell) in enumerate(results[part].items()):
            value = percent(cell["accuracy"] if cell["samples"] else None)
            shown = (attack_label(name), value, _interval(cell), str(cell["samples"]))
            table.add_row("" if number else part, *shown, end_section=number == len(results[part]) - 1)
    return table


def _measured_with(results: Mapping[str, Any]) -> Iterator[str]:
    public = results.get("public_samples", 0)
    left_out = {"global": f" without the {public} samples of the public set" if public else ""}
    for part, text in MEASURED_ON.items():
        layers = results.get("norm_layers", {}).get(part)
        yield f"{part}: {text}{left_out.get(part, '')}" + (f"; norm layers: {layers}" if layers else "")
    if "starting_weights" in results:
        yield f"starting weights: {results['starting_weights'] or 'drawn at random'}"


def _interval(cell: Mapping[str, Any]) -> str:
    if not cell["samples"] or "interval" not in cell:
        return "–"
    low, high = cell["interval"]
    return f"{100 * low:.1f} – {100 * high:.1f} %"


def say(console: Console, lines: Iterable[str]) -> None:
    """Print sentences: wrapped between words in a terminal, each on one line where a program may read them."""
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=not console.is_terminal)


__all__ = ["LiveDisplay", "Observer", "PlainLines", "closing_table", "observer_for", "say", "show_accuracies"]
