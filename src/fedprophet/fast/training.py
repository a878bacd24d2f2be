"""One local iteration of several clients, written out: the batch's statistics, the gradients, the step of SGD."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fedprophet.cascade.heads import of_head
from fedprophet.fast.aims import Teacher, aimed
from fedprophet.fast.draws import Draws
from fedprophet.fast.kernels import Kernels, Statistics
from fedprophet.fast.layout import Tensors
from fedprophet.fast.narrow import Squares
from fedprophet.fast.program import Block, Convolution, Exits, Ladder
from fedprophet.fast.stack import (
    StackedNetwork,
    dense_backward,
    dense_forward,
    joined,
    norm_of,
    running_statistics,
)
from fedprophet.messages.values import LocalTraining

Weights = Mapping[Convolution, Tensor]
"""The convolutions' weights in the type that products are computed in."""
Gradients = dict[str, Tensor]


@dataclass(frozen=True)
class Normed:
    """What a convolution gave, and the batch's statistics with which its norm layer goes on."""

    convolved: Tensor
    statistics: Statistics


@dataclass(frozen=True)
class Saved:
    """What the way back through a block needs: its input, what each part gave, its output. On a shortcut with a
    convolution, also that one's input and what it gave.
    """

    x: Tensor
    own: Normed
    active: Tensor
    left: Tensor
    winners: Tensor | None
    before: Tensor | None
    projected: Normed | None


class TrainingStack(StackedNetwork):
    """Networks in training mode. `stacks` are changed in place, `losses` collects the sum of each client's losses."""

    def __init__(
        self, ladder: Ladder, kernels: Kernels, compute: torch.dtype, stacks: dict[str, Tensor], hyper: LocalTraining
    ) -> None:
        super().__init__(ladder, kernels, compute)
        assert all(stack.is_contiguous() for stack in stacks.values())  # the step of SGD reads memory, not strides
        self.stacks = stacks
        self.hyper = hyper
        first = next(iter(stacks.values()))
        self.learning_rate = torch.tensor(hyper.learning_rate, device=first.device)
        self.velocity = {name: torch.zeros_like(stacks[name]) for name in self.layout.parameters()}
        self.losses = torch.zeros(ladder.clients, device=first.device)
        biases = [f"{part.convolution}.bias" for part in ladder.longest.convolutions if part.bias]
        # What a batch norm subtracts again has no gradient.
        self._nothing = {name: torch.zeros_like(stacks[name]) for name in biases}
        heads = [name for name in self.velocity if of_head(name) and hyper.summed_heads]
        self._summed = {name: torch.zeros_like(stacks[name]) for name in heads}
        """The gradients of auxiliary heads that are summed over a round's steps."""
        self.squares: Squares | None = None
        """Factors for the gradients of scaled parameters, see `narrow`."""
        self.observed: dict[str, Tensor] = {}
        """A second set of norm statistics, which follows the observed batches."""
        self.anchors: dict[str, Tensor] = {}
        """The parameters that training started from, where a proximal term draws back to them."""

    @property
    def held(self) -> tuple[Tensors, ...]:
        """All tensors that last from step to step."""
        return self.stacks, self.velocity, self.observed, self._nothing, self._summed, self.anchors

    def reset(self, learning_rate: float) -> None:
        """Begin a round: no velocity, no sums, no losses."""
        self.learning_rate.fill_(learning_rate)
        torch._foreach_zero_([*self.velocity.values(), *self._summed.values()])
        self.losses.zero_()

    def step(self, z: Tensor, targets: Tensor, draws: Draws, teacher: Teacher | None = None) -> None:
        """Take one step of SGD on a prepared (perturbed) batch; `targets` are one-hot, dropout comes from `draws`.

        `teacher` is what training is drawn to beside the targets, where it is (`aims`).
        """
        blocks, weights = self.ladder.longest.blocks, self._weights()
        saved = list(self._run(z, weights, self.stacks))
        gradients = dict(self._nothing)
        above: Tensor | None = None
        # What shortcuts bring back, by the block whose input they begin at.
        shortcuts: dict[int, Tensor] = {}
        for number in range(len(blocks) - 1, -1, -1):
            kept = saved.pop()
            behind = blocks[min(number + 1, len(blocks) - 1)]
            deeper = partial(self._deeper, behind, above, weights[behind], shortcuts.pop(number + 1, None))
            here = partial(self._exit, kept.left, targets, teacher, draws, gradients)
            gradient = joined(kept.left, self.leaving(number + 1), above, deeper, here)
            if kept.winners is not None:
                gradient = self.kernels.unpool(kept.winners, gradient, blocks[number].pool)
            above = self._backward(blocks[number], kept.x, kept.own, kept.active, gradient, gradients)
            if blocks[number].residual:
                shortcuts[number - 1] = self._shortcut_back(blocks[number], kept, weights, gradient, gradients)
        self._descend(gradients)

    def observe(self, z: Tensor) -> None:
        """Let the second set of norm statistics follow a prepared batch; nothing else changes."""
        for _ in self._run(z, self._weights(), self.observed):
            pass

    def _run(self, z: Tensor, weights: Weights, statistics: Tensors) -> Iterator[Saved]:
        """Run block after block with the batch's own statistics, and let the running ones follow."""
        before = z
        for block, reach in zip(self.ladder.longest.blocks, self.ladder.reach, strict=True):
            kept = self._forward(block, weights, z[:reach], before[:reach], statistics)
            z, before = kept.left, z
            yield kept

    def _weights(self) -> Weights:
        return {part: self._weight(part.convolution) for part in self.ladder.longest.convolutions}

    def _deeper(
        self, block: Block, above: Tensor | None, weight: Tensor, shortcut: Tensor | None, out: Tensor | None
    ) -> Tensor:
        """Take the gradient back through the convolution of the next block."""
        assert above is not None
        return self.kernels.convolve(above, weight, turned=True, out=out, add=shortcut, stride=block.stride)

    def _weight(self, name: str) -> Tensor:
        return self.stacks[f"{name}.weight"].to(self.compute)

    def _forward(self, block: Block, weights: Weights, x: Tensor, before: Tensor, statistics: Tensors) -> Saved:
        """Run one block with the batch's own statistics; `before` is what the last block read."""
        own = self._normed(block, weights[block], x, statistics)
        part = block.projection
        projected = None if part is None else self._normed(part, weights[part], before, statistics)
        add = before if block.residual else None
        if projected is not None:
            found = projected.statistics
            add = self.kernels.scale_shift(projected.convolved, found.scale, found.shift, relu=False)
        active = self.kernels.scale_shift(own.convolved, own.statistics.scale, own.statistics.shift, add)
        left, winners = self.kernels.pool(active, block.pool) if block.pool else (active, None)
        return Saved(x, own, active, left, winners, None if projected is None else before, projected)

    def _normed(self, part: Convolution, weight: Tensor, x: Tensor, statistics: Tensors) -> Normed:
        """Run a convolution, take the statistics of what it gives, and let the running ones follow."""
        convolved = self.kernels.convolve(x, weight, channels=part.inputs, stride=part.stride)
        norm = norm_of(part, self.stacks, statistics)
        fixed = self.hyper.fixed_statistics
        return Normed(convolved, running_statistics(norm) if fixed else self.kernels.norm_statistics(convolved, norm))

    def _exit(
        self,
        features: Tensor,
        targets: Tensor,
        teacher: Teacher | None,
        draws: Draws,
        gradients: Gradients,
        exits: Exits,
        out: Tensor | None,
    ) -> Tensor:
        """Return the gradient of the mean loss with respect to the feature, and note those of the dense layers."""
        clients = slice(exits.low, exits.high)
        dense, feature = exits.program.dense, features[clients]
        weights = [self._weight(layer.name) for layer in dense]
        biases = [self.stacks[f"{layer.name}.bias"].to(self.compute) if layer.bias else None for layer in dense]
        run = dense_forward(
            dense, weights, biases, self.pooled(exits, feature), partial(draws.uniform, first=exits.low)
        )
        samples, mu = targets.shape[1], self.hyper.strong_convexity
        own = None if teacher is None else teacher[clients]
        loss, gradient = aimed(self.calibrated(exits, run.scores), targets[clients], own)
        if exits.program.convex:
            norms = torch.linalg.vector_norm(feature.flatten(1), dim=1, dtype=torch.float32)
            loss = loss + 0.5 * mu * norms.square() / samples
        self.losses[clients] += loss
        gradient, found = dense_backward(dense, weights, run, gradient.to(self.compute))
        for layer, (weight, bias) in zip(dense, found, strict=True):
            gradients[f"{layer.name}.weight"] = weight
            if layer.bias:
                gradients[f"{layer.name}.bias"] = bias
        return self.exit_gradient(exits, gradient, feature, mu / samples, out=out)

    def _backward(
        self, part: Convolution, x: Tensor, normed: Normed, active: Tensor, g: Tensor, gradients: Gradients
    ) -> Tensor:
        """Go back through ReLU and norm layer to what a convolution gave; note the gradients of their parameters."""
        slopes = self.kernels.norm_slopes(g, active, normed.convolved, normed.statistics)
        gradients[f"{part.norm}.weight"] = slopes.weight
        gradients[f"{part.norm}.bias"] = slopes.bias
        scale, b, c = normed.statistics.scale, slopes.b, slopes.c
        if self.hyper.fixed_statistics:  # nothing of the batch is in what it is normalised with
            b = c = torch.zeros_like(scale)
            if part.bias:
                gradients[f"{part.convolution}.bias"] = scale * slopes.bias
        dx = self.kernels.norm_gradient(g, active, normed.convolved, scale, b, c)
        gradients[f"{part.convolution}.weight"] = self.kernels.weight_gradient(x, dx, part.kernel, part.stride)
        return dx

    def _shortcut_back(
        self, block: Block, kept: Saved, weights: Weights, gradient: Tensor, gradients: Gradients
    ) -> Tensor:
        """Take the gradient behind a block's ReLU back along its shortcut."""
        part = block.projection
        if part is None or kept.projected is None or kept.before is None:
            return gradient * (kept.active > 0)
        dx = self._backward(part, kept.before, kept.projected, kept.active, gradient, gradients)
        return self.kernels.convolve(dx, weights[part], turned=True, stride=part.stride)

    def _descend(self, gradients: Gradients) -> None:
        """Take the step: v ← momentum · v + g + decay · w, w ← w − rate · v."""
        names = self.layout.parameters()
        if self.squares is not None:
            self.squares.apply(gradients)
        for name, total in self._summed.items():
            gradients[name] = total.add_(gradients[name])
        for name, anchor in self.anchors.items():
            # Not in place: a gradient may be memory that lasts.
            gradients[name] = torch.add(gradients[name], self.stacks[name] - anchor, alpha=self.hyper.proximal)
        torch._fused_sgd_(
            [self.stacks[name] for name in names],
            [gradients[name].contiguous() for name in names],  # it reads memory, not strides
            [self.velocity[name] for name in names] if self.hyper.momentum else [],
            weight_decay=self.hyper.weight_decay,
            momentum=self.hyper.momentum,
            lr=self.learning_rate,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        )
