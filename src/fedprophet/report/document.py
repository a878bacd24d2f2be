"""Runs as one document of plain values, which a page, or a program, makes pictures of.

It holds what a picture needs and no more: of a long run every n-th evaluation, and sums over rounds in a row. The same
folders give the same document, but for whether a process is working on them.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from math import ceil
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from fedprophet.attacks.names import CLEAN, attack_label, is_stepwise
from fedprophet.display.summary import MEASURED_ON
from fedprophet.methods import METHODS
from fedprophet.report.compare import each_once
from fedprophet.report.enforced import MeasuredPart, Training, measured_parts
from fedprophet.report.facts import Fact, machine_facts, run_facts
from fedprophet.report.runs import Amount, Count, Memory, ReadFolder, Share, Wire, enforced_of, of_record, read_folder
from fedprophet.runs.files import RunFiles, resume_hint
from fedprophet.runs.summary import KINDS, faulty_clients, moved_bytes, simulated_seconds
from fedprophet.server.coordinator import Record
from fedprophet.storage.locks import is_locked
from fedprophet.version import __version__

FORMAT = 1
"""Of the document; a page of another version does not read it."""
MOST_POINTS = 400
"""Points of a curve, at most about so many."""
MOST_BARS = 100
"""Bars over the rounds, at most so many."""
MOST_CLIENTS = 200
"""Clients in the picture of who trained what."""
MOST_REASONS = 12
"""Reasons of dropped updates that are listed, the most frequent ones."""


@dataclass(frozen=True)
class Accuracy:
    """An accuracy at the end of a run: what of (`kind`), under which attack, and what it was measured on."""

    kind: str
    attack: str
    label: str
    accuracy: float
    interval: tuple[float, float] | None
    samples: int
    precision: str | None


@dataclass(frozen=True)
class Curve:
    """Personalised accuracy over rounds: every n-th of those `measured`, and `seconds`, the simulated ones so far."""

    round: tuple[int, ...]
    clean: tuple[float, ...]
    adversarial: tuple[float, ...]
    seconds: tuple[float, ...] | None
    measured: int
    every: int


@dataclass(frozen=True)
class Stage:
    """The rounds of one module: `best` is the round that was kept, once the module is fixed."""

    module: int
    first: int
    last: int
    warmup: int
    epsilon: float | None
    alpha: float | None
    best: int | None
    clean: float | None
    adversarial: float | None
    computation: float | None
    access: float | None


@dataclass(frozen=True)
class Steps:
    """A value over rounds that holds until it changes: it is `value[i]` from `round[i]` on."""

    round: tuple[int, ...]
    value: tuple[float, ...]


@dataclass(frozen=True)
class Perturbation:
    """The attack in training: alpha, and eps on what the trained module reads."""

    epsilon: Steps
    alpha: Steps


@dataclass(frozen=True)
class Cascade:
    """The modules and the memory that the training of each takes, beside the budget and the whole model.

    `counted` is how: by the paper's model, or by the most economical plan (`memory.model`).
    """

    modules: tuple[Mapping[str, Any], ...]
    budget: int
    whole: int
    counted: str


@dataclass(frozen=True)
class Assignment:
    """In how many rounds each client trained each module: one row for a client, one column for a module."""

    clients: tuple[int, ...]
    rounds: tuple[tuple[int, ...], ...]
    left_out: int
    never: int


@dataclass(frozen=True)
class Bars:
    """Sums over `every` rounds in a row, beginning with `first`."""

    every: int
    first: tuple[int, ...]
    parts: Mapping[str, tuple[float, ...]]


@dataclass(frozen=True)
class Time:
    """Simulated seconds; a round takes as long as its slowest client. Communication is not part of the total."""

    computation: float
    access: float
    communication: float
    rounds: Bars


@dataclass(frozen=True)
class Traffic:
    """Bytes that the server sent and received, and those that jFAT's training would have moved."""

    sent: int
    received: int
    jfat: int
    rounds: Bars


@dataclass(frozen=True)
class Reason:
    """Why answers of clients were lost: how often, of how many clients, and from which round to which."""

    text: str
    times: int
    clients: int
    first: int
    last: int


@dataclass(frozen=True)
class Faults:
    """Answers of clients that were missing or dropped; `other` reasons are not listed."""

    times: int
    reasons: tuple[Reason, ...]
    other: int


@dataclass(frozen=True)
class RunDocument:
    """A run; what its folder does not hold is None or empty."""

    label: str
    name: str
    path: str
    method: str
    finished: bool
    working: bool | None
    """Whether a process is working on it; None if that cannot be told."""
    rounds: int
    deployed: bool
    cascading: bool
    """Whether its method trains module after module."""
    attack: str
    memory: Memory | None
    enforced: tuple[MeasuredPart, ...]
    facts: tuple[Fact, ...]
    hardware: tuple[Fact, ...]
    accuracies: tuple[Accuracy, ...]
    cascade: Cascade | None
    curve: Curve
    stages: tuple[Stage, ...]
    perturbation: Perturbation | None
    assignment: Assignment | None
    time: Time | None
    traffic: Traffic | None
    faults: Faults
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """The document of one run or several."""

    runs: tuple[RunDocument, ...]
    notes: tuple[str, ...] = ()
    kinds: Mapping[str, str] = field(default_factory=lambda: dict(MEASURED_ON))
    version: str = __version__
    format: int = FORMAT

    def to_json(self) -> dict[str, Any]:
        """Return it for files."""
        return asdict(self)


def report_of(paths: Sequence[Path]) -> Report:
    """Return the document of the runs in these folders; CheckpointError if one is not a run, or damaged."""
    once, notes = each_once(paths)
    folders = [read_folder(path) for path in once]
    labels = _labels(folders)
    return Report(tuple(_run(folder, label) for folder, label in zip(folders, labels, strict=True)), tuple(notes))


def _labels(folders: Sequence[ReadFolder]) -> list[str]:
    """Name each run by its method and, where several are of one method, by what tells those apart: seed or folder."""
    ways: list[Callable[[ReadFolder], str]] = [
        lambda folder: METHODS[folder.summary.config.method].paper,
        lambda folder: f"{ways[0](folder)}, seed {folder.summary.config.seed}",
        lambda folder: f"{ways[0](folder)}, {_name(folder.summary.path)}",
        lambda folder: f"{ways[0](folder)}, {folder.summary.path}",
    ]
    found = []
    for folder in folders:
        alike = [other for other in folders if other.summary.config.method == folder.summary.config.method]
        telling = (way for way in ways if len(set(map(way, alike))) == len(alike))
        found.append(next(telling, ways[-1])(folder))
    return found


def _name(path: Path) -> str:
    return path.name if path.name.strip(".") else path.resolve().name


@dataclass(frozen=True)
class _Fixed:
    round: Count
    clean: Share | None
    adversarial: Share | None


@dataclass(frozen=True)
class _Round:
    """What is drawn of a round's record beside what `read_folder` has checked."""

    round: Count
    module: Annotated[int, Field(ge=1, le=10**4)] | None = None
    epsilon: Amount | None = None
    alpha: Amount | None = None
    adversarial_training: bool = True
    assigned: dict[Count, Annotated[int, Field(ge=1, le=10**4)]] = field(default_factory=dict)
    clean: Share | None = None
    adversarial: Share | None = None
    samples: Count = 0
    fixed: _Fixed | None = None


_ROUND = TypeAdapter(_Round)


def _run(folder: ReadFolder, label: str) -> RunDocument:
    summary, records = folder.summary, folder.records
    config, journal = summary.config, RunFiles(summary.path).journal
    rounds = [of_record(_ROUND, record, record, journal) for record in records]
    stages = tuple(_stages(rounds, records, summary.time is not None))
    working = False if summary.finished else is_locked(summary.path)
    stopped = () if summary.finished or working else (f"It is not finished. {resume_hint(summary.path)}",)
    return RunDocument(
        label=label,
        name=_name(summary.path),
        path=str(summary.path),
        method=METHODS[config.method].paper,
        finished=summary.finished,
        working=working,
        rounds=summary.rounds,
        deployed=summary.deployed,
        cascading=METHODS[config.method].cascade,
        attack=attack_label(f"pgd{config.evaluate.steps}"),
        memory=summary.memory,
        enforced=tuple(measured_parts(_trainings(rounds, records, journal))),
        facts=tuple(run_facts(folder)),
        hardware=tuple(machine_facts(folder)),
        accuracies=tuple(_accuracies(folder)),
        cascade=_cascade(folder),
        curve=_curve(rounds, records if summary.time else None, stages),
        stages=stages,
        perturbation=_perturbation(rounds) if stages else None,
        assignment=_assignment(rounds, config.population.clients, len(folder.setup.modules)),
        time=_time(folder),
        traffic=_traffic(folder),
        faults=_faults(records),
        notes=(*stopped, *summary.notes),
    )


def _accuracies(folder: ReadFolder) -> Iterator[Accuracy]:
    """Yield what was measured at the end and later: clean, then attacks of so many steps, then others."""
    for kind in KINDS:
        cells = folder.summary.accuracies.get(kind, {})
        for attack, cell in sorted(cells.items(), key=lambda item: (item[0] != CLEAN, not is_stepwise(item[0]))):
            yield Accuracy(
                kind, attack, attack_label(attack), cell.accuracy, cell.interval, cell.samples, cell.precision
            )


def _cascade(folder: ReadFolder) -> Cascade | None:
    setup = folder.setup
    if not setup.modules or not setup.whole_model_bytes:
        return None
    modules = tuple(
        {"index": module.index, "layers": module.layers, "memory": module.memory_bytes} for module in setup.modules
    )
    return Cascade(modules, setup.budget_bytes, setup.whole_model_bytes, folder.summary.config.memory.model)


def _trainings(rounds: Sequence[_Round], records: Sequence[Record], journal: Path) -> Iterator[Training]:
    """Yield every training of a run whose memory was enforced."""
    for each, record in zip(rounds, records, strict=True):
        for client, found in enforced_of(record, journal).items():
            counted = record.get("times", {}).get(str(client), {}).get("memory_bytes")
            yield (each.module, each.assigned.get(client, each.module)), counted, found


# Over rounds ---------------------------------------------------------------------------------------------------------


def _curve(rounds: Sequence[_Round], timed: Sequence[Record] | None, stages: Sequence[Stage]) -> Curve:
    """Keep every n-th evaluation, and those at which something happens: the best, the first, the last."""
    spent, total = {}, 0.0
    for record in timed or ():
        total += simulated_seconds([record])["total_s"]
        spent[record["round"]] = total
    points = [each for each in rounds if each.samples and each.clean is not None and each.adversarial is not None]
    every = max(1, ceil(len(points) / MOST_POINTS))
    kept = {number for stage in stages for number in (stage.first, stage.last, stage.best)}
    kept |= {point.round for point in (points[-1:] + sorted(points, key=lambda point: -(point.adversarial or 0))[:1])}
    drawn = [point for number, point in enumerate(points) if number % every == 0 or point.round in kept]
    return Curve(
        round=tuple(point.round for point in drawn),
        clean=tuple(round(point.clean or 0.0, 5) for point in drawn),
        adversarial=tuple(round(point.adversarial or 0.0, 5) for point in drawn),
        seconds=None if timed is None else tuple(round(spent[point.round], 2) for point in drawn),
        measured=len(points),
        every=every,
    )


def _stages(rounds: Sequence[_Round], records: Sequence[Record], timed: bool) -> Iterator[Stage]:
    pairs = [(each, record) for each, record in zip(rounds, records, strict=True) if each.module]
    for module, group in groupby(pairs, lambda pair: pair[0].module):
        played = list(group)
        found = [each for each, _ in played]
        fixed, last = found[-1].fixed, found[-1]
        spent = simulated_seconds(record for _, record in played) if timed else {}
        # What the kept round was trained with: alpha may have been changed after it.
        kept = next((each for each in found if fixed and each.round == fixed.round), last)
        yield Stage(
            module=module or 0,
            first=found[0].round,
            last=last.round,
            warmup=sum(not each.adversarial_training for each in found),
            epsilon=kept.epsilon,
            alpha=kept.alpha,
            best=fixed.round if fixed else None,
            clean=fixed.clean if fixed else None,
            adversarial=fixed.adversarial if fixed else None,
            computation=spent.get("computation_s"),
            access=spent.get("access_s"),
        )


def _perturbation(rounds: Sequence[_Round]) -> Perturbation:
    return Perturbation(_steps((r.round, r.epsilon) for r in rounds), _steps((r.round, r.alpha) for r in rounds))


def _steps(values: Iterable[tuple[int, float | None]]) -> Steps:
    changes: list[tuple[int, float]] = []
    for number, value in values:
        if value is not None and (not changes or changes[-1][1] != value):
            changes.append((number, value))
    return Steps(tuple(number for number, _ in changes), tuple(value for _, value in changes))


def _assignment(rounds: Sequence[_Round], population: int, modules: int) -> Assignment | None:
    """Count who trained what: in the stage of module m, a client with the modules up to n trains m … n."""
    spans = Counter((client, each.module or last, last) for each in rounds for client, last in each.assigned.items())
    counts: dict[int, Counter[int]] = {}
    for (client, first, last), times in spans.items():
        counts.setdefault(client, Counter()).update(dict.fromkeys(range(first, last + 1), times))
    if not counts:
        return None
    modules = max(modules, *(max(count, default=0) for count in counts.values()))
    shown = sorted(counts)[:MOST_CLIENTS]
    return Assignment(
        clients=tuple(shown),
        rounds=tuple(tuple(counts[client][module] for module in range(1, modules + 1)) for client in shown),
        left_out=len(counts) - len(shown),
        never=max(0, population - len(counts)),
    )


def _bars(records: Sequence[Record], parts: Mapping[str, Callable[[Sequence[Record]], float]]) -> Bars:
    every = max(1, ceil(len(records) / MOST_BARS))
    groups = [records[start : start + every] for start in range(0, len(records), every)]
    return Bars(
        every,
        tuple(group[0]["round"] for group in groups),
        {name: tuple(round(of(group), 4) for group in groups) for name, of in parts.items()},
    )


def _time(folder: ReadFolder) -> Time | None:
    time = folder.summary.time
    if time is None:
        return None
    parts: Mapping[str, Callable[[Sequence[Record]], float]] = {
        "computation": lambda records: simulated_seconds(records)["computation_s"],
        "access": lambda records: simulated_seconds(records)["access_s"],
    }
    return Time(time.computation, time.access, time.communication, _bars(folder.records, parts))


def _traffic(folder: ReadFolder) -> Traffic | None:
    wire = folder.summary.wire
    if wire is None:
        return None

    def moved(records: Sequence[Record]) -> Wire:
        return Wire(**(moved_bytes(records) or {"sent": 0, "received": 0, "jfat": 0}))

    parts: Mapping[str, Callable[[Sequence[Record]], float]] = {
        "sent": lambda records: moved(records).sent,
        "received": lambda records: moved(records).received,
    }
    return Traffic(wire.sent, wire.received, wire.jfat, _bars(folder.records, parts))


def _faults(records: Sequence[Record]) -> Faults:
    found: dict[str, list[tuple[int, str]]] = {}
    for record in records:
        for client, reasons in faulty_clients(record).items():
            for reason in reasons:
                found.setdefault(reason, []).append((record["round"], client))
    listed = [
        Reason(text, len(where), len({client for _, client in where}), where[0][0], where[-1][0])
        for text, where in found.items()
    ]
    listed.sort(key=lambda reason: (-reason.times, reason.first, reason.text))
    return Faults(
        times=sum(len(faulty_clients(record)) for record in records),
        reasons=tuple(listed[:MOST_REASONS]),
        other=len(listed[MOST_REASONS:]),
    )
