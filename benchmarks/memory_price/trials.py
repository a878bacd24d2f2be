"""One iteration by a plan, over and over: what it takes, how long, and where it leads."""

from collections.abc import Callable

import torch
from torch import Tensor

from fedprophet.cascade.measure import bytes_of
from fedprophet.client.aims import Labels
from fedprophet.client.captured import Ascent, ascent_of
from fedprophet.client.descent import Descent
from fedprophet.client.iteration import LocalIteration
from fedprophet.client.memory_plan import MemoryPlan
from fedprophet.client.trainer import attacked, training_loss
from fedprophet.threat import with_steps
from memory_price.clock import clock

ATTACK_STEPS = 10
TIMED_STEPS = {"cpu": 2, "cuda": ATTACK_STEPS}


class Trial:
    """An iteration by a plan in its two halves, over and over."""

    def __init__(self, iteration: LocalIteration, plan: MemoryPlan, steps: int) -> None:
        self.part, self.training, self.plan = iteration.part, iteration.training, plan
        self.device, batch = iteration.part.chain.device, iteration.training.batch
        assert iteration.threat is not None
        self.threat = with_steps(iteration.threat, steps)
        self.labels = torch.arange(batch, device=self.device) % 10
        random = torch.rand(batch, *iteration.input_shape, generator=torch.Generator().manual_seed(1))
        self.inputs = iteration.part.take(random.to(self.part.parameters()[0].dtype))
        self.descent = Descent.of(self.part, self.training, begun=True)  # as where memory is limited
        self._ascend: Ascent = ascent_of(
            self.part, self.threat, self.training.strong_convexity, plan.attack, plan.attack_sliced
        )

    @property
    def held(self) -> int:
        """The bytes that are there before it begins: parameters, norm statistics, momenta and the batch."""
        return bytes_of([*self._state(), *self.descent.held, self.labels, self.inputs])

    def attack(self) -> Tensor:
        draw = torch.Generator().manual_seed(0)
        return attacked(self.part, self.inputs, self.labels, self.threat, draw, self.plan.attack, self._ascend)

    def step(self, x: Tensor | None = None) -> None:
        x = self.inputs if x is None else x
        loss = self._ascend.step(lambda: training_loss(self.training, self.part, x, Labels(self.labels), self.plan))
        loss.backward(self.descent)

    def seconds(self, repeat: int) -> float:
        """Return the seconds of an attack and a step, the quickest of some."""
        self.attack()
        self.step()  # a graph is captured after the first step
        share = ATTACK_STEPS / self.threat.steps
        return self._quickest(self.attack, repeat) * share + self._quickest(self.step, repeat)

    def update(self) -> Tensor:
        """Return what one iteration moves all parameters along, as one vector, and undo it.

        That is what momenta of zero have become. (The parameters themselves have changed by so little that their last
        bits count.) One iteration is computed and undone before, as a graph is captured after the first step.
        """
        state = self._state()
        start = [tensor.detach().to("cpu", copy=True) for tensor in state]
        moved = torch.empty(0)
        for _ in range(2):
            torch.manual_seed(0)  # dropout draws the same for every plan
            self.step(self.attack())
            moved = torch.cat([momentum.detach().cpu().double().flatten() for momentum in self.descent.held])
            with torch.no_grad():
                for tensor, value in zip(state, start, strict=True):
                    tensor.copy_(value)
                for momentum in self.descent.held:
                    momentum.zero_()
        return moved

    def _state(self) -> list[Tensor]:
        """Return what an iteration changes: the part's parameters and norm statistics."""
        part = self.part
        names = (*part.chain.shared(part.first, part.last), *part.chain.local(part.first, part.last))
        head = [] if part.head is None else list(part.head.parameters())
        return [*(part.chain.tensors[name] for name in names), *head]

    def _quickest(self, compute: Callable[[], object], repeat: int) -> float:
        found = []
        for _ in range(repeat + 1):  # the first sets up what is set up once
            started = clock(self.device)
            compute()
            found.append(clock(self.device) - started)
        return min(found[1:] or found)
