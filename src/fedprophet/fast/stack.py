"""What networks of several clients have in common, in training and in evaluation mode: inputs, exits, dense layers.

The clients form a ladder: a block is run for the first clients that have it, and each exit for those that leave there.
Parameters are float32 masters; `compute` is the type of activations and of the copies that products read.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedprophet.fast.kernels import BatchNorm, Kernels, Scaling, Statistics
from fedprophet.fast.layout import StackLayout, Tensors
from fedprophet.fast.program import Convolution, Dense, Exits, Ladder

Uniform = Callable[[str, tuple[int, ...]], Tensor]
"""Returns numbers from [0, 1) under a name."""


@dataclass(frozen=True)
class ExitRun:
    """What the dense layers made of a feature: the inputs of each, with its dropout applied, and the scores."""

    inputs: tuple[Tensor, ...]
    kept: tuple[Tensor | None, ...]
    """By which factor dropout kept each input; None without dropout."""
    scores: Tensor


class StackedNetwork:
    """The parts that folded networks and those in training share: preparing inputs, and the exits."""

    def __init__(self, ladder: Ladder, kernels: Kernels, compute: torch.dtype) -> None:
        self.ladder = ladder
        self.kernels = kernels
        self.compute = compute
        self.layout = StackLayout(ladder, kernels.multiple)
        self.prior: Tensor | None = None
        """What each client adds to its class scores, K×classes in float32; None where nothing is calibrated."""
        self._scalings: dict[torch.device, Scaling] = {}

    def scaling(self, device: torch.device) -> Scaling:
        """Return how inputs are read; made once, since a graph must not copy from the host."""
        if device not in self._scalings:
            channels = self.ladder.longest.shape[0]
            numbers = self.ladder.longest.normalize or ((0.0,) * channels, (1.0,) * channels)
            mean, std = (torch.tensor(values, device=device) for values in numbers)
            self._scalings[device] = Scaling(mean, std, self.compute, self.layout.padded(channels))
        return self._scalings[device]

    def prepare(self, x: Tensor) -> Tensor:
        """Return float32 inputs as the first convolution reads them: normalised, in the compute type, padded."""
        return self.scaling(x.device)(x)

    def pooled(self, exits: Exits, feature: Tensor) -> Tensor:
        """Return the feature as the first dense layer of an exit reads it: K×N×inputs."""
        side = exits.program.side
        if side is None or side == feature.shape[2]:
            return feature.flatten(2)
        return (self.kernels.maximum if exits.program.maximum else self.kernels.average)(feature, side)

    def exit_gradient(
        self,
        exits: Exits,
        gradient: Tensor,
        feature: Tensor,
        strong_convexity: float,
        masked: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return the gradient of the feature, given that of what the first dense layer read.

        The strong-convexity term belongs to auxiliary heads alone. `masked`: where the feature is above 0.
        """
        side = exits.program.side or feature.shape[2]
        if exits.program.maximum:  # never an auxiliary head's
            return self.kernels.maximum_gradient(gradient, feature, side, masked, out)
        weight = exits.program.weighted(strong_convexity)
        return self.kernels.average_gradient(gradient, feature, side, weight, masked, out)

    def calibrated(self, exits: Exits, scores: Tensor) -> Tensor:
        """Return the scores at an exit with what the clients that leave there add."""
        return scores if self.prior is None else scores + self.prior[exits.low : exits.high].unsqueeze(1)

    def leaving(self, depth: int) -> list[Exits]:
        """Return the exits after so many blocks."""
        return [exits for exits in self.ladder.exits if exits.depth == depth]


def norm_of(part: Convolution, stacks: Tensors, statistics: Tensors) -> BatchNorm:
    """Return the norm layer behind a convolution; `statistics` has its running ones."""
    return BatchNorm(
        stacks[f"{part.norm}.weight"],
        stacks[f"{part.norm}.bias"],
        stacks[f"{part.convolution}.bias"] if part.bias else None,
        statistics[f"{part.norm}.running_mean"],
        statistics[f"{part.norm}.running_var"],
        part.epsilon,
        part.momentum,
    )


def running_statistics(norm: BatchNorm) -> Statistics:
    """Return the statistics that a norm layer keeps, as those of what its convolution gives without a bias."""
    mean = norm.running_mean if norm.before is None else norm.running_mean - norm.before
    inverse = torch.rsqrt(norm.running_var + norm.epsilon)
    scale = norm.weight * inverse
    return Statistics(mean, inverse, scale, norm.bias - mean * scale)


def joined(
    like: Tensor,
    leaving: Sequence[Exits],
    above: Tensor | None,
    deeper: Callable[[Tensor | None], Tensor],
    here: Callable[[Exits, Tensor | None], Tensor],
) -> Tensor:
    """Return the gradient where some clients leave and those in front of them go on: `deeper` writes the latter's."""
    if not leaving:
        return deeper(None)
    if above is None and len(leaving) == 1:
        return here(leaving[0], None)
    gradient = torch.empty_like(like)
    if above is not None:
        deeper(gradient[: len(above)])
    for exits in leaving:
        here(exits, gradient[exits.low : exits.high])
    return gradient


def dense_forward(
    layers: Sequence[Dense],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    x: Tensor,
    uniform: Uniform | None = None,
) -> ExitRun:
    """Run the dense layers of all clients; dropout acts where there are `uniform` draws for it."""
    inputs: list[Tensor] = []
    kept: list[Tensor | None] = []
    for layer, weight, bias in zip(layers, weights, biases, strict=True):
        inputs.append(x)
        x = torch.bmm(x, weight) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, weight)
        x = x.relu_() if layer.relu else x
        keep = None
        if uniform is not None and layer.dropout > 0:
            drawn = uniform(f"dropout {layer.name}", tuple(x.shape))
            keep = (drawn >= layer.dropout).to(x.dtype) / (1 - layer.dropout)
            x = x * keep
        kept.append(keep)
    return ExitRun(tuple(inputs), tuple(kept), x.float())


def dense_backward(
    layers: Sequence[Dense], weights: Sequence[Tensor], run: ExitRun, gradient: Tensor, parameters: bool = True
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """Return the gradient of the exit's input, and (if asked for) each layer's of weight and bias in float32."""
    found: list[tuple[Tensor, Tensor]] = []
    outputs = (*run.inputs[1:], run.scores)
    for number in range(len(layers) - 1, -1, -1):
        keep = run.kept[number]
        gradient = gradient if keep is None else gradient * keep
        if layers[number].relu:
            gradient = gradient * (outputs[number] > 0)
        if parameters:
            x = run.inputs[number]
            found.append((torch.bmm(x.transpose(1, 2), gradient).float(), gradient.float().sum(dim=1)))
        gradient = torch.bmm(gradient, weights[number].transpose(1, 2))
    return gradient, found[::-1]
