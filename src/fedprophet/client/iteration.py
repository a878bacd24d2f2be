"""One local iteration on a part of a chain: its two halves, attack and step, and the bytes that each takes by a plan.

Both take their memory beside what is there all the time: the part's parameters and norm statistics, the optimiser's
momenta, and the batch. Peaks are predicted without allocating, and measured by the allocator. On a GPU the prediction
leaves workspaces out, since cuDNN takes what it is granted.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedprophet.cascade.atoms import Chain
from fedprophet.cascade.cost import ChainCost
from fedprophet.cascade.heads import Head, build_head
from fedprophet.cascade.measure import LiveBytes, account_of, bytes_of, measured_peak, without_allocating
from fedprophet.client.boundary import aim_of, counter
from fedprophet.client.captured import Ascent, ascent_of
from fedprophet.client.descent import Descent, Loss
from fedprophet.client.memory_plan import MemoryPlan
from fedprophet.client.part import ModelPart
from fedprophet.client.trainer import attacked, training_loss
from fedprophet.messages.values import LocalTraining
from fedprophet.threads import one_thread
from fedprophet.threat import ThreatModel, feature_threat, input_threat

RADIUS = 1.0
"""How far an attack goes does not matter to its memory."""
ATTACK_STEPS = 2
"""A second step of an attack takes what all further ones take."""


@dataclass(frozen=True)
class LocalIteration:
    """A part of a chain is attacked and trained on a batch of inputs (their shape is one sample's).

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

    @property
    def device(self) -> torch.device:
        return self.place or self.part.chain.device

    # What it does ----------------------------------------------------------------------------------------------------

    def inputs(self, size: int | None = None) -> Tensor:
        """Return random inputs: a whole batch, or a smaller one."""
        return self.part.take(torch.rand(size or self.training.batch, *self.input_shape))

    def begin(self) -> tuple[Tensor, Descent]:
        """Return labels, and an optimiser that has its momenta already, as it has where training is limited."""
        labels = torch.zeros(self.training.batch, dtype=torch.long, device=self.part.chain.device)
        return labels, Descent.of(self.part, self.training, begun=True)

    def ascent(self, plan: MemoryPlan) -> Ascent:
        """Return how gradients of the attack are computed by a plan."""
        threat = self.threat and replace(self.threat, steps=ATTACK_STEPS)
        return ascent_of(self.part, threat, self.training.strong_convexity, plan.attack, plan.attack_sliced)

    def attack(self, plan: MemoryPlan, x: Tensor, labels: Tensor, ascend: Ascent) -> Tensor:
        """Return inputs as they are attacked."""
        if self.threat is None:
            return x
        withstood = counter(self.training, self.threat, labels)
        return attacked(self.part, x, labels, self.threat, torch.Generator(), plan.attack, ascend, withstood)

    def step(self, plan: MemoryPlan, x: Tensor, labels: Tensor, descent: Descent, ascend: Ascent) -> None:
        """Step on the loss of a batch."""
        self._loss(plan, x, labels, ascend).backward(descent)

    def _loss(self, plan: MemoryPlan, x: Tensor, labels: Tensor, ascend: Ascent) -> Loss:
        """Return the loss of a batch, as a training does that keeps nothing else for the way back."""
        withstood = counter(self.training, self.threat, labels)
        server = x.new_zeros(len(x), self.classes) if self.training.consistency else None
        aim = aim_of(self.training, self.threat, labels, withstood, server)
        return ascend.step(lambda: training_loss(self.training, self.part, x, aim, plan))

    # What it takes ---------------------------------------------------------------------------------------------------

    def predicted(self, plan: MemoryPlan) -> int:
        """Return the bytes that an iteration by a plan is predicted to take; nothing is allocated."""
        return max(self.attack_peak(plan), self.step_peak(plan) + self.kept(plan))

    def measured(self, plan: MemoryPlan) -> int:
        """Run an iteration on random inputs; return the bytes that it took, on a CPU with one thread.

        The part is trained by it.
        """
        labels, descent = self.begin()
        ascend = self.ascent(plan)

        def iterate() -> None:
            self.step(plan, self.attack(plan, self.inputs(), labels, ascend), labels, descent, ascend)

        device = self.part.chain.device
        with one_thread(device):
            return measured_peak(iterate, device) + bytes_of([*self._held(descent), labels])

    def attack_peak(self, plan: MemoryPlan) -> int:
        """Return the bytes that the attack is predicted to take."""
        if self.threat is None:
            return 0
        return self.kept(plan) + self._peak(
            lambda labels, _: self.attack(plan, self.inputs(), labels, self.ascent(plan))
        )

    def step_peak(self, plan: MemoryPlan) -> int:
        """Return the bytes that the step is predicted to take, beside what the attack's graph keeps."""
        return self._peak(lambda labels, descent: self.step(plan, self.inputs(), labels, descent, self.ascent(plan)))

    def kept(self, plan: MemoryPlan) -> int:
        """Return the bytes that the graph of an attack keeps, through the step as well: what it reads and writes."""
        if self.threat is None or self.device.type != "cuda":
            return 0
        return 2 * account_of(self.device).size(plan.attack * math.prod(self.input_shape) * torch.float32.itemsize)

    def _peak(self, compute: Callable[[Tensor, Descent], object]) -> int:
        part, account = self.part, account_of(self.device)
        modules = dict.fromkeys(
            module
            for root in (part.chain.model, *part.chain.modules(), *([part.head] if part.head is not None else []))
            for module in root.modules()
        )
        with without_allocating(modules):
            labels, descent = self.begin()
            with LiveBytes([*self._held(descent), labels], account) as live:
                compute(labels, descent)
        return int(live.peak)

    def _held(self, descent: Descent) -> Iterable[Tensor]:
        return [*self.part.tensors, *descent.held]


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
