"""Reading a segment of a chain as a program that stacks of clients can run: blocks, then an exit.

A block is a 3×3 convolution with batch norm and ReLU, perhaps with a 2×2 max-pool behind it. The exit pools the feature
and ends in dense layers: the backbone's own classifier, or an auxiliary head. Whatever is not of this form raises
`NotFusableError`, which says what it met; such a segment is left to the plain path.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from fedprophet.cascade.atoms import Atom, Chain
from fedprophet.cascade.heads import head_shape
from fedprophet.cascade.trace import Program as Traced
from fedprophet.models.normalize import Normalize


class NotFusableError(Exception):
    """A segment that is not of the form that stacks can run; the text says where."""


@dataclass(frozen=True)
class Block:
    """Convolution, batch norm and ReLU, by the names of both layers; `pool`: a 2×2 max-pool follows."""

    convolution: str
    norm: str
    inputs: int
    outputs: int
    bias: bool
    epsilon: float
    momentum: float
    pool: bool = False


@dataclass(frozen=True)
class Dense:
    """A linear layer by its name, with what follows it."""

    name: str
    inputs: int
    outputs: int
    bias: bool
    relu: bool = False
    dropout: float = 0.0


@dataclass(frozen=True)
class Program:
    """Blocks, then an exit: the feature is averaged to `side` × `side` positions (None: left alone) and goes through
    `dense`. `convex`: the exit is an auxiliary head, so the feature before it has the strong-convexity term.
    """

    shape: tuple[int, int, int]
    """Channels, height and width of one input."""
    normalize: tuple[tuple[float, ...], tuple[float, ...]] | None
    blocks: tuple[Block, ...]
    side: int | None
    dense: tuple[Dense, ...]
    convex: bool

    @property
    def feature(self) -> tuple[int, int, int]:
        """Channels, height and width of the feature that the exit reads."""
        channels, height, width = self.shape
        for block in self.blocks:
            channels = block.outputs
            height, width = (height // 2, width // 2) if block.pool else (height, width)
        return channels, height, width


def read_program(
    chain: Chain, first: int, last: int, head: int | None, shape: tuple[int, ...], classes: int
) -> Program:
    """Read atoms `first` … `last` − 1 and their exit; `shape` is that of one input of atom `first`."""
    names = {id(layer): name for name, layer in chain.model.named_modules()}
    layers = [layer for atom in chain.atoms[first:last] for layer in _layers(atom)]
    if len(shape) != 3:
        raise NotFusableError(f"inputs of shape {shape} are no images")
    channels, height, width = shape
    parser = _Parser(layers, names)
    normalize = parser.normalize()
    blocks = tuple(parser.blocks())
    if not blocks:
        raise NotFusableError(f"it begins with {parser.here()}, not with a 3×3 convolution, a batch norm and a ReLU")
    side, dense = parser.exit()
    parser.end()
    body = Program((channels, height, width), normalize, blocks, side, tuple(dense), convex=head is not None)
    if head is not None:
        if dense:
            raise NotFusableError("an auxiliary head behind a linear layer")
        pool = head_shape(body.feature, classes)
        if pool.pool is not None and pool.pool[0] != pool.pool[1]:
            raise NotFusableError("an auxiliary head that pools to a rectangle")
        side = None if pool.pool is None else pool.pool[0]
        exit_ = Dense(f"heads.{head}", pool.inputs, classes, bias=True)
        body = Program(body.shape, normalize, blocks, side, (exit_,), convex=True)
    _check_sizes(body)
    return body


def _layers(atom: Atom) -> Iterator[nn.Module]:
    """Yield the layers that an atom calls, one after the other."""
    work, training = atom.body.evaluate, atom.body.train
    if isinstance(work, nn.Module):
        yield from _flat(work)
        return
    found = list(_called(work))
    if not isinstance(training, Traced) or [id(layer) for layer in _called(training)] != [id(a) for a in found]:
        raise NotFusableError(f"{atom.name} does other things in training than in evaluation")
    yield from found


def _flat(module: nn.Module) -> Iterator[nn.Module]:
    if isinstance(module, nn.Sequential):
        for child in module:
            yield from _flat(child)
    else:
        yield module


_FLATTEN = nn.Flatten()


def _called(program: Traced) -> Iterator[nn.Module]:
    """Yield the layers of a traced program whose operations follow each other in one line."""
    before: fx.Node | None = None
    for node in program.code.graph.nodes:
        if node.op == "placeholder" and before is None:
            before = node
        elif node.op == "output":
            return
        elif node.op == "call_module" and node.args == (before,):
            yield from _flat(program.code.get_submodule(str(node.target)))
            before = node
        elif _is_flatten(node, before):
            yield _FLATTEN
            before = node
        else:
            raise NotFusableError(f"operation {node.target!s}")


def _is_flatten(node: fx.Node, before: fx.Node | None) -> bool:
    is_flatten = node.target == "flatten" if node.op == "call_method" else node.target is torch.flatten
    start = node.args[1] if len(node.args) > 1 else node.kwargs.get("start_dim", 0)
    return bool(is_flatten and node.args[0] is before and start == 1 and len(node.args) <= 2)


class _Parser:
    """Reads layers in order."""

    def __init__(self, layers: Sequence[nn.Module], names: dict[int, str]) -> None:
        self._layers = list(layers)
        self._names = names
        self._at = 0

    def here(self) -> str:
        """Return what comes next, for an error."""
        return type(self._layers[self._at]).__name__ if self._at < len(self._layers) else "its end"

    def take(self, kind: Any) -> Any:
        """Return the next layer where it is of this kind, else None."""
        if self._at < len(self._layers) and isinstance(self._layers[self._at], kind):
            self._at += 1
            return self._layers[self._at - 1]
        return None

    def normalize(self) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
        layer = self.take(Normalize)
        return None if layer is None else layer.numbers

    def blocks(self) -> Iterator[Block]:
        while (convolution := self.take(nn.Conv2d)) is not None:
            _check_convolution(convolution)
            norm, relu = self.take(nn.BatchNorm2d), self.take(nn.ReLU)
            if norm is None or relu is None or not norm.affine or norm.momentum is None or norm.running_mean is None:
                raise NotFusableError(f"a convolution that is followed by {self.here()}")
            pool = self.take(nn.MaxPool2d)
            if pool is not None and not _halves(pool):
                raise NotFusableError(f"a pool other than 2×2: {pool}")
            yield Block(
                self._names[id(convolution)],
                self._names[id(norm)],
                convolution.in_channels,
                convolution.out_channels,
                convolution.bias is not None,
                norm.eps,
                norm.momentum,
                pool is not None,
            )

    def exit(self) -> tuple[int | None, list[Dense]]:
        pool = self.take(nn.AdaptiveAvgPool2d)
        side = None
        if pool is not None:
            size = pool.output_size
            side = size if isinstance(size, int) else size[0]
            if not isinstance(side, int) or (not isinstance(size, int) and size[1] != side):
                raise NotFusableError(f"a pool to a rectangle: {pool}")
        if self.take(nn.Flatten) is None and pool is not None:
            raise NotFusableError(f"a pool that is followed by {self.here()}")
        dense = []
        while (layer := self.take(nn.Linear)) is not None:
            relu, dropout = self.take(nn.ReLU), self.take(nn.Dropout)
            dense.append(
                Dense(
                    self._names[id(layer)],
                    layer.in_features,
                    layer.out_features,
                    layer.bias is not None,
                    relu is not None,
                    dropout.p if dropout is not None else 0.0,
                )
            )
        return side, dense

    def end(self) -> None:
        if self._at < len(self._layers):
            raise NotFusableError(f"layer {self.here()}")


def _check_convolution(layer: nn.Conv2d) -> None:
    plain = layer.kernel_size == (3, 3) and layer.stride == (1, 1) and layer.padding == (1, 1)
    if not (plain and layer.dilation == (1, 1) and layer.groups == 1 and layer.padding_mode == "zeros"):
        raise NotFusableError(f"a convolution other than 3×3 with stride 1 and padding 1: {layer}")


def _halves(pool: nn.MaxPool2d) -> bool:
    two = ((2, 2), 2)
    plain = pool.kernel_size in two and pool.stride in two and pool.padding in ((0, 0), 0)
    return plain and pool.dilation in ((1, 1), 1) and not pool.ceil_mode


def _check_sizes(program: Program) -> None:
    _, height, width = program.shape
    for block in program.blocks:
        if block.pool and (height % 2 or width % 2):
            raise NotFusableError(f"a pool of {height}×{width} positions, which do not halve")
        height, width = (height // 2, width // 2) if block.pool else (height, width)
    side = program.side
    if side is not None and (height % side or width % side or height != width):
        raise NotFusableError(f"an average of {height}×{width} positions to {side}×{side}")
