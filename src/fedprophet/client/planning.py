"""Plans for a run whose memory is limited: a client's for what it trains, and what the server may ask for.

What was predicted once is remembered.
"""

import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch

from fedprophet.cascade.measure import bytes_of
from fedprophet.client.budget import LocalIteration, MeasuredCost, Planned, iteration_of
from fedprophet.client.memory_plan import PLAIN, MemoryPlan
from fedprophet.errors import BudgetError
from fedprophet.storage.bounded import BoundedCache

MOST_KNOWN = 4096
"""So many predictions, and so many trials, are remembered: sub-networks have many shapes, and nodes run for long."""


class Planner:
    """Chooses plans. A prediction takes its time, so another round or limit uses those that are known."""

    def __init__(self) -> None:
        self._known: BoundedCache[Hashable, int] = BoundedCache(MOST_KNOWN)
        self._tried: BoundedCache[Hashable, Planned] = BoundedCache(MOST_KNOWN)

    def cheapest(self, iteration: LocalIteration, limit: int) -> Planned:
        """Return the cheapest plan that fits: by prediction or, on a GPU, by trial. BudgetError if none does."""
        remembering = _Remembering(**_fields(iteration), known=self._known)
        if iteration.part.chain.device.type != "cuda":
            return remembering.cheapest(limit)
        key = remembering.kind, iteration.sizes, (limit := _coarse(limit))
        return self._tried.get(key) or self._tried.put(key, remembering.tried(limit))


@dataclass(frozen=True)
class _Remembering(LocalIteration):
    """A local iteration whose peaks are predicted only where they are not known yet."""

    known: BoundedCache[Hashable, int] = field(kw_only=True)

    @cached_property
    def kind(self) -> Hashable:
        """What a peak depends on: shapes, and which of the training's terms there are."""
        part, threat = self.part, self.threat
        shapes = tuple(tuple(tensor.shape) for tensor in part.tensors)
        what = part.first, part.last, part.head is None, shapes, part.chain.device
        attack = None if threat is None else (threat.norm, threat.harmless, *map(math.isinf, threat.bounds))
        return what, self.input_shape, replace(self.training, iterations=1, learning_rate=0.0), attack

    def tried(self, limit: int) -> Planned:
        """Return the cheapest plan that keeps within a limit when it is tried; the part is then as it was."""
        tensors = self.part.tensors
        before = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
        try:
            found = self.checked(limit)
        finally:
            with torch.no_grad():
                for tensor, value in zip(tensors, before, strict=True):
                    tensor.copy_(value)
        return Planned(found.plan, found.measured)

    def _steps(self) -> Iterator[MemoryPlan]:
        """Yield the exact plans: what a run learns does not depend on how much memory its clients have."""
        return (plan for plan in super()._steps() if not plan.rounded)

    def _attack_peak(self, plan: MemoryPlan) -> int:
        half = "attack", plan.attack, plan.attack_sliced
        return self._remembered(half, lambda: LocalIteration._attack_peak(self, plan))

    def _step_peak(self, plan: MemoryPlan) -> int:
        return self._remembered(("step", plan), lambda: LocalIteration._step_peak(self, plan))

    def _remembered(self, half: Hashable, predict: Callable[[], int]) -> int:
        key = self.kind, half
        peak = self.known.get(key)
        return self.known.put(key, predict()) if peak is None else peak


COARSE = 6


def _coarse(limit: int) -> int:
    """Return a limit cut off behind its first six binary digits: clients that have much the same share a trial."""
    cut = max(limit.bit_length() - COARSE, 0)
    return limit >> cut << cut


ALLOWANCES = {"cpu": 0.01, "cuda": 0.15}
"""What training may take beside what is predicted, as a share of it: the order of samples, a second set of norm
statistics; on a GPU workspaces, with which micro-batched plans took up to 14 % more when they were tried."""
MORE, MOST = 0.02, 4
"""What is tried next on a GPU has so much more memory, as a share, up to so many times what was allowed."""
LEAST_ALLOWANCE = 2**13
"""At least so many bytes."""


@dataclass(frozen=True)
class PlannedCost(MeasuredCost):
    """What a chain costs where memory is limited: a client that has this much trains by a plan that fits."""

    def memory(self, first: int, last: int) -> int:
        """Return the bytes that a client needs to train, auxiliary head included."""
        return self._allowing(super().memory(first, last))

    @cached_property
    def clean_memory(self) -> int:
        """The bytes that a client needs to train the whole model without an attack."""
        whole = iteration_of(self.chain, self, 0, len(self.chain), self.training, self.place)
        return self._allowing(replace(whole, threat=None).least())

    def attack_memory(self, last: int, batch: int) -> int:
        """Return the bytes that attacking a batch of images takes in atoms 0 … `last` − 1, beside their tensors."""
        still = replace(self.training, batch=batch, momentum=0.0, proximal=0.0, boundary_weights=False)
        return _Attack(**_fields(iteration_of(self.chain, self, 0, last, still, self.place))).activations

    def _allowing(self, size: int) -> int:
        share = ALLOWANCES.get((self.place or self.chain.device).type, max(ALLOWANCES.values()))
        return size + max(math.ceil(size * share), LEAST_ALLOWANCE)


@dataclass(frozen=True)
class TriedCost(PlannedCost):
    """What a chain costs on the GPU that it is on: a client that has this much has a plan that fits when it is tried.

    Workspaces are not predicted there, so what is allowed for them may be too little. Where nothing passes up to MOST
    times that, a client needs more than any has.
    """

    _tried: dict[tuple[int, int], int] = field(init=False, repr=False, compare=False, default_factory=dict)

    def memory(self, first: int, last: int) -> int:
        """Return the bytes that a client needs to train, auxiliary head included."""
        if (first, last) not in self._tried:
            iteration = iteration_of(self.chain, self, first, last, self.training)
            planner, allowed = Planner(), super().memory(first, last)
            need = allowed
            while need < MOST * allowed and not _passes(planner, iteration, need):
                need += math.ceil(need * MORE)
            self._tried[first, last] = need
        return self._tried[first, last]


def _passes(planner: Planner, iteration: LocalIteration, memory: int) -> bool:
    """Whether a client finds a plan, of whose memory a little is not for what is predicted."""
    try:
        with torch.random.fork_rng(devices=()):
            planner.cheapest(iteration, int(memory / (1 + ALLOWANCES["cpu"])))
    except BudgetError:
        return False
    return True


@dataclass(frozen=True)
class _Attack(LocalIteration):
    """An attack alone, as it is evaluated."""

    @property
    def activations(self) -> int:
        return self._attack_peak(PLAIN) - bytes_of(self.part.tensors)


def _fields(iteration: LocalIteration) -> dict[str, Any]:
    return {each.name: getattr(iteration, each.name) for each in fields(LocalIteration)}
