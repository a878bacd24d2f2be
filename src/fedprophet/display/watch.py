"""A run that another process plays: as a picture in a terminal, as plain lines, and as JSON."""

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedprophet.display.curves import area, axis
from fedprophet.display.numbers import counted, percent
from fedprophet.display.progress import ACCURACIES, RunProgress, events_of, facts_of, headline
from fedprophet.durations import format_duration
from fedprophet.going_on import how_to_resume
from fedprophet.runs.files import resume_hint
from fedprophet.runs.summary import fault_count, moved_bytes, simulated_seconds
from fedprophet.runs.watched import Look
from fedprophet.server.coordinator import Record
from fedprophet.sizes import format_size

EVENTS = 3
"""How many of the last events are shown."""
LEAST_ROWS, MOST_ROWS = 1, 5
"""The rows of a curve: few in a low window."""
GUTTER = 8
"""The columns left of the curves."""
COLOURS = {"working": "green", "finishing": "green", "finished": "green", "stopped": "yellow", "unknown": "yellow"}


def played(look: Look) -> Iterator[tuple[Record, float | None, RunProgress]]:
    """Yield each round, how long it took, and how far the run was then."""
    progress = RunProgress(look.outline)
    for record in look.records:
        seconds = look.seconds.get(record["round"])
        progress.round_done(record, seconds)
        yield record, seconds, progress


def progress_of(look: Look) -> RunProgress:
    """Return how far a run is."""
    return [RunProgress(look.outline), *(progress for *_, progress in played(look))][-1]


def state_text(look: Look, path: Path) -> str:
    """Say whether a process is working on a run, and what to do if there is none."""
    if look.state == "finished":
        return f"finished after {counted(look.round, 'round')}"
    came = f"the last round came {format_duration(round(look.since))} ago" if look.round else "no round has come yet"
    played = f"after round {look.round}" if look.round else "before its first round was over"
    return {
        "working": f"a process is working on it; {came}",
        "finishing": "all rounds are played; the trained model is being evaluated",
        "stopped": f"no process is working on it: it was stopped {played}. {resume_hint(path)}",
        "unknown": f"whether a process is working on it cannot be seen here; {came}",
    }[look.state]


def latest(look: Look) -> dict[str, str]:
    """Return the newest round's facts; the accuracies of an evaluation stay until the next one."""
    judged = _judged(look.records)
    shown = {} if judged is None else facts_of(judged, look.outline)
    reached = {name: shown[name] for name in ACCURACIES if name in shown}
    return {**facts_of(look.records[-1], look.outline), **reached}


def totals(look: Look) -> dict[str, str]:
    """Return what all rounds so far have taken and lost."""
    records, pace = look.records, progress_of(look).pace
    dropped = sum(len(record["dropped"]) for record in records)
    moved = moved_bytes(records)
    return {
        **({} if pace is None else {"a round": format_duration(pace)}),
        **({} if look.deployed else {"simulated": format_duration(simulated_seconds(records)["total_s"])}),
        "dropped updates": str(dropped),
        "lost answers": str(fault_count(records)),
        **({} if moved is None else {"on the wire": format_size(moved["sent"] + moved["received"])}),
    }


def document(look: Look, path: Path) -> dict[str, Any]:
    """Return the same as JSON."""
    progress, last, judged = progress_of(look), look.records[-1] if look.records else {}, _judged(look.records)
    outline, moved = look.outline, moved_bytes(look.records)
    return {
        "run": str(path),
        "state": look.state,
        "method": outline.config.method,
        "dataset": outline.dataset,
        "model": outline.config.model.name,
        "round": look.round,
        "rounds_done": progress.done,
        "rounds_at_most": outline.total,
        "module": last.get("module"),
        "modules": outline.modules,
        "stage_round": last.get("stage_round"),
        "stage_rounds": outline.config.rounds,
        "epsilon": last.get("epsilon") if last.get("adversarial_training") else None,
        "alpha": last.get("alpha"),
        "loss": last.get("loss"),
        "evaluated": {key: judged[key] for key in ("round", "clean", "adversarial", "samples")} if judged else None,
        "seconds_a_round": progress.pace,
        "seconds_left_at_most": progress.seconds_left,
        "seconds_since_last_round": round(look.since, 1),
        "simulated_seconds": None if look.deployed else simulated_seconds(look.records)["total_s"],
        "dropped_updates": sum(len(record["dropped"]) for record in look.records),
        "lost_answers": fault_count(look.records),
        "wire": moved,
        "resume": how_to_resume(path) if look.state == "stopped" else None,
    }


def _judged(records: Sequence[Record]) -> Record | None:
    """Return the newest round that was evaluated."""
    return next((record for record in reversed(records) if record.get("samples")), None)


def _events(look: Look) -> list[str]:
    """Return the last events, the newest last."""
    newest = (list(events_of(record)) for record in reversed(look.records))
    return list(islice((line for lines in newest for line in reversed(lines)), EVENTS))[::-1]


def state_lines(look: Look, path: Path) -> Iterator[str]:
    """Yield a run as plain lines."""
    yield headline(look.outline, path)
    yield state_text(look, path)
    if look.records:
        yield "  ".join(f"{name} {value}" for name, value in latest(look).items())
        yield "  ".join(f"{name} {value}" for name, value in totals(look).items())
        yield from filter(None, [progress_of(look).left])
        yield from _events(look)


# The picture ---------------------------------------------------------------------------------------------------------


class Picture:
    """A run on one screen: what it is, whether it goes on, how far it is, accuracies over rounds, the last events."""

    def __init__(self, look: Look, path: Path) -> None:
        self._look, self._path = look, path

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw everything; the curves take the rows that are left."""
        above, below = Group(*self._above()), Group(*self._below())
        used = sum(len(console.render_lines(part, options)) for part in (above, below))
        rows = max(LEAST_ROWS, min(MOST_ROWS, (console.height - used - 3) // 2))
        yield above
        if _judged(self._look.records):
            yield from self._curves(options.max_width - GUTTER, rows)
        yield below

    def _above(self) -> Iterator[RenderableType]:
        look = self._look
        yield Text(headline(look.outline, self._path))
        yield Text.assemble(("● ", COLOURS[look.state]), state_text(look, self._path), overflow="fold")
        if look.records:
            yield _named(latest(look))
            yield self._bar()

    def _bar(self) -> RenderableType:
        progress, total = progress_of(self._look), self._look.outline.total
        if total is None:
            return Text("")
        line = Table.grid(padding=(0, 1, 0, 0), expand=True)
        line.add_column(ratio=1)
        line.add_column(no_wrap=True)
        going = self._look.state in ("working", "unknown")
        words = filter(None, (percent(progress.done / total), progress.left if going else ""))
        line.add_row(ProgressBar(total=total, completed=progress.done), "  ".join(words))
        return line

    def _curves(self, columns: int, rows: int) -> Iterator[RenderableType]:
        records = self._look.records
        modules = [record.get("module") for record in records]
        borders = [index for index in range(1, len(records)) if modules[index] != modules[index - 1] and modules[index]]
        yield Text("the clients' accuracy, 0 to 100 %", style="dim", no_wrap=True, overflow="ellipsis")
        for name, key, colour in zip(ACCURACIES, ("clean", "adversarial"), ("cyan", "magenta"), strict=True):
            shares = [record[key] if record.get("samples") else None for record in records]
            for label, line in zip([name, *[""] * rows], area(shares, borders, columns, rows), strict=False):
                yield Text.assemble(f"{label:{GUTTER}}", (line, colour), no_wrap=True)
        names = [f"{module}" for module in dict.fromkeys(modules) if module] or [f"1 to {len(records)}"]
        label = "module" if borders or modules[0] else "round"
        yield Text(f"{label:{GUTTER}}{axis(names, borders, len(records), columns)}", style="dim", no_wrap=True)

    def _below(self) -> Iterator[RenderableType]:
        if self._look.records:
            yield _named(totals(self._look))
            yield from (Text(line, style="dim") for line in _events(self._look))


def _named(values: dict[str, str]) -> Text:
    return Text.assemble(*(part for name, value in values.items() for part in ((f"{name} ", "dim"), f"{value}   ")))
