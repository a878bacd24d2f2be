"""SGD on a loss that is computed batch by batch, as a whole or in pieces that need less memory."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedprophet.client.part import ModelPart
from fedprophet.interrupts import let_signals_through
from fedprophet.messages.tasks import Distill, Task, Train
from fedprophet.messages.values import LocalTraining
from fedprophet.randomness import generator


@dataclass(frozen=True)
class Loss:
    """The loss of one batch, and the way back from it: it makes the gradients and lets a descent step along them."""

    value: Tensor
    backward: Callable[["Descent"], None]


def whole_loss(value: Tensor, part: ModelPart) -> Loss:
    """Return a loss that goes back as a whole, and is stepped along when all gradients are there."""

    def backward(descent: "Descent") -> None:
        value.backward()  # type: ignore[no-untyped-call]
        descent(part.parameters())

    return Loss(value, backward)


def fused_loss(value: Tensor, part: ModelPart) -> Loss:
    """Return a loss whose gradients are stepped along and forgotten one by one, as soon as each is complete."""

    def backward(descent: "Descent") -> None:
        hooks = [
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda complete: descent([complete])
            )
            for parameter in part.parameters()
            if parameter.requires_grad
        ]
        try:
            value.backward()  # type: ignore[no-untyped-call]
        finally:
            for hook in hooks:
                hook.remove()

    return Loss(value, backward)


def batches(samples: int, size: int, iterations: int, task: Task) -> Iterator[Tensor]:
    """Yield the positions of `iterations` batches: shuffled passes, of the sizes that `batch_sizes` says."""
    done = 0
    while done < iterations:
        order = torch.randperm(samples, generator=generator(task.seed, "batches", task.round, task.client, done))
        for batch in torch.split(order, size)[: iterations - done]:
            yield batch
            done += 1


def descend(task: Train | Distill, part: ModelPart, samples: int, loss_of: Callable[[int, Tensor], Loss]) -> float:
    """Step down a loss, given by iteration and batch, with SGD; return its mean over the iterations.

    It stops at the first loss that is not finite, and that is what is returned.
    """
    hyper = task.training
    descent = Descent.of(part, hyper, begun=isinstance(task, Train) and task.memory > 0)
    total = 0.0
    for iteration, batch in enumerate(batches(samples, hyper.batch, hyper.iterations, task)):
        let_signals_through()
        loss = loss_of(iteration, batch)
        value = float(loss.value.detach())
        if not math.isfinite(value):
            return value
        loss.backward(descent)
        total += value
        del loss  # it may hold its batch, which would be there beside the next one
    return total / hyper.iterations


class Descent:
    """SGD with momentum and weight decay: bit-identical to torch.optim.SGD, without its overhead.

    That takes as long as the step itself where layers are narrow, and loads torch's compiler.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        hyper: LocalTraining,
        summed: Iterable[Tensor] = (),
        anchored: Iterable[Tensor] = (),
        begun: bool = False,
    ) -> None:
        """Take over some parameters.

        The gradients of those that are `summed` are never forgotten; those that are `anchored` are drawn back to where
        they are now, by the gradient μ (w − w₀) (FedProx; Li et al., 2020). With `begun`, momenta of zero are there
        before the first step: side by side in memory, and not wherever the first gradients happen to lie.
        """
        self._hyper = hyper
        self._anchors = {id(parameter): parameter.detach().clone() for parameter in anchored}
        momenta = parameters if begun and hyper.momentum else ()
        self._momenta = {id(parameter): torch.zeros_like(parameter.detach()) for parameter in momenta}
        self._summed = {id(parameter) for parameter in summed}
        for parameter in parameters:
            parameter.grad = None

    @classmethod
    def of(cls, part: ModelPart, hyper: LocalTraining, begun: bool = False) -> "Descent":
        """Take over the parameters of a part, as its hyper-parameters say."""
        heads = part.head.parameters() if part.head is not None and hyper.summed_heads else ()
        anchored = part.shared_parameters() if hyper.proximal else ()
        return cls(part.parameters(), hyper, summed=heads, anchored=anchored, begun=begun)

    @property
    def held(self) -> list[Tensor]:
        """What it keeps between two steps, besides gradients that are summed."""
        return [*self._momenta.values(), *self._anchors.values()]

    @torch.no_grad()
    def __call__(self, parameters: Iterable[nn.Parameter]) -> None:
        """Step some parameters down their gradients, and forget these, but for those that are summed."""
        for parameter in parameters:
            if parameter.grad is not None:
                self._step(parameter, parameter.grad)

    def forgets(self, parameter: Tensor) -> bool:
        """Whether a gradient is forgotten once it is stepped along."""
        return id(parameter) not in self._summed

    @torch.no_grad()
    def step_rows(self, parameter: Tensor, rows: slice, gradient: Tensor) -> None:
        """Step some rows of a parameter down their gradient, which is written to, as if it were part of a whole one."""
        name = id(parameter)
        if self._hyper.momentum and name not in self._momenta:
            self._momenta[name] = torch.zeros_like(parameter)
        momentum, anchor = self._momenta.get(name), self._anchors.get(name)
        self._descend(
            parameter[rows],
            gradient,
            None if momentum is None else momentum[rows],
            None if anchor is None else anchor[rows],
        )

    def _step(self, parameter: Tensor, gradient: Tensor) -> None:
        name = id(parameter)
        if name in self._summed:
            gradient = gradient.clone()  # it goes on growing, and must not take decay and momentum along
        else:
            parameter.grad = None
        moved = self._descend(parameter, gradient, self._momenta.get(name), self._anchors.get(name))
        if self._hyper.momentum:
            self._momenta[name] = moved

    def _descend(self, parameter: Tensor, gradient: Tensor, momentum: Tensor | None, anchor: Tensor | None) -> Tensor:
        """Return what the parameter was moved along: the momentum, if there is one already, or the gradient."""
        hyper = self._hyper
        if hyper.weight_decay:
            gradient.add_(parameter, alpha=hyper.weight_decay)
        if anchor is not None:
            gradient.add_(parameter - anchor, alpha=hyper.proximal)
        if momentum is not None:
            gradient = momentum.mul_(hyper.momentum).add_(gradient)
        parameter.add_(gradient, alpha=-hyper.learning_rate)
        return gradient
