"""A client's plans where memory is limited: what was predicted or tried once is remembered."""

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

import torch

from fedprophet.client.budget import Planned, cheapest, checked
from fedprophet.client.iteration import LocalIteration
from fedprophet.client.memory_plan import MemoryPlan
from fedprophet.storage.bounded import BoundedCache

MOST_KNOWN = 4096
"""So many predictions, and so many trials, are remembered: sub-networks have many shapes, and nodes run for long."""
COARSE = 6
"""Limits on a GPU are cut off behind so many binary digits: clients that have much the same share a trial."""


class Planner:
    """Chooses plans. A prediction takes its time, so another round or limit uses those that are known."""

    def __init__(self) -> None:
        self._known: BoundedCache[Hashable, int] = BoundedCache(MOST_KNOWN)
        self._tried: BoundedCache[Hashable, Planned] = BoundedCache(MOST_KNOWN)

    def cheapest(self, iteration: LocalIteration, limit: int) -> Planned:
        """Return the cheapest exact plan that fits: by prediction or, on a GPU, by trial. BudgetError if none does.

        What a run learns does not depend on how much memory its clients have, so it has no rounded plans.
        """
        remembering = _Remembering.of(iteration, self._known)
        if iteration.part.chain.device.type != "cuda":
            return cheapest(remembering, limit)
        key = remembering.kind, iteration.sizes, (limit := _coarse(limit))
        return self._tried.get(key) or self._tried.put(key, _tried(remembering, limit))


@dataclass(frozen=True)
class _Remembering(LocalIteration):
    """A local iteration whose peaks are predicted only where they are not known yet."""

    known: BoundedCache[Hashable, int] = field(kw_only=True)

    @classmethod
    def of(cls, iteration: LocalIteration, known: BoundedCache[Hashable, int]) -> "_Remembering":
        return cls(**{each.name: getattr(iteration, each.name) for each in fields(LocalIteration)}, known=known)

    @cached_property
    def kind(self) -> Hashable:
        """What a peak depends on: shapes, and which of the training's terms there are."""
        part, threat = self.part, self.threat
        shapes = tuple(tuple(tensor.shape) for tensor in part.tensors)
        what = part.first, part.last, part.head is None, shapes, part.chain.device
        attack = None if threat is None else (threat.norm, threat.harmless, *map(math.isinf, threat.bounds))
        return what, self.input_shape, replace(self.training, iterations=1, learning_rate=0.0), attack

    def attack_peak(self, plan: MemoryPlan) -> int:
        """Return the bytes that the attack is predicted to take."""
        half = "attack", plan.attack, plan.attack_sliced
        return self._remembered(half, lambda: LocalIteration.attack_peak(self, plan))

    def step_peak(self, plan: MemoryPlan) -> int:
        """Return the bytes that the step is predicted to take."""
        return self._remembered(("step", plan), lambda: LocalIteration.step_peak(self, plan))

    def _remembered(self, half: Hashable, predict: Callable[[], int]) -> int:
        key = self.kind, half
        peak = self.known.get(key)
        return self.known.put(key, predict()) if peak is None else peak


def _tried(iteration: LocalIteration, limit: int) -> Planned:
    """Return the cheapest plan that keeps within a limit when it is tried; the part is then as it was."""
    tensors = iteration.part.tensors
    before = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
    try:
        found = checked(iteration, limit)
    finally:
        with torch.no_grad():
            for tensor, value in zip(tensors, before, strict=True):
                tensor.copy_(value)
    return Planned(found.plan, found.measured)


def _coarse(limit: int) -> int:
    cut = max(limit.bit_length() - COARSE, 0)
    return limit >> cut << cut
