"""One local iteration of several clients, written out: the batch's statistics, the gradients, the step of SGD."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fedprophet.client.task import LocalTraining
from fedprophet.fast.draws import Draws
from fedprophet.fast.kernels import Kernels
from fedprophet.fast.program import Block, Exits, Ladder
from fedprophet.fast.stack import Network, dense_backward, dense_forward, joined


@dataclass(frozen=True)
class Saved:
    """What the way back through a block needs: its input, what each part gave, its output, the batch's statistics."""

    x: Tensor
    convolved: Tensor
    active: Tensor
    left: Tensor
    winners: Tensor | None
    mean: Tensor
    inverse: Tensor
    scale: Tensor


class Training(Network):
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

    def reset(self, learning_rate: float) -> None:
        """Begin a round: no velocity, no losses."""
        self.learning_rate.fill_(learning_rate)
        torch._foreach_zero_(list(self.velocity.values()))
        self.losses.zero_()

    def step(self, z: Tensor, targets: Tensor, draws: Draws) -> None:
        """Take one step of SGD on a prepared (perturbed) batch; `targets` are one-hot, dropout comes from `draws`."""
        blocks = self.ladder.longest.blocks
        weights = {block: self._weight(block.convolution) for block in blocks}
        saved: list[Saved] = []
        for block, reach in zip(blocks, self.ladder.reach, strict=True):
            kept = self._forward(block, weights[block], z[:reach])
            saved.append(kept)
            z = kept.left
        gradients: dict[str, Tensor] = {}
        above: Tensor | None = None
        for number in range(len(blocks) - 1, -1, -1):
            kept = saved.pop()
            deeper = partial(self._deeper, above, weights[blocks[min(number + 1, len(blocks) - 1)]])
            here = partial(self._exit, kept.left, targets, draws, gradients)
            gradient = joined(kept.left, self.leaving(number + 1), above, deeper, here)
            above = self._backward(blocks[number], kept, gradient, gradients)
        self._descend(gradients)

    def _deeper(self, above: Tensor | None, weight: Tensor, out: Tensor | None) -> Tensor:
        """Take the gradient back through the convolution of the next block."""
        assert above is not None
        return self.kernels.convolve(above, weight, turned=True, out=out)

    def _weight(self, name: str) -> Tensor:
        return self.stacks[f"{name}.weight"].to(self.compute)

    def _forward(self, block: Block, weight: Tensor, x: Tensor) -> "Saved":
        """Run one block with the batch's own statistics, and let the running ones follow."""
        convolved = self.kernels.convolve(x, weight, channels=block.inputs)
        mean, variance = self.kernels.moments(convolved)
        inverse = torch.rsqrt(variance + block.epsilon)
        scale = self.stacks[f"{block.norm}.weight"] * inverse
        active = self.kernels.scale_shift_relu(convolved, scale, self.stacks[f"{block.norm}.bias"] - mean * scale)
        rows = convolved.shape[1:4].numel()
        # The convolution's bias leaves no trace behind a batch norm but in its running mean.
        whole = mean + self.stacks[f"{block.convolution}.bias"] if block.bias else mean
        self.stacks[f"{block.norm}.running_mean"].lerp_(whole, block.momentum)
        self.stacks[f"{block.norm}.running_var"].lerp_(variance * (rows / (rows - 1)), block.momentum)
        left, winners = self.kernels.pool(active) if block.pool else (active, None)
        return Saved(x, convolved, active, left, winners, mean, inverse, scale)

    def _exit(
        self, features: Tensor, targets: Tensor, draws: Draws, gradients: dict[str, Tensor], exits: Exits
    ) -> Tensor:
        """Return the gradient of the mean loss with respect to the feature, and note those of the dense layers."""
        clients = slice(exits.low, exits.high)
        dense, feature, targets = exits.program.dense, features[clients], targets[clients]
        weights = [self._weight(layer.name) for layer in dense]
        biases = [self.stacks[f"{layer.name}.bias"].to(self.compute) if layer.bias else None for layer in dense]
        run = dense_forward(
            dense, weights, biases, self.pooled(exits, feature), partial(draws.uniform, first=exits.low)
        )
        samples = targets.shape[1]
        loss = -(run.scores.log_softmax(dim=2) * targets).sum(dim=(1, 2)) / samples
        gradient = ((run.scores.softmax(dim=2) - targets) / samples).to(self.compute)
        gradient, found = dense_backward(dense, weights, run, gradient)
        gradient = self.unpooled(exits, gradient, feature)
        if exits.program.convex:
            mu, wide = self.hyper.strong_convexity, feature.float()
            loss = loss + 0.5 * mu * wide.square().flatten(1).sum(dim=1) / samples
            gradient = gradient + (mu / samples * wide).to(self.compute)
        self.losses[clients] += loss
        for layer, (weight, bias) in zip(dense, found, strict=True):
            gradients[f"{layer.name}.weight"] = weight
            if layer.bias:
                gradients[f"{layer.name}.bias"] = bias
        return gradient

    def _backward(self, block: Block, kept: "Saved", gradient: Tensor, gradients: dict[str, Tensor]) -> Tensor:
        """Go back through a block to what its convolution gave; note the gradients of its parameters."""
        g = gradient if kept.winners is None else self.kernels.unpool(kept.winners, gradient)
        total, product = self.kernels.norm_sums(g, kept.active, kept.convolved)
        slope = (product - kept.mean * total) * kept.inverse  # Σ g · x̂
        gradients[f"{block.norm}.weight"] = slope
        gradients[f"{block.norm}.bias"] = total
        rows = kept.convolved.shape[1:4].numel()
        # dx = scale · (g − Σ g / M − x̂ · Σ g x̂ / M), with x̂ = (x − mean) · inverse, sorted by what it multiplies.
        b = -kept.scale * kept.inverse * slope / rows
        c = -kept.scale * total / rows - b * kept.mean
        dx = self.kernels.norm_gradient(g, kept.active, kept.convolved, kept.scale, b, c)
        gradients[f"{block.convolution}.weight"] = self.kernels.weight_gradient(kept.x, dx)
        if block.bias:
            # What a batch norm subtracts again has no gradient.
            gradients[f"{block.convolution}.bias"] = torch.zeros_like(total)
        return dx

    def _descend(self, gradients: dict[str, Tensor]) -> None:
        """Take the step: v ← momentum · v + g + decay · w, w ← w − rate · v."""
        names = self.layout.parameters()
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
