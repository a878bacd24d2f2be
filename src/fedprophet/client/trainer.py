"""Adversarial cascade learning on one client (Section 5.1): attack the batch, then step on what the attack found."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from fedprophet.attacks.pgd import pgd
from fedprophet.client.part import ModelPart
from fedprophet.messages.tasks import Distill, Task, Train
from fedprophet.messages.values import LocalTraining
from fedprophet.randomness import generator, key, seed_global


def batches(samples: int, size: int, iterations: int, task: Task) -> Iterator[Tensor]:
    """Yield the positions of `iterations` batches: shuffled passes, the last batch of a pass may be smaller."""
    done = 0
    while done < iterations:
        order = torch.randperm(samples, generator=generator(task.seed, "batches", task.round, task.client, done))
        for batch in torch.split(order, size)[: iterations - done]:
            yield batch
            done += 1


def train(
    task: Train,
    part: ModelPart,
    inputs: Tensor,
    labels: Tensor,
    observe: Callable[[ModelPart, Tensor], None] | None = None,
) -> float:
    """Train the part in place on its inputs (images, or cached z_{m−1}); return the mean loss of the iterations.

    `observe` is shown every clean batch before it is attacked, unless statistics are fixed. Dropout draws from torch's
    global generator, which the caller puts back.
    """
    strong_convexity, fixed = task.training.strong_convexity, task.training.fixed_statistics

    def loss_of(iteration: int, batch: Tensor) -> Tensor:
        if observe is not None and not fixed:
            observe(part, inputs[batch])
        x = perturb(task, part, inputs[batch], labels[batch], iteration)
        # A batch of one sample has no batch statistics: its norm layers stay in evaluation mode.
        seed_global(key(task.seed, "dropout", task.round, task.client, iteration))
        with part.mode(training=len(batch) > 1), part.fixed_statistics(fixed):
            return part.losses(x, labels[batch], strong_convexity).mean()

    return descend(task, part, len(labels), loss_of)


def descend(task: Train | Distill, part: ModelPart, samples: int, loss_of: Callable[[int, Tensor], Tensor]) -> float:
    """Step down a loss, given by iteration and batch, with SGD; return its mean over the iterations.

    It stops at the first loss that is not finite, and that is what is returned.
    """
    hyper = task.training
    heads = part.head.parameters() if part.head is not None and hyper.summed_heads else ()
    anchored = part.shared_parameters() if hyper.proximal else ()
    step = _Descent(part.parameters(), hyper, summed=heads, anchored=anchored)
    total = 0.0
    for iteration, batch in enumerate(batches(samples, hyper.batch, hyper.iterations, task)):
        loss = loss_of(iteration, batch)
        value = float(loss.detach())
        if not math.isfinite(value):
            return value
        loss.backward()  # type: ignore[no-untyped-call]
        step()
        total += value
    return total / hyper.iterations


class _Descent:
    """SGD with momentum and weight decay: bit-identical to torch.optim.SGD, without its overhead.

    That takes as long as the step itself where layers are narrow, and loads torch's compiler.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        hyper: LocalTraining,
        summed: Iterable[Tensor] = (),
        anchored: Iterable[Tensor] = (),
    ) -> None:
        """Take over some parameters.

        The gradients of those that are `summed` are never forgotten; those that are `anchored` are drawn back to where
        they are now, by the gradient μ (w − w₀) (FedProx; Li et al., 2020).
        """
        self._parameters = parameters
        self._hyper = hyper
        self._anchors = {id(parameter): parameter.detach().clone() for parameter in anchored}
        self._momenta: dict[int, Tensor] = {}
        self._fresh = parameters
        self._forget()
        kept = {id(parameter) for parameter in summed}
        self._fresh = [parameter for parameter in parameters if id(parameter) not in kept]

    @torch.no_grad()
    def __call__(self) -> None:
        """Step down the gradients, and forget them, but for those that are summed."""
        hyper = self._hyper
        for number, parameter in enumerate(self._parameters):
            gradient = parameter.grad
            if gradient is None:
                continue
            if hyper.weight_decay:
                gradient = gradient.add(parameter, alpha=hyper.weight_decay)
            if id(parameter) in self._anchors:
                gradient = gradient.add(parameter - self._anchors[id(parameter)], alpha=hyper.proximal)
            if hyper.momentum:
                before = self._momenta.get(number)
                if before is not None:
                    gradient = before.mul_(hyper.momentum).add_(gradient)
                # A gradient that is summed goes on growing, and must not take the momentum along.
                self._momenta[number] = gradient.clone() if gradient is parameter.grad else gradient
            parameter.add_(gradient, alpha=-hyper.learning_rate)
        self._forget()

    def _forget(self) -> None:
        for parameter in self._fresh:
            parameter.grad = None


def perturb(task: Train, part: ModelPart, x: Tensor, labels: Tensor, iteration: int) -> Tensor:
    """Attack the part's own loss at its input, norm layers and dropout in evaluation mode."""
    if task.threat is None:
        return x
    strong_convexity = task.training.strong_convexity
    draw = generator(task.seed, "attack", task.round, task.client, iteration)
    with part.still():
        return pgd(lambda z: part.losses(z, labels, strong_convexity).sum(), x, task.threat, draw)
