"""Sub-networks of different widths in one stack: padded with zeros to a common width, and scaled.

Channels that a client lacks are zeros, and stay zeros in training: a channel whose convolution, norm weight and norm
bias are 0 gives 0, so nothing reaches it or leaves it on the way back. Common widths come in eighths of the full one,
so that the plans of one round serve others.

A layer whose inputs are cut is multiplied by the full over the kept number of them (`cascade.narrow.Scaler`). A stack
holds such a layer's weight and bias already multiplied: u = s · w. What runs on a stack then needs to know nothing of
it, in training as in evaluation, but that a step on w is one on u with the gradient times s²: s · ∂l/∂w = s² · ∂l/∂u,
and weight decay and momentum are multiplied by s with everything else.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache

import torch
from torch import Tensor, nn

from fedprophet.cascade.channels import Channels, Kept, first_channels
from fedprophet.cascade.narrow import full_over_kept
from fedprophet.fast.layout import Tensors, rounded_up, sent, transferred
from fedprophet.fast.program import Ladder, LayerProgram

Factors = Mapping[str, float]
"""The factors of scaled tensors, by name; all others are as the client has them."""
Shape = tuple[int, ...]

WHOLE = 8
"""The full width. Widths are counted in eighths of it: fewer would waste work on zeros, more would need more plans."""
APART = 3e9
"""The cost of one more group, in multiplications of a sample's way through the convolutions.

It is launches and graphs, whatever a group computes: each number of clients of each width has a plan, whose kernels are
compiled and whose graphs are captured anew, and small groups do not fill a device. So it is a number of its own: about
ten whole VGG16s for 32×32 pixels, a round of the paper, and less than one ResNet34 for 224×224.
"""


def width_of(channels: Channels, kept: Kept) -> int:
    """Return the least width that has room for a sub-network; the full one for a network that is not cut."""
    cut = [-(-WHOLE * len(own) // channels.groups[group]) for group, own in kept.items()]
    return max(cut, default=WHOLE)


def room(model: nn.Module, channels: Channels, width: int, tile: int) -> dict[str, Tensor]:
    """Return channels of a network that sub-networks of a width fit into, in multiples of `tile` where there are more.

    The outputs of linear layers are never cut. They cost little, and dropout then draws as many numbers for them at
    every width.
    """
    found = {}
    for group, full in channels.groups.items():
        # A group is named after the first layer that makes it.
        whole = isinstance(model.get_submodule(group), nn.Linear)
        count = full if whole else min(full, rounded_up(-(-width * full // WHOLE), tile))
        found[group] = first_channels(full, count)
    return found


def shapes_in(channels: Channels, kept: Kept, tensors: Tensors) -> dict[str, Shape]:
    """Return the shapes that tensors of the full model have where the kept channels alone are left."""
    found = {}
    for name, tensor in tensors.items():
        shape = list(tensor.shape)
        for axis in channels.axes.get(name, ()):
            shape[axis.axis] = len(kept[axis.group]) * axis.repeat
        found[name] = tuple(shape)
    return found


# Which clients are run together.


def work(program: LayerProgram) -> int:
    """Return the multiplications of a sample's way through the convolutions."""
    found = 0
    for block, (height, width) in zip(program.blocks, program.sizes, strict=False):
        positions = (height // block.stride) * (width // block.stride)
        found += positions * sum(part.kernel**2 * part.inputs * part.outputs for part in block.convolutions)
    return found


def run_at(counts: Mapping[int, int], cost: Callable[[int], float]) -> dict[int, int]:
    """Return the width at which to run the clients of each width, so that the total cost is lowest.

    `counts` says how many clients have each width, `cost` what a client costs at a width. Neighbouring widths are run
    together at the largest of them, or apart, which has a cost of its own (`APART`).
    """
    widths = sorted(counts, reverse=True)

    @cache
    def best(start: int) -> tuple[float, tuple[int, ...]]:
        """Return what the widths from here on cost, and where their groups begin."""
        if start == len(widths):
            return 0.0, ()
        options = []
        for end in range(start + 1, len(widths) + 1):
            clients = sum(counts[width] for width in widths[start:end])
            after, begins = best(end)
            options.append((APART + clients * cost(widths[start]) + after, (start, *begins)))
        return min(options, key=lambda option: (option[0], len(option[1])))

    begins = best(0)[1]
    return {width: widths[max(b for b in begins if b <= number)] for number, width in enumerate(widths)}


# Into the common shapes and back.


def factors_of(channels: Channels, kept: Kept) -> dict[str, float]:
    """Return the factors of a sub-network's scaled tensors."""
    layers = full_over_kept(channels, kept)
    return {f"{layer}.{part}".removeprefix("."): s for layer, s in layers.items() for part in ("weight", "bias")}


def scalable(channels: Channels, ladder: Ladder) -> tuple[str, ...]:
    """Return a ladder's tensors that are multiplied in some sub-networks."""
    least = {group: first_channels(full, 1) for group, full in channels.groups.items()}
    able = factors_of(channels, least)
    return tuple(name for name in ladder.spans if name in able)


def fitted(
    clients: Sequence[Tensors], factors: Sequence[Factors], shapes: Mapping[str, Shape], device: torch.device
) -> list[dict[str, Tensor]]:
    """Return the clients' tensors in common shapes, multiplied by their factors, with zeros for what one lacks."""
    names = list(shapes)
    homes = iter(transferred([tensors[name] for tensors in clients for name in names], device))
    found: list[dict[str, Tensor]] = [{} for _ in clients]
    stacks = {name: torch.zeros((len(clients), *shape), device=device) for name, shape in shapes.items()}
    for number, own in enumerate(found):
        for name in names:
            value, slot = next(homes), stacks[name][number]
            torch.mul(value, factors[number].get(name, 1.0), out=slot[_corner(value)])
            own[name] = slot
    return found


def cut_out(tensors: Tensors, like: Tensors, factors: Factors) -> dict[str, Tensor]:
    """Return a client's tensors as it had them: in the shapes of `like`, not multiplied, in memory of their own."""
    return {
        name: value[_corner(like[name])].div(factors.get(name, 1.0)).contiguous() for name, value in tensors.items()
    }


def _corner(part: Tensor) -> tuple[slice, ...]:
    """Return where a tensor lies in one that is padded at the end of its axes."""
    return tuple(slice(size) for size in part.shape)


class Squares:
    """The squares of the clients' factors, for the gradients of stacks; a captured graph reads them anew."""

    def __init__(self, names: Sequence[str], ladder: Ladder, device: torch.device) -> None:
        self._names = names
        self._all = torch.ones((len(names), ladder.clients), device=device)
        self._own = {name: row[slice(*ladder.spans[name])] for name, row in zip(names, self._all, strict=True)}

    def set(self, factors: Sequence[Factors]) -> None:
        """Take over the factors of a group."""
        squares = torch.tensor([[own.get(name, 1.0) ** 2 for own in factors] for name in self._names])
        self._all.copy_(sent(squares, self._all.device))

    def apply(self, gradients: Mapping[str, Tensor]) -> None:
        """Multiply gradients, in place."""
        for name, squares in self._own.items():
            gradient = gradients[name]
            gradient.mul_(squares.view(-1, *[1] * (gradient.ndim - 1)))
