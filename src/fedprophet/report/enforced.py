"""The memory of runs that were held to it (`memory.enforce`): what training took at its peak, and by which plans."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

Bytes = Annotated[int, Field(ge=1)]


@dataclass(frozen=True)
class ClientPlan:
    """What the journal records of one training: the plan, the bytes at its peak, and those that it might take."""

    plan: str
    peak_bytes: Bytes
    limit_bytes: Bytes


@dataclass(frozen=True)
class EnforcedMemory:
    """The memory of some trainings: the most bytes that one took, and what that one might take.

    `closest` is the largest share of its limit that any of them took, `plans` how often each plan was taken, the most
    frequent one first.
    """

    peak: int
    limit: int
    closest: float
    plans: Mapping[str, int]

    @classmethod
    def of(cls, taken: ClientPlan) -> "EnforcedMemory":
        """Return that of one training."""
        peak, limit = taken.peak_bytes, taken.limit_bytes
        return cls(peak, limit, peak / limit, {taken.plan: 1})

    @property
    def trainings(self) -> int:
        """How often clients trained."""
        return sum(self.plans.values())


@dataclass(frozen=True)
class MeasuredPart:
    """What the training of modules `first` to `last` took where memory was enforced; None where there are no modules.

    `counted` is what the most economical plan for the largest such task is predicted to take.
    """

    first: int | None
    last: int | None
    trainings: int
    counted: int | None
    measured: EnforcedMemory


Training = tuple[tuple[int | None, int | None], int | None, EnforcedMemory]
"""One training: its first and last module, what is counted for it, and its memory."""


def together(parts: Iterable[EnforcedMemory]) -> EnforcedMemory | None:
    """Return the memory of all trainings of several parts; None if there are none."""
    parts = list(parts)
    if not parts:
        return None
    # Of trainings that took the same, the one that might take the least says the most.
    highest = max(parts, key=lambda part: (part.peak, -part.limit))
    plans: Counter[str] = Counter()
    for part in parts:
        plans.update(part.plans)
    ordered = sorted(plans.items(), key=lambda item: (-item[1], item[0]))
    return EnforcedMemory(highest.peak, highest.limit, max(part.closest for part in parts), dict(ordered))


def measured_parts(trainings: Iterable[Training]) -> Iterator[MeasuredPart]:
    """Yield the memory of trainings, those of the same modules together, in the order of modules."""
    found: dict[tuple[int | None, int | None], list[tuple[int | None, EnforcedMemory]]] = {}
    for span, counted, memory in trainings:
        found.setdefault(span, []).append((counted, memory))
    for span in sorted(found, key=lambda span: (span[0] or 0, span[1] or 0)):
        measured = together(memory for _, memory in found[span])
        assert measured is not None
        counted = max((size for size, _ in found[span] if size), default=None)
        yield MeasuredPart(*span, measured.trainings, counted, measured)
