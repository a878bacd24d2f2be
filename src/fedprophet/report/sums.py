"""Sums over the rounds of a run: simulated time, bytes that travelled, and answers of clients that were lost."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from fedprophet.report.runs import ReadFolder, Wire
from fedprophet.runs.summary import faulty_clients, moved_bytes, simulated_seconds
from fedprophet.server.coordinator import Record

MOST_BARS = 100
"""Bars over the rounds, at most so many."""
MOST_REASONS = 12
"""Reasons of dropped updates that are listed, the most frequent ones."""


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


def time_of(folder: ReadFolder) -> Time | None:
    """Return the simulated time of a run; None where none was counted."""
    time = folder.summary.time
    if time is None:
        return None
    parts: Mapping[str, Callable[[Sequence[Record]], float]] = {
        "computation": lambda records: simulated_seconds(records)["computation_s"],
        "access": lambda records: simulated_seconds(records)["access_s"],
    }
    return Time(time.computation, time.access, time.communication, _bars(folder.records, parts))


def traffic_of(folder: ReadFolder) -> Traffic | None:
    """Return the bytes of a run on Flower; None where nothing travelled."""
    wire = folder.summary.wire
    if wire is None:
        return None

    def moved(records: Sequence[Record]) -> Wire:
        return Wire(**(moved_bytes(records) or {"sent": 0, "received": 0, "whole_model": 0}))

    parts: Mapping[str, Callable[[Sequence[Record]], float]] = {
        "sent": lambda records: moved(records).sent,
        "received": lambda records: moved(records).received,
    }
    return Traffic(wire.sent, wire.received, wire.whole_model, _bars(folder.records, parts))


def faults_of(records: Sequence[Record]) -> Faults:
    """Return whose answers were lost, and why."""
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


def _bars(records: Sequence[Record], parts: Mapping[str, Callable[[Sequence[Record]], float]]) -> Bars:
    every = max(1, ceil(len(records) / MOST_BARS))
    groups = [records[start : start + every] for start in range(0, len(records), every)]
    return Bars(
        every,
        tuple(group[0]["round"] for group in groups),
        {name: tuple(round(of(group), 4) for group in groups) for name, of in parts.items()},
    )
