"""What a chain costs, with the memory that plans take instead of the paper's: modules are cut and assigned by it."""

import math
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

import torch

from fedprophet.cascade.atoms import Chain
from fedprophet.cascade.cost import ChainCost
from fedprophet.cascade.measure import bytes_of
from fedprophet.client.budget import least
from fedprophet.client.iteration import LocalIteration, iteration_of
from fedprophet.client.memory_plan import PLAIN
from fedprophet.client.planning import Planner
from fedprophet.errors import BudgetError
from fedprophet.messages.values import LocalTraining

ALLOWANCES = {"cpu": 0.01, "cuda": 0.15}
"""What training may take beside what is predicted, as a share of it: the order of samples, a second set of norm
statistics; on a GPU workspaces, with which micro-batched plans took up to 14 % more when they were tried."""
MORE, MOST = 0.02, 4
"""What is tried next on a GPU has so much more memory, as a share, up to so many times what was allowed."""
LEAST_ALLOWANCE = 2**13
"""At least so many bytes."""


@dataclass(frozen=True)
class MeasuredCost(ChainCost):
    """What a chain costs, with the memory that the most economical plan is predicted to take instead of the paper's.

    `place` is the device that it is predicted for, if that is not where the chain is.
    """

    chain: Chain = field(kw_only=True, repr=False, compare=False)
    training: LocalTraining = field(kw_only=True)
    place: torch.device | None = field(kw_only=True, default=None)
    _known: dict[tuple[int, int], int] = field(init=False, repr=False, compare=False, default_factory=dict)

    @classmethod
    def of(
        cls, cost: ChainCost, chain: Chain, training: LocalTraining, place: torch.device | None = None
    ) -> "MeasuredCost":
        """Return the cost of a chain whose other costs are known."""
        values = {each.name: getattr(cost, each.name) for each in fields(ChainCost)}
        return cls(**values, chain=chain, training=training, place=place)

    def memory(self, first: int, last: int) -> int:
        """Return the bytes that training takes by the most economical exact plan, auxiliary head included."""
        if (first, last) not in self._known:
            self._known[first, last] = least(iteration_of(self.chain, self, first, last, self.training, self.place))
        return self._known[first, last]


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
        return self._allowing(least(replace(whole, threat=None)))

    def attack_memory(self, last: int, batch: int) -> int:
        """Return the bytes that attacking a batch of images takes in atoms 0 … `last` − 1, beside their tensors."""
        still = replace(self.training, batch=batch, momentum=0.0, proximal=0.0, boundary_weights=False)
        iteration = iteration_of(self.chain, self, 0, last, still, self.place)
        return iteration.attack_peak(PLAIN) - bytes_of(iteration.part.tensors)

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
