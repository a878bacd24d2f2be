"""Which plan a local iteration needs to stay within a memory budget: the cheapest whose predicted peak fits.

An iteration has two halves, attack and step, and a plan for each. Both take their memory beside what is there all the
time: the part's parameters and norm statistics, the optimiser's momenta, and the batch.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from fedprophet.cascade.atoms import Chain
from fedprophet.cascade.cost import ChainCost
from fedprophet.cascade.heads import Head, build_head
from fedprophet.cascade.measure import LiveBytes, bytes_of, measured_peak, without_allocating
from fedprophet.client.descent import Descent
from fedprophet.client.memory_plan import MemoryPlan, Step
from fedprophet.client.part import ModelPart
from fedprophet.client.trainer import attacked, training_loss
from fedprophet.errors import BudgetError
from fedprophet.messages.values import LocalTraining
from fedprophet.sizes import format_size
from fedprophet.threat import ThreatModel, feature_threat, input_threat

RADIUS = 1.0
"""How far an attack goes does not matter to its memory."""
ATTACK_STEPS = 2
"""A second step of an attack takes what all further ones take."""
T = TypeVar("T")


TOLERANCE = 0.05
"""How far a measurement may exceed its prediction before a smaller budget is planned for."""


class Planned(NamedTuple):
    """A plan, and the bytes that an iteration by it is predicted to take."""

    plan: MemoryPlan
    peak: int


class Checked(NamedTuple):
    """A plan, the bytes that an iteration by it was predicted and measured to take, and the budget it was made for."""

    plan: MemoryPlan
    peak: int
    measured: int
    budget: int


@dataclass(frozen=True)
class LocalIteration:
    """What is planned: a part of a chain is attacked and trained on batches of inputs (their shape is one sample's)."""

    part: ModelPart
    input_shape: tuple[int, ...]
    training: LocalTraining
    threat: ThreatModel | None

    def cheapest(self, budget: int) -> Planned:
        """Return the cheapest plan that is predicted to fit; BudgetError if none does."""
        attack, attack_peak = self._first_fitting(self._attack_peak, self._attack_sizes(), budget)
        step, step_peak = self._first_fitting(self._step_peak, self._steps(), budget)
        return Planned(replace(step, attack=attack), max(attack_peak, step_peak))

    def checked(self, budget: int) -> Checked:
        """Return the cheapest plan that fits when it is measured; BudgetError if none does.

        Where more is measured than predicted, the plan is made for a budget that is smaller by the same factor.
        """
        aimed = budget
        while True:
            plan, peak = self.cheapest(aimed)
            measured = self.measured(plan)
            if measured <= budget and (aimed < budget or measured <= peak * (1 + TOLERANCE)):
                return Checked(plan, peak, measured, aimed)
            aimed = aimed * peak // measured

    def least(self) -> int:
        """Return the bytes that the most economical plan is predicted to take."""
        *_, attack = self._attack_sizes()
        *_, step = self._steps()
        return max(self._attack_peak(attack), min(self._step_peak(step), self._step_peak(MemoryPlan(step=Step.FUSED))))

    def predicted(self, plan: MemoryPlan) -> int:
        """Return the bytes that an iteration by a plan is predicted to take; nothing is allocated."""
        return max(self._attack_peak(plan.attack), self._step_peak(plan))

    def measured(self, plan: MemoryPlan) -> int:
        """Run an iteration on random inputs; return the bytes that it took. The part is trained by it."""
        labels, descent = self._beginning()

        def iterate() -> None:
            self._step(plan, self._attack(plan.attack, self._inputs(), labels), labels, descent)

        return measured_peak(iterate, self.part.chain.device) + bytes_of([*self._held(descent), labels])

    def _attack_peak(self, size: int) -> int:
        return self._peak(lambda labels, _: self._attack(size, self._inputs(), labels)) if self.threat else 0

    def _step_peak(self, plan: MemoryPlan) -> int:
        return self._peak(lambda labels, descent: self._step(plan, self._inputs(), labels, descent))

    def _peak(self, compute: Callable[[Tensor, Descent], object]) -> int:
        part = self.part
        modules = dict.fromkeys(
            module
            for root in (part.chain.model, *part.chain.modules(), *([part.head] if part.head is not None else []))
            for module in root.modules()
        )
        with without_allocating(modules):
            labels, descent = self._beginning()
            with LiveBytes([*self._held(descent), labels]) as live:
                compute(labels, descent)
        return int(live.peak)

    def _inputs(self) -> Tensor:
        return self.part.take(torch.rand(self.training.batch, *self.input_shape))

    def _beginning(self) -> tuple[Tensor, Descent]:
        """Return labels, and an optimiser that has its momenta already."""
        part = self.part
        labels = torch.zeros(self.training.batch, dtype=torch.long, device=part.chain.device)
        descent = Descent.of(part, self.training)
        for parameter in part.parameters():
            parameter.grad = torch.zeros_like(parameter)
        descent(part.parameters())
        return labels, descent

    def _held(self, descent: Descent) -> Iterable[Tensor]:
        return [*self.part.tensors, *descent.held]

    def _attack(self, size: int, x: Tensor, labels: Tensor) -> Tensor:
        if self.threat is None:
            return x
        threat = replace(self.threat, steps=ATTACK_STEPS)
        return attacked(self.part, x, labels, threat, self.training.strong_convexity, torch.Generator(), size)

    def _step(self, plan: MemoryPlan, x: Tensor, labels: Tensor, descent: Descent) -> None:
        training_loss(self.training, self.part, x, labels, plan).backward(descent)

    def _attack_sizes(self) -> Iterator[int]:
        """Yield how many samples may be attacked at a time, 0 for all of them.

        Norm layers that keep no statistics use the batch's in evaluation mode too: their samples know each other.
        """
        yield 0
        layers = self.part.chain.modules(self.part.first, self.part.last)
        if not any(isinstance(layer, _BatchNorm) and layer.running_mean is None for layer in layers):
            yield from _halves(self.training.batch)

    def _steps(self) -> Iterator[MemoryPlan]:
        for step in (Step.WHOLE, Step.FUSED, Step.ATOMS):
            yield MemoryPlan(step=step)
        yield from (MemoryPlan(step=Step.PIECES, piece=size) for size in _halves(self.training.batch))

    def _first_fitting(self, peak_of: Callable[[T], int], choices: Iterable[T], budget: int) -> tuple[T, int]:
        for choice in choices:
            if (peak := peak_of(choice)) <= budget:
                return choice, peak
        raise BudgetError(
            f"{self.part.layers} cannot be trained within {format_size(budget)} with a batch of "
            f"{self.training.batch}: the most economical plan is predicted to take "
            f"{format_size(self.least(), 2)}. Give more memory, a smaller train.batch, "
            "or modules of fewer atoms (a lower memory.budget)"
        )


def iteration_of(chain: Chain, cost: ChainCost, first: int, last: int, training: LocalTraining) -> LocalIteration:
    """Return the local iteration on some atoms, with a head where they are not the last, attacked at their input."""
    head = None
    if last < len(chain):
        with torch.device("meta"):  # nothing is drawn, since a run's draws must not depend on it
            head = build_head(cost.atoms[last - 1].output[1:], cost.classes)
        head = head if chain.device.type == "meta" else _of_zeros(head, chain.device)
    part = ModelPart(chain, first, last, head)
    if not first:
        return LocalIteration(part, cost.input[1:], training, input_threat(RADIUS, RADIUS, ATTACK_STEPS))
    before = cost.atoms[first - 1]
    return LocalIteration(part, before.output[1:], training, feature_threat(RADIUS, ATTACK_STEPS, before.bounds))


def _of_zeros(head: Head, device: torch.device) -> Head:
    head = head.to_empty(device=device)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.zero_()
    return head


@dataclass(frozen=True)
class MeasuredCost(ChainCost):
    """What a chain costs, with the memory that the most economical plan is predicted to take instead of the paper's."""

    chain: Chain = field(kw_only=True, repr=False, compare=False)
    training: LocalTraining = field(kw_only=True)
    _known: dict[tuple[int, int], int] = field(init=False, repr=False, compare=False, default_factory=dict)

    @classmethod
    def of(cls, cost: ChainCost, chain: Chain, training: LocalTraining) -> "MeasuredCost":
        """Return the cost of a chain whose other costs are known."""
        values = {each.name: getattr(cost, each.name) for each in fields(ChainCost)}
        return cls(**values, chain=chain, training=training)

    def memory(self, first: int, last: int) -> int:
        """Return the bytes that training takes by the most economical plan, auxiliary head included."""
        if (first, last) not in self._known:
            self._known[first, last] = iteration_of(self.chain, self, first, last, self.training).least()
        return self._known[first, last]


PARTS = 16
"""Fewer samples at a time than a batch has by this save next to nothing, and take long to predict."""


def _halves(batch: int) -> Iterator[int]:
    """Yield half of a batch, a quarter of it, …, but not single samples: torch convolves them in ways of their own."""
    least = max(2, -(-batch // PARTS))
    while (batch := -(-batch // 2)) >= least:
        yield batch
        if batch == least:
            return
