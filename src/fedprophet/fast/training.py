"""One local iteration of several clients, written out: the batch's statistics, the gradients, the step of SGD."""

import torch
from torch import Tensor

from fedprophet.client.task import LocalTraining
from fedprophet.fast.draws import Draws
from fedprophet.fast.kernels import Kernels
from fedprophet.fast.program import Block, Program
from fedprophet.fast.stack import Network, dense_backward, dense_forward, turned


class Training(Network):
    """Networks in training mode. `stacks` are changed in place, `losses` collects the sum of each client's losses."""

    def __init__(
        self, program: Program, kernels: Kernels, compute: torch.dtype, stacks: dict[str, Tensor], hyper: LocalTraining
    ) -> None:
        super().__init__(program, kernels, compute)
        assert all(stack.is_contiguous() for stack in stacks.values())  # the step of SGD reads memory, not strides
        self.stacks = stacks
        self.hyper = hyper
        first = next(iter(stacks.values()))
        self.learning_rate = torch.tensor(hyper.learning_rate, device=first.device)
        self.velocity = {name: torch.zeros_like(stacks[name]) for name in self.layout.parameters()}
        self.losses = torch.zeros(len(first), device=first.device)

    def reset(self, learning_rate: float) -> None:
        """Begin a round: no velocity, no losses."""
        self.learning_rate.fill_(learning_rate)
        torch._foreach_zero_(list(self.velocity.values()))
        self.losses.zero_()

    def snapshot(self) -> list[Tensor]:
        """Return a copy of all that a step changes."""
        return [tensor.clone() for tensor in self._changing()]

    def restore(self, before: list[Tensor]) -> None:
        """Put a snapshot back."""
        for tensor, value in zip(self._changing(), before, strict=True):
            tensor.copy_(value)

    def _changing(self) -> list[Tensor]:
        return [*self.stacks.values(), *self.velocity.values(), self.losses]

    def step(self, x: Tensor, targets: Tensor, draws: Draws) -> None:
        """Take one step of SGD on a (perturbed) batch; `targets` are one-hot, dropout comes from `draws`."""
        z = self.prepare(x)
        saved = []
        for block in self.program.blocks:
            convolved, active, statistics = self._forward(block, z)
            saved.append((z, convolved, active, statistics))
            z = self.kernels.pool(active) if block.pool else active
        gradient, gradients = self._exit(z, targets, draws)
        for block, kept in zip(reversed(self.program.blocks), reversed(saved), strict=True):
            first = block is self.program.blocks[0]
            gradient = self._backward(block, kept, gradient, gradients, first)
        self._descend(gradients)

    def _weight(self, name: str) -> Tensor:
        return self.stacks[f"{name}.weight"].to(self.compute)

    def _forward(self, block: Block, x: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Run one block with the batch's own statistics, and let the running ones follow."""
        convolved = self.kernels.convolve(x, self._weight(block.convolution))
        mean, variance = self.kernels.moments(convolved)
        scale = self.stacks[f"{block.norm}.weight"] * torch.rsqrt(variance + block.epsilon)
        active = self.kernels.scale_shift_relu(convolved, scale, self.stacks[f"{block.norm}.bias"] - mean * scale)
        rows = convolved.shape[1:4].numel()
        # The convolution's bias leaves no trace behind a batch norm but in its running mean.
        whole = mean + self.stacks[f"{block.convolution}.bias"] if block.bias else mean
        self.stacks[f"{block.norm}.running_mean"].lerp_(whole, block.momentum)
        self.stacks[f"{block.norm}.running_var"].lerp_(variance * (rows / (rows - 1)), block.momentum)
        return convolved, active, (mean, torch.rsqrt(variance + block.epsilon), scale)

    def _exit(self, feature: Tensor, targets: Tensor, draws: Draws) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the gradient of the mean loss with respect to the feature, and those of the dense layers."""
        dense = self.program.dense
        weights = [self._weight(layer.name) for layer in dense]
        biases = [self.stacks[f"{layer.name}.bias"].to(self.compute) if layer.bias else None for layer in dense]
        run = dense_forward(dense, weights, biases, self.pooled(feature), draws)
        samples = targets.shape[1]
        loss = -(run.scores.log_softmax(dim=2) * targets).sum(dim=(1, 2)) / samples
        gradient = ((run.scores.softmax(dim=2) - targets) / samples).to(self.compute)
        gradient, found = dense_backward(dense, weights, run, gradient)
        gradient = self.unpooled(gradient, feature)
        if self.program.convex:
            mu, wide = self.hyper.strong_convexity, feature.float()
            loss = loss + 0.5 * mu * wide.square().flatten(1).sum(dim=1) / samples
            gradient = gradient + (mu / samples * wide).to(self.compute)
        self.losses += loss
        gradients = {}
        for layer, (weight, bias) in zip(dense, found, strict=True):
            gradients[f"{layer.name}.weight"] = weight
            if layer.bias:
                gradients[f"{layer.name}.bias"] = bias
        return gradient, gradients

    def _backward(
        self,
        block: Block,
        kept: tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor, Tensor]],
        gradient: Tensor,
        gradients: dict[str, Tensor],
        first: bool,
    ) -> Tensor:
        """Go back through a block; note the gradients of its parameters and return that of its input."""
        x, convolved, active, (mean, inverse, scale) = kept
        g = self.kernels.unpool(active, gradient) if block.pool else gradient
        total, product = self.kernels.norm_sums(g, active, convolved)
        slope = (product - mean * total) * inverse  # Σ g · x̂
        gradients[f"{block.norm}.weight"] = slope
        gradients[f"{block.norm}.bias"] = total
        rows = convolved.shape[1:4].numel()
        # dx = scale · (g − Σ g / M − x̂ · Σ g x̂ / M), with x̂ = (x − mean) · inverse, sorted by what it multiplies.
        b = -scale * inverse * slope / rows
        c = -scale * total / rows - b * mean
        dx = self.kernels.norm_gradient(g, active, convolved, scale, b, c)
        gradients[f"{block.convolution}.weight"] = self.kernels.weight_gradient(x, dx)
        if block.bias:
            # What a batch norm subtracts again has no gradient.
            gradients[f"{block.convolution}.bias"] = torch.zeros_like(total)
        return dx if first else self.kernels.convolve(dx, turned(self._weight(block.convolution)).contiguous())

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
