"""What becomes of a run over its rounds: accuracies, stages, the perturbation, and who trained what."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import ceil
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter

from fedprophet.report.enforced import Training
from fedprophet.report.folders import enforced_of, of_record
from fedprophet.report.runs import Amount, Count, Share
from fedprophet.runs.summary import simulated_seconds
from fedprophet.server.coordinator import Record

MOST_POINTS = 400
"""Points of a curve, at most about so many."""
MOST_CLIENTS = 200
"""Clients in the picture of who trained what."""


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
class Assignment:
    """In how many rounds each client trained each module: one row for a client, one column for a module."""

    clients: tuple[int, ...]
    rounds: tuple[tuple[int, ...], ...]
    left_out: int
    never: int


@dataclass(frozen=True)
class _Fixed:
    round: Count
    clean: Share | None
    adversarial: Share | None


@dataclass(frozen=True)
class DrawnRound:
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


_ROUND = TypeAdapter(DrawnRound)


def drawn_rounds(records: Sequence[Record], journal: Path) -> list[DrawnRound]:
    """Return what is drawn of the records of a journal; CheckpointError if it is damaged."""
    return [of_record(_ROUND, record, record, journal) for record in records]


def curve_of(rounds: Sequence[DrawnRound], timed: Sequence[Record] | None, stages: Sequence[Stage]) -> Curve:
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


def stages_of(rounds: Sequence[DrawnRound], records: Sequence[Record], timed: bool) -> Iterator[Stage]:
    """Yield the stages of a cascade: rounds in a row that train the same module."""
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


def perturbation_of(rounds: Sequence[DrawnRound]) -> Perturbation:
    """Return the attack in training over the rounds."""
    return Perturbation(_steps((r.round, r.epsilon) for r in rounds), _steps((r.round, r.alpha) for r in rounds))


def _steps(values: Iterable[tuple[int, float | None]]) -> Steps:
    changes: list[tuple[int, float]] = []
    for number, value in values:
        if value is not None and (not changes or changes[-1][1] != value):
            changes.append((number, value))
    return Steps(tuple(number for number, _ in changes), tuple(value for _, value in changes))


def assignment_of(rounds: Sequence[DrawnRound], population: int, modules: int) -> Assignment | None:
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


def trainings_of(rounds: Sequence[DrawnRound], records: Sequence[Record], journal: Path) -> Iterator[Training]:
    """Yield every training of a run whose memory was enforced."""
    for each, record in zip(rounds, records, strict=True):
        for client, found in enforced_of(record, journal).items():
            counted = record.get("times", {}).get(str(client), {}).get("memory_bytes")
            yield (each.module, each.assigned.get(client, each.module)), counted, found
