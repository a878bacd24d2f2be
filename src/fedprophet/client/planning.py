"""Plans for a run whose memory is limited: a client's for what it trains, and what the server may ask for.

What was predicted once is remembered.
"""

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from fedprophet.cascade.measure import bytes_of
from fedprophet.client.budget import LocalIteration, MeasuredCost, Planned, iteration_of
from fedprophet.client.memory_plan import MemoryPlan


class Planner:
    """Chooses plans. A prediction takes its time, so another round or limit uses those that are known."""

    def __init__(self) -> None:
        self._known: dict[Hashable, int] = {}

    def cheapest(self, iteration: LocalIteration, limit: int) -> Planned:
        """Return the cheapest plan that is predicted to fit; BudgetError if none does."""
        return _Remembering(**_fields(iteration), known=self._known).cheapest(limit)


@dataclass(frozen=True)
class _Remembering(LocalIteration):
    """A local iteration whose peaks are predicted only where they are not known yet."""

    known: dict[Hashable, int] = field(kw_only=True)

    @cached_property
    def _kind(self) -> Hashable:
        """What a peak depends on: shapes, and which of the training's terms there are."""
        part, threat = self.part, self.threat
        shapes = tuple(tuple(tensor.shape) for tensor in part.tensors)
        what = part.first, part.last, part.head is None, shapes, part.chain.device
        attack = None if threat is None else (threat.norm, threat.harmless, *map(math.isinf, threat.bounds))
        return what, self.input_shape, replace(self.training, iterations=1, learning_rate=0.0), attack

    def _attack_peak(self, size: int) -> int:
        return self._remembered(("attack", size), lambda: LocalIteration._attack_peak(self, size))

    def _step_peak(self, plan: MemoryPlan) -> int:
        return self._remembered(("step", plan), lambda: LocalIteration._step_peak(self, plan))

    def _remembered(self, half: Hashable, predict: Callable[[], int]) -> int:
        key = self._kind, half
        if key not in self.known:
            self.known[key] = predict()
        return self.known[key]


ALLOWANCE, LEAST_ALLOWANCE = 0.01, 2**13
"""What training may take beside what is predicted, as a share of it, and at least so many bytes: the order of samples,
a second set of norm statistics."""


@dataclass(frozen=True)
class PlannedCost(MeasuredCost):
    """What a chain costs where memory is limited: a client that has this much trains by a plan that fits."""

    def memory(self, first: int, last: int) -> int:
        """Return the bytes that a client needs to train, auxiliary head included."""
        return _allowing(super().memory(first, last))

    @cached_property
    def clean_memory(self) -> int:
        """The bytes that a client needs to train the whole model without an attack."""
        whole = iteration_of(self.chain, self, 0, len(self.chain), self.training)
        return _allowing(replace(whole, threat=None).least())

    def attack_memory(self, last: int, batch: int) -> int:
        """Return the bytes that attacking a batch of images takes in atoms 0 … `last` − 1, beside their tensors."""
        still = replace(self.training, batch=batch, momentum=0.0, proximal=0.0)
        return _Attack(**_fields(iteration_of(self.chain, self, 0, last, still))).activations


@dataclass(frozen=True)
class _Attack(LocalIteration):
    """An attack alone, as it is evaluated."""

    @property
    def activations(self) -> int:
        return self._attack_peak(0) - bytes_of(self.part.tensors)


def _allowing(size: int) -> int:
    return size + max(math.ceil(size * ALLOWANCE), LEAST_ALLOWANCE)


def _fields(iteration: LocalIteration) -> dict[str, Any]:
    return {each.name: getattr(iteration, each.name) for each in fields(LocalIteration)}
