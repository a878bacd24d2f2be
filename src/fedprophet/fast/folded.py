"""Networks of several clients in evaluation mode, for attacks and evaluation: batch norm folded into the convolutions.

With s = weight / sqrt(variance + eps), BN(W ∗ x + b) = (s·W) ∗ x + s·(b − mean) + bias: one convolution and a shift.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fedprophet.fast.kernels import FEW, Kernels
from fedprophet.fast.layout import Tensors
from fedprophet.fast.program import Block, Convolution, Exits, Ladder, LayerProgram
from fedprophet.fast.stack import ExitRun, StackedNetwork, dense_backward, dense_forward, joined, norm_of

AtExit = Callable[[Exits, Tensor, bool, Tensor | None], Tensor]
"""Returns the gradient of a feature at its exit; whether only where the feature is above 0, and where to write it."""
SENDER = "sender"
SMALL = 4
"""Blocks of at most this many positions are run as a matrix: most taps of a convolution would only meet the border."""


class FoldedStack(StackedNetwork):
    """Networks in evaluation mode: batch norm is part of the convolutions. Only gradients of inputs are ever needed."""

    def __init__(self, ladder: Ladder, kernels: Kernels, compute: torch.dtype) -> None:
        super().__init__(ladder, kernels, compute)
        self.weights: dict[str, Tensor] = {}
        self.shifts: list[Tensor] = []
        self.dense: dict[str, Tensor] = {}
        """Weights and biases of the dense layers by name, and what `_sender` returns."""
        self._blocks = ladder.longest.blocks
        self._small = _small_blocks(ladder.longest)
        self.spreads = _spreads(ladder.longest) and not self._small[0]
        """Whether gradients of inputs are left with the outputs of the first convolution, see `kernels.gathered`."""

    @property
    def nbytes(self) -> int:
        """How much memory its copies of the parameters take."""
        return sum(copy.nbytes for copy in (*self.weights.values(), *self.shifts, *self.dense.values()))

    def fold(self, stacks: Tensors) -> None:
        """Take over the parameters; storage that is there already is written again, as a captured graph needs."""
        if not self.shifts:
            biases = [stacks[f"{block.norm}.bias"] for block in self._blocks]
            self.shifts = [torch.empty(bias.shape, device=bias.device) for bias in biases]
        for block, side, shift in zip(self._blocks, self._small, self.shifts, strict=True):
            for part in block.convolutions:
                # What a shortcut's norm layer adds is added to the sum.
                self._fold(part, stacks, side, shift, add=part is not block)
        layers = [layer for exits in self.ladder.exits for layer in exits.program.dense]
        dense = {name: stacks[name] for layer in layers for name in layer.tensors}
        if self.spreads:
            dense[SENDER] = self._sender()
        for name, value in dense.items():
            if name in self.dense:
                self.dense[name].copy_(value)
            else:  # a copy: stacks of what all clients share are views, and masters must not be written through
                self.dense[name] = value.to(self.compute, copy=True, memory_format=torch.contiguous_format)

    def _fold(self, part: Convolution, stacks: Tensors, side: int, shift: Tensor, add: bool) -> None:
        """Scale a convolution as its norm layer does, in the memory that it had before; `shift` takes what that adds,
        or has it added.
        """
        weight, before = stacks[f"{part.convolution}.weight"], self.weights.get(part.convolution)
        own = None if side else before
        into = torch.empty(weight.shape, dtype=self.compute, device=weight.device) if own is None else own
        self.kernels.fold(weight, norm_of(part, stacks, stacks), into, shift, add)
        into = as_matrix(into, side) if side else into
        self.weights[part.convolution] = into if before is None or before is into else before.copy_(into)

    def _sender(self) -> Tensor:
        """Return what takes a gradient at the first convolution's outputs to each of its nine taps' inputs."""
        channels = self.ladder.longest.shape[0]
        taps = self.weights[self._blocks[0].convolution][:, :, :channels].flatten(1, 2).transpose(1, 2)
        return F.pad(taps, (0, FEW - 9 * channels))

    def features(self, z: Tensor) -> Tensor:
        """Return the feature before the exit, for clients that all leave at the end; `z` are prepared inputs."""
        before = z
        for number in range(len(self._blocks)):
            (z, _), before = self._run(number, z, before), z
        return z

    def scores(self, z: Tensor) -> Tensor:
        """Return the class scores of every client at its own exit, K×N×classes."""
        found: dict[int, Tensor] = {}
        before = z
        for number, reach in enumerate(self.ladder.reach):
            (z, _), before = self._run(number, z[:reach], before[:reach]), z
            for exits in self.leaving(number + 1):
                run = self._exit(exits, z[exits.low : exits.high])
                found[exits.low] = self.calibrated(exits, run.scores)
        rows = [found[low] for low in sorted(found)]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def loss_gradient(self, z: Tensor, targets: Tensor, strong_convexity: float) -> Tensor:
        """Return the gradient of each sample's loss with respect to its prepared input; `targets` are one-hot."""

        def at(exits: Exits, feature: Tensor, masked: bool, out: Tensor | None) -> Tensor:
            aims, (weights, biases) = targets[exits.low : exits.high], self._layers(exits)
            if _is_head(exits.program) and biases[0] is not None:
                mu, bias = exits.program.weighted(strong_convexity), biases[0]
                if self.prior is not None:  # what is added to all scores is as good as a bias
                    bias = bias.float() + self.prior[exits.low : exits.high]
                return self.kernels.head_gradient(feature, weights[0], bias, aims, mu, masked, out)
            run = self._exit(exits, feature)
            gradient = (self.calibrated(exits, run.scores).softmax(dim=2) - aims).to(self.compute)
            gradient, _ = dense_backward(exits.program.dense, weights, run, gradient, parameters=False)
            return self.exit_gradient(exits, gradient, feature, strong_convexity, masked, out)

        return self._gradient(z, at)

    def shift_gradient(self, z: Tensor, clean: Tensor) -> Tensor:
        """Return the gradient of ‖f(z) − f‖² with respect to prepared inputs, where f are the clean features."""

        def at(exits: Exits, feature: Tensor, masked: bool, out: Tensor | None) -> Tensor:
            found = 2 * (feature.float() - clean[exits.low : exits.high].float())
            found = (found * (feature > 0) if masked else found).to(self.compute)
            return found if out is None else out.copy_(found)

        return self._gradient(z, at)

    def _gradient(self, z: Tensor, at: AtExit) -> Tensor:
        """Run all blocks, ask for the gradient at every exit, and go back to the input."""
        saved: list[tuple[Tensor, Tensor | None]] = []
        before = z
        for number, reach in enumerate(self.ladder.reach):
            (z, winners), before = self._run(number, z[:reach], before[:reach]), z
            saved.append((z, winners))
        above: Tensor | None = None
        # What shortcuts bring back, by the block whose input they begin at.
        shortcuts: dict[int, Tensor] = {}
        for number in range(len(self._blocks) - 1, -1, -1):
            left, winners = saved.pop()
            above = self._joined(number, above, left, winners is not None, at, shortcuts.pop(number + 1, None))
            above = above if winners is None else self.kernels.unpool(winners, above, self._blocks[number].pool)
            if self._blocks[number].residual:
                shortcuts[number - 1] = self._shortcut(self._blocks[number], above, turned=True)
        assert above is not None
        if self.spreads:
            sent = torch.bmm(above.flatten(1, 3), self.dense[SENDER])
            return sent.view(*above.shape[:4], FEW)
        return self._back(0, above, None, None, shortcuts.pop(0, None))

    def _joined(
        self, number: int, above: Tensor | None, left: Tensor, pooled: bool, at: AtExit, shortcut: Tensor | None
    ) -> Tensor:
        """Return the gradient behind a block for all clients that have it: from the next block, and from exits."""
        # Where there is a pool, its winners say what the ReLU let through.
        mask = None if pooled else left

        def deeper(out: Tensor | None) -> Tensor:
            assert above is not None
            return self._back(number + 1, above, None if mask is None else mask[: len(above)], out, shortcut)

        def here(exits: Exits, out: Tensor | None) -> Tensor:
            return at(exits, left[exits.low : exits.high], mask is not None, out)

        return joined(left, self.leaving(number + 1), above, deeper, here)

    def _run(self, number: int, x: Tensor, before: Tensor) -> tuple[Tensor, Tensor | None]:
        """Run a block; where it ends with a pool, return its winners too. `before` is what the last block read."""
        block, shift = self._blocks[number], self.shifts[number]
        weight = self.weights[block.convolution]
        if self._small[number]:
            k, n, h, w, _ = x.shape
            y = torch.bmm(x.reshape(k, n, -1), weight).view(k, n, h, w, -1)
            active = self.kernels.finish(y, shift=shift)
        else:
            add = self._shortcut(block, before) if block.residual else None
            active = self.kernels.convolve(x, weight, shift, channels=block.inputs, add=add, stride=block.stride)
        return self.kernels.pool(active, block.pool) if block.pool else (active, None)

    def _shortcut(self, block: Block, x: Tensor, turned: bool = False) -> Tensor:
        """Take features (`turned`: gradients, back) along a shortcut, whose norm layer's part is in the shift."""
        if block.projection is None:
            return x
        weight = self.weights[block.projection.convolution]
        return self.kernels.convolve(x, weight, turned=turned, stride=block.projection.stride)

    def _back(
        self, number: int, gradient: Tensor, mask: Tensor | None, out: Tensor | None, shortcut: Tensor | None
    ) -> Tensor:
        """Take the gradient back through a block's convolution; `mask` is what the ReLU before it gave."""
        block = self._blocks[number]
        weight = self.weights[block.convolution]
        if not self._small[number]:
            return self.kernels.convolve(
                gradient, weight, mask=mask, turned=True, out=out, add=shortcut, stride=block.stride
            )
        k, n, h, w, _ = gradient.shape
        found = torch.bmm(gradient.reshape(k, n, -1), weight.transpose(1, 2)).view(k, n, h, w, -1)
        return self.kernels.finish(found, mask=mask, out=out) if mask is not None or out is not None else found

    def _exit(self, exits: Exits, feature: Tensor) -> ExitRun:
        return dense_forward(exits.program.dense, *self._layers(exits), self.pooled(exits, feature))

    def _layers(self, exits: Exits) -> tuple[list[Tensor], list[Tensor | None]]:
        """Return weights and biases of an exit's dense layers."""
        names = [layer.name for layer in exits.program.dense]
        return [self.dense[f"{name}.weight"] for name in names], [self.dense.get(f"{name}.bias") for name in names]


def _small_blocks(program: LayerProgram) -> list[int]:
    """Return for each block its side where it has so few positions that it is run as a matrix, else 0.

    Blocks beside a shortcut are not: few have so few positions, and the matrices would have to know of it.
    """
    around = [*(block.residual for block in program.blocks[1:]), False]
    return [
        height
        if height == width and height * width <= SMALL and _is_plain(block) and not (block.residual or inner)
        else 0
        for block, inner, (height, width) in zip(program.blocks, around, program.sizes, strict=False)
    ]


def _is_head(program: LayerProgram) -> bool:
    """Whether an exit is one linear layer that reads the mean over all positions."""
    averages = program.side == 1 and not program.maximum
    return len(program.dense) == 1 and averages and not program.dense[0].relu


def _is_plain(part: Convolution) -> bool:
    return (part.kernel, part.stride) == (3, 1)


def _spreads(program: LayerProgram) -> bool:
    """Whether the first convolution reads so few numbers that its gradient is spread, and nothing else reads them."""
    alone = len(program.blocks) == 1 or not program.blocks[1].residual
    return 9 * program.shape[0] <= FEW and _is_plain(program.blocks[0]) and alone


def as_matrix(weight: Tensor, side: int) -> Tensor:
    """Return convolutions (K×9×in×out) of images of 1×1 or 2×2 positions as matrices from all positions to all."""
    clients, _, inputs, outputs = weight.shape
    places = [(row, column) for row in range(side) for column in range(side)]
    taps = [3 * (r - row + 1) + (c - column + 1) for r, c in places for row, column in places]
    pairs = torch.stack([weight[:, tap] for tap in taps], dim=1)
    grid = pairs.view(clients, side * side, side * side, inputs, outputs)
    return grid.transpose(2, 3).reshape(clients, side * side * inputs, side * side * outputs)
