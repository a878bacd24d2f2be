"""Which plan a local iteration needs to stay within a memory budget: the cheapest whose predicted peak fits.

An iteration has two halves, attack and step, and a plan for each. Both take their memory beside what is there all the
time: the part's parameters and norm statistics, the optimiser's momenta, and the batch.

On a GPU the prediction leaves workspaces out, since cuDNN takes what it is granted. There a plan is tried under a limit
of the allocator, and the cheapest that then keeps within the budget is taken.
"""

import gc
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from fedprophet.cascade.allocator import allocator_limit, ran_out
from fedprophet.cascade.atoms import Chain
from fedprophet.cascade.cost import ChainCost
from fedprophet.cascade.heads import Head, build_head
from fedprophet.cascade.measure import (
    LiveBytes,
    account_of,
    bytes_of,
    cuda_base,
    measured_peak,
    without_allocating,
)
from fedprophet.client.boundary import aim_of, counter
from fedprophet.client.captured import Ascent, ascent_of
from fedprophet.client.descent import Descent, Loss
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


TOLERANCE = 0.05
"""How far a measurement may exceed its prediction before a smaller budget is planned for."""
TRIAL_RUNS = 3
"""The first sets up what is set up once, the second captures what is captured, the third is like all further ones."""
SLACKS = tuple(mib * 2**20 for mib in (64, 48, 32, 16, 0))
"""Bytes that the allocator may hold beyond a budget, as it takes memory in steps of 20 MiB and keeps some for later.
What is allocated has to keep within the budget all the same."""
OUT = sys.maxsize
"""The bytes of what the allocator refused."""


class Planned(NamedTuple):
    """A plan, and the bytes that an iteration by it is predicted to take, or took when it was tried."""

    plan: MemoryPlan
    peak: int


class Checked(NamedTuple):
    """A plan, the bytes that an iteration by it was predicted and measured to take, and the budget it was made for.

    On a GPU `limit` are the bytes that the allocator may hold for it: workspaces were measured under that limit.
    """

    plan: MemoryPlan
    peak: int
    measured: int
    budget: int
    limit: int | None = None


class Trial(NamedTuple):
    """The most bytes that the attack and the step of some iterations took, or OUT; and the allocator's limit."""

    attack: int
    step: int
    limit: int

    @property
    def peak(self) -> int:
        return max(self.attack, self.step)


@dataclass(frozen=True)
class LocalIteration:
    """What is planned: a part of a chain is attacked and trained on batches of inputs (their shape is one sample's).

    `place` is the device that it is planned for, if that is not where the chain is. `sizes` are those of the batches
    that it will meet, the largest first, where that is known: convolutions have other workspaces for a smaller batch
    at the end of a pass, and a trial must have met them. `classes` is how many its exit has: rows of probabilities that
    predictions are drawn to have that length.
    """

    part: ModelPart
    input_shape: tuple[int, ...]
    training: LocalTraining
    threat: ThreatModel | None
    place: torch.device | None = None
    sizes: tuple[int, ...] = ()
    classes: int = 0

    def cheapest(self, budget: int) -> Planned:
        """Return the cheapest plan that is predicted to fit; BudgetError if none does."""
        step_peak = cache(self._step_peak)
        for attack in self._attacks():
            if (attack_peak := self._attack_peak(attack)) > budget:
                continue
            kept = self._kept(attack)
            for step in self._steps():
                if (peak := step_peak(step) + kept) <= budget:
                    return Planned(_joined(attack, step), max(attack_peak, peak))
            if not kept:  # else there may be room beside an attack in fewer samples, which keeps less
                break
        raise self._nothing_fits(budget)

    def checked(self, budget: int) -> Checked:
        """Return the cheapest plan that fits when it is measured; BudgetError if none does.

        Where more is measured than predicted, the plan is made for a budget that is smaller by the same factor. On a
        GPU, where workspaces are not predicted, plans are tried one after the other.
        """
        if self._device.type == "cuda":
            return self._first_that_passes(budget)
        aimed = budget
        while True:
            plan, peak = self.cheapest(aimed)
            measured = self.measured(plan)
            if measured <= budget and (aimed < budget or measured <= peak * (1 + TOLERANCE)):
                return Checked(plan, peak, measured, aimed)
            aimed = aimed * peak // measured

    def least(self, rounded: bool = False) -> int:
        """Return the bytes that the most economical plan is predicted to take, of those that are exact or of all.

        Plans that take no less than another are not predicted: larger pieces, and what could be sliced as well.
        """
        *_, pieces = self._steps()
        whole = [plan for plan in self._steps() if plan.sliced] or [MemoryPlan(step=Step.FUSED)]
        smallest = [replace(pieces, rounded=rounding) for rounding in ((False, True) if rounded else (False,))]
        attacks = {plan.attack_sliced: plan for plan in self._attacks()}  # the last of either kind
        step = min(map(self._step_peak, [*smallest, *whole])) + self._kept(attacks[False])
        attack = sys.maxsize
        for plan in attacks.values():
            if attack > step:  # one that takes no more than the step does not count, whatever another takes
                attack = min(attack, self._attack_peak(plan))
        return max(attack, step)

    def predicted(self, plan: MemoryPlan) -> int:
        """Return the bytes that an iteration by a plan is predicted to take; nothing is allocated."""
        return max(self._attack_peak(plan), self._step_peak(plan) + self._kept(plan))

    def measured(self, plan: MemoryPlan) -> int:
        """Run an iteration on random inputs; return the bytes that it took. The part is trained by it."""
        labels, descent = self._beginning()
        ascend = self._ascent(plan)

        def iterate() -> None:
            self._step(plan, self._attack(plan, self._inputs(), labels, ascend), labels, descent, ascend)

        return measured_peak(iterate, self.part.chain.device) + bytes_of([*self._held(descent), labels])

    @property
    def _device(self) -> torch.device:
        return self.place or self.part.chain.device

    def _first_that_passes(self, budget: int) -> Checked:
        """Return the first plan, in the order of what they cost, that keeps within the budget when it is tried.

        Where no step does, the last attack is tried with all of them: its graph keeps least beside them.
        """
        attacks = [plan for plan in self._attacks() if self._attack_peak(plan) <= budget]
        steps = [plan for plan in self._steps() if self._step_peak(plan) <= budget]
        left, more = list(attacks), list(steps)
        while left and more:
            plan = _joined(left[0], more[0])
            trial = self._trial(plan, budget)
            if trial.peak <= budget:
                return Checked(plan, self.predicted(plan), trial.peak, budget, trial.limit)
            if trial.attack > trial.step:
                left.pop(0)
            else:
                more.pop(0)
            if left and not more and self._kept(left[0]) > self._kept(attacks[-1]):
                left, more = attacks[-1:], list(steps)
        raise self._nothing_fits(budget, tried=bool(attacks and steps))

    def _trial(self, plan: MemoryPlan, budget: int) -> Trial:
        """Try a plan on batches of each size, until one exceeds the budget; the limit is that of the largest."""
        tried: list[Trial] = []
        for size in self.sizes or (self.training.batch,):
            tried.append(self._tried_below(plan, budget, size))
            if tried[-1].peak > budget:
                break
        return Trial(max(trial.attack for trial in tried), max(trial.step for trial in tried), tried[0].limit)

    def _tried_below(self, plan: MemoryPlan, budget: int, size: int) -> Trial:
        """Try a plan under the highest limit of the allocator with which it keeps within the budget.

        The lower it is, the smaller workspaces convolutions take, and the likelier it is that tensors themselves find
        no room between others.
        """
        trial = self._tried_within(plan, budget + SLACKS[0], size)
        for slack in SLACKS[1:]:
            if trial.peak <= budget or trial.peak == OUT:
                break
            lower = self._tried_within(plan, budget + slack, size)
            if lower.peak == OUT:
                break
            trial = lower
        return trial

    def _tried_within(self, plan: MemoryPlan, limit: int, size: int) -> Trial:
        """Try a plan on batches of a size under a limit, as a training would do it that begins within the limit."""
        device = self._device
        held, before = bytes_of(self.part.tensors), cuda_base(device)
        worst, half = [0, 0], 0
        try:
            with allocator_limit(device, limit - held):
                for peak in self._halves_of_iterations(plan, size):
                    worst[half], half = max(worst[half], peak - before + held), 1 - half
        except RuntimeError as error:
            if not ran_out(error):
                raise
            worst[half] = OUT
        for parameter in self.part.parameters():
            parameter.grad = None
        gc.collect()  # tensors that the error's frames hold, and graphs
        return Trial(worst[0], worst[1], limit)

    def _halves_of_iterations(self, plan: MemoryPlan, size: int) -> Iterator[int]:
        """Attack and step in turn, yield the most bytes that were allocated in each half."""
        labels, descent = self._beginning()
        ascend = self._ascent(plan)
        for _ in range(TRIAL_RUNS):
            torch.cuda.reset_peak_memory_stats(self._device)
            x = self._attack(plan, self._inputs(size), labels[:size], ascend)
            torch.cuda.synchronize(self._device)
            yield torch.cuda.max_memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            self._step(plan, x, labels[:size], descent, ascend)
            del x  # a training has none of it either when the next batch comes
            torch.cuda.synchronize(self._device)
            yield torch.cuda.max_memory_allocated(self._device)

    def _attack_peak(self, plan: MemoryPlan) -> int:
        if self.threat is None:
            return 0
        return self._kept(plan) + self._peak(
            lambda labels, _: self._attack(plan, self._inputs(), labels, self._ascent(plan))
        )

    def _kept(self, plan: MemoryPlan) -> int:
        """Return the bytes that the graph of an attack keeps, through the step as well: what it reads and writes."""
        if self.threat is None or self._device.type != "cuda":
            return 0
        return 2 * account_of(self._device).size(plan.attack * math.prod(self.input_shape) * torch.float32.itemsize)

    def _step_peak(self, plan: MemoryPlan) -> int:
        return self._peak(lambda labels, descent: self._step(plan, self._inputs(), labels, descent, self._ascent(plan)))

    def _peak(self, compute: Callable[[Tensor, Descent], object]) -> int:
        part, account = self.part, account_of(self._device)
        modules = dict.fromkeys(
            module
            for root in (part.chain.model, *part.chain.modules(), *([part.head] if part.head is not None else []))
            for module in root.modules()
        )
        with without_allocating(modules):
            labels, descent = self._beginning()
            with LiveBytes([*self._held(descent), labels], account) as live:
                compute(labels, descent)
        return int(live.peak)

    def _inputs(self, size: int | None = None) -> Tensor:
        return self.part.take(torch.rand(size or self.training.batch, *self.input_shape))

    def _beginning(self) -> tuple[Tensor, Descent]:
        """Return labels, and an optimiser that has its momenta already, as it has where training is limited."""
        labels = torch.zeros(self.training.batch, dtype=torch.long, device=self.part.chain.device)
        return labels, Descent.of(self.part, self.training, begun=True)

    def _held(self, descent: Descent) -> Iterable[Tensor]:
        return [*self.part.tensors, *descent.held]

    def _ascent(self, plan: MemoryPlan) -> Ascent:
        threat = self.threat and replace(self.threat, steps=ATTACK_STEPS)
        return ascent_of(self.part, threat, self.training.strong_convexity, plan.attack, plan.attack_sliced)

    def _attack(self, plan: MemoryPlan, x: Tensor, labels: Tensor, ascend: Ascent) -> Tensor:
        if self.threat is None:
            return x
        withstood = counter(self.training, self.threat, labels)
        return attacked(self.part, x, labels, self.threat, torch.Generator(), plan.attack, ascend, withstood)

    def _step(self, plan: MemoryPlan, x: Tensor, labels: Tensor, descent: Descent, ascend: Ascent) -> None:
        self._loss(plan, x, labels, ascend).backward(descent)

    def _loss(self, plan: MemoryPlan, x: Tensor, labels: Tensor, ascend: Ascent) -> Loss:
        """Return the loss of a batch, as a training does that keeps nothing else for the way back."""
        withstood = counter(self.training, self.threat, labels)
        server = x.new_zeros(len(x), self.classes) if self.training.consistency else None
        aim = aim_of(self.training, self.threat, labels, withstood, server)
        return ascend.step(lambda: training_loss(self.training, self.part, x, aim, plan))

    def _attacks(self) -> Iterator[MemoryPlan]:
        """Yield the plans of an attack: in fewer and fewer samples at a time, then by slices of weights as well.

        Norm layers that keep no statistics use the batch's in evaluation mode too: their samples know each other.
        """
        for sliced in self._slicing:
            for size in (0, *(() if self.part.mixes_samples else _halves(self.training.batch))):
                yield MemoryPlan(attack=size, attack_sliced=sliced)

    def _steps(self) -> Iterator[MemoryPlan]:
        """Yield the plans of a step: the exact ones, then the rounded ones."""
        yield MemoryPlan(step=Step.WHOLE)
        for sliced in self._slicing:
            yield MemoryPlan(step=Step.FUSED, sliced=sliced)
        for rounded in (False, True):
            for sliced in (False,) if rounded else self._slicing:
                yield MemoryPlan(step=Step.ATOMS, sliced=sliced, rounded=rounded)
            for size in _halves(self.training.batch):
                yield MemoryPlan(step=Step.PIECES, piece=size, rounded=rounded)

    @property
    def _slicing(self) -> tuple[bool, ...]:
        """Whether plans are by slices of weights: some are on a CPU, whose convolutions copy weights."""
        return (False,) if self._device.type == "cuda" else (False, True)

    def _nothing_fits(self, budget: int, tried: bool = False) -> BudgetError:
        least = self.least(rounded=any(plan.rounded for plan in self._steps()))
        but = ", but no plan kept within the limit when it was tried, workspaces included" if tried else ""
        return BudgetError(
            f"{self.part.layers} cannot be trained within {format_size(budget)} with a batch of "
            f"{self.training.batch}: the most economical plan is predicted to take {format_size(least, 2)}{but}. "
            "Give more memory, a smaller train.batch, or modules of fewer atoms (a lower memory.budget)"
        )


def _joined(attack: MemoryPlan, step: MemoryPlan) -> MemoryPlan:
    return replace(step, attack=attack.attack, attack_sliced=attack.attack_sliced)


def iteration_of(
    chain: Chain,
    cost: ChainCost,
    first: int,
    last: int,
    training: LocalTraining,
    place: torch.device | None = None,
) -> LocalIteration:
    """Return the local iteration on some atoms, with a head where they are not the last, attacked at their input.

    It is planned for the device that the chain is on, or for another place.
    """
    head = None
    if last < len(chain):
        with torch.device("meta"):  # nothing is drawn, since a run's draws must not depend on it
            head = build_head(cost.atoms[last - 1].output[1:], cost.classes)
        head = head if chain.device.type == "meta" else _of_zeros(head, chain.device)
    part = ModelPart(chain, first, last, head)
    if not first:
        threat, shape = input_threat(RADIUS, RADIUS, ATTACK_STEPS), cost.input[1:]
    else:
        before = cost.atoms[first - 1]
        threat, shape = feature_threat(RADIUS, ATTACK_STEPS, before.bounds), before.output[1:]
    return LocalIteration(part, shape, training, threat, place, classes=cost.classes)


def _of_zeros(head: Head, device: torch.device) -> Head:
    head = head.to_empty(device=device)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.zero_()
    return head


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
            iteration = iteration_of(self.chain, self, first, last, self.training, self.place)
            self._known[first, last] = iteration.least()
        return self._known[first, last]


PARTS = 32
"""Fewer samples at a time than a batch has by this save next to nothing, and take long to predict."""


def _halves(batch: int) -> Iterator[int]:
    """Yield half of a batch, a quarter of it, …, but not single samples: torch convolves them in ways of their own."""
    least = max(2, -(-batch // PARTS))
    while (batch := -(-batch // 2)) >= least:
        yield batch
        if batch == least:
            return
