"""Reading a segment of a chain as a program that stacks of clients can run: blocks, then an exit.

A block is a 3×3 convolution with batch norm and ReLU, perhaps with a 2×2 max-pool behind it. The exit pools the feature
and ends in dense layers: the backbone's own classifier, or an auxiliary head. Whatever is not of this form raises
`NotFusableError`, which says what it met; such a segment is left to the plain path.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
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

    @property
    def tensors(self) -> tuple[str, ...]:
        """The state-dict names of what it computes with."""
        bias = (f"{self.convolution}.bias",) if self.bias else ()
        parts = ("weight", "bias", "running_mean", "running_var")
        return (f"{self.convolution}.weight", *bias, *(f"{self.norm}.{part}" for part in parts))


@dataclass(frozen=True)
class Dense:
    """A linear layer by its name, with what follows it."""

    name: str
    inputs: int
    outputs: int
    bias: bool
    relu: bool = False
    dropout: float = 0.0

    @property
    def tensors(self) -> tuple[str, ...]:
        """The state-dict names of what it computes with."""
        return (f"{self.name}.weight", *((f"{self.name}.bias",) if self.bias else ()))


@dataclass(frozen=True)
class Program:
    """Blocks, then an exit: the feature is averaged to `side` × `side` positions (None: left alone) and goes through
    `dense`. Without dense layers the feature is what comes out. `convex`: the exit is an auxiliary head, so the feature
    before it has the strong-convexity term.
    """

    shape: tuple[int, int, int]
    """Channels, height and width of one input."""
    normalize: tuple[tuple[float, ...], tuple[float, ...]] | None
    blocks: tuple[Block, ...]
    side: int | None
    dense: tuple[Dense, ...]
    convex: bool

    @property
    def tensors(self) -> tuple[str, ...]:
        """The state-dict names of all that it computes with."""
        blocks = [name for block in self.blocks for name in block.tensors]
        return (*blocks, *(name for layer in self.dense for name in layer.tensors))

    @property
    def feature(self) -> tuple[int, int, int]:
        """Channels, height and width of the feature that the exit reads."""
        channels, height, width = self.shape
        for block in self.blocks:
            channels = block.outputs
            height, width = (height // 2, width // 2) if block.pool else (height, width)
        return channels, height, width


@dataclass(frozen=True)
class Exits:
    """Clients `low` … `high` − 1 of a ladder: they leave it after the same number of blocks, through the same exit."""

    low: int
    high: int
    program: Program

    @property
    def depth(self) -> int:
        """After how many blocks they leave."""
        return len(self.program.blocks)


@dataclass(frozen=True)
class Ladder:
    """The programs of several clients that begin alike: each one's blocks are the first of those before it.

    So a block is run for the first `reach` clients at once, whatever the others do.
    """

    programs: tuple[Program, ...]

    def __post_init__(self) -> None:
        if not all(continues(one, other) for one, other in pairwise(self.programs)):
            raise ValueError("the programs of a ladder must begin alike, the longest first")

    @property
    def clients(self) -> int:
        """How many clients there are."""
        return len(self.programs)

    @property
    def longest(self) -> Program:
        """The program that has all blocks."""
        return self.programs[0]

    @cached_property
    def reach(self) -> tuple[int, ...]:
        """How many clients, the first ones, have each block."""
        depths = [len(program.blocks) for program in self.programs]
        return tuple(sum(depth > block for depth in depths) for block in range(depths[0]))

    @cached_property
    def exits(self) -> tuple[Exits, ...]:
        """The clients by their exits, in order."""
        found: list[Exits] = []
        for number, program in enumerate(self.programs):
            if found and found[-1].program == program:
                found[-1] = replace(found[-1], high=number + 1)
            else:
                found.append(Exits(number, number + 1, program))
        return tuple(found)

    @cached_property
    def spans(self) -> dict[str, tuple[int, int]]:
        """The clients that have each tensor, by its name: the first of them, and the one behind the last."""
        blocks = zip(self.longest.blocks, self.reach, strict=True)
        spans = {name: (0, reach) for block, reach in blocks for name in block.tensors}
        return spans | {
            name: (exits.low, exits.high)
            for exits in self.exits
            for layer in exits.program.dense
            for name in layer.tensors
        }


def continues(one: Program, other: Program) -> bool:
    """Whether a program does all that another one does before its exit, and perhaps more."""
    alike = one.shape == other.shape and one.normalize == other.normalize
    return alike and one.blocks[: len(other.blocks)] == other.blocks


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
    program = Program((channels, height, width), normalize, blocks, side, tuple(dense), convex=False)
    _check_tensors(chain, first, last, program)
    if head is not None:
        program = _with_head(program, head, classes)
    _check_sizes(program)
    return program


def _with_head(body: Program, head: int, classes: int) -> Program:
    """Return a program that ends in the auxiliary head of a module."""
    if body.dense:
        raise NotFusableError("an auxiliary head behind a linear layer")
    shape = head_shape(body.feature, classes)
    if shape.pool is not None and shape.pool[0] != shape.pool[1]:
        raise NotFusableError("an auxiliary head that pools to a rectangle")
    side = None if shape.pool is None else shape.pool[0]
    dense = Dense(f"heads.{head}", shape.inputs, classes, bias=True)
    return replace(body, side=side, dense=(dense,), convex=True)


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
    """Yield the layers of a module, after a look at whether calling it is all that happens when it is called."""
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    if any(hooks) or "forward" in vars(module):
        raise NotFusableError(f"hooks on a layer {type(module).__name__}")
    if type(module).forward is nn.Sequential.forward:
        for child in module._modules.values():
            yield from _flat(child) if child is not None else ()
    else:
        yield module


_FLATTEN = nn.Flatten()


def _called(program: Traced) -> Iterator[nn.Module]:
    """Yield the layers of a traced program whose operations follow each other in one line."""
    before: fx.Node | None = None
    for node in program.code.graph.nodes:
        in_line = node.args[:1] == (before,)
        if node.op == "placeholder" and before is None:
            before = node
        elif node.op == "output" and in_line:
            return
        elif node.op == "call_module" and in_line and len(node.args) == 1 and not node.kwargs:
            yield from _flat(program.code.get_submodule(str(node.target)))
            before = node
        elif in_line and _is_flatten(node):
            yield _FLATTEN
            before = node
        elif node.op == "placeholder":
            raise NotFusableError("a tensor that no layer of torch's own holds")
        else:
            raise NotFusableError(f"operation {getattr(node.target, '__name__', node.target)}")


def _is_flatten(node: fx.Node) -> bool:
    """Whether a node makes one vector of each sample."""
    named = node.target == "flatten" if node.op == "call_method" else node.target is torch.flatten
    given = dict(zip(("start_dim", "end_dim"), node.args[1:], strict=False)) | dict(node.kwargs)
    return named and given in ({"start_dim": 1}, {"start_dim": 1, "end_dim": -1})


class _Parser:
    """Reads layers in order."""

    def __init__(self, layers: Sequence[nn.Module], names: dict[int, str]) -> None:
        self._layers = list(layers)
        self._names = names
        self._at = 0

    def here(self) -> str:
        """Return what comes next, for an error."""
        return type(self._layers[self._at]).__name__ if self._at < len(self._layers) else "its end"

    def take(self, kind: type[nn.Module]) -> Any:
        """Return the next layer where it is of exactly this kind, else None: a subclass may do anything."""
        if self._at < len(self._layers) and type(self._layers[self._at]) is kind:
            self._at += 1
            return self._layers[self._at - 1]
        return None

    def normalize(self) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
        layer = self.take(Normalize)
        return None if layer is None else layer.numbers

    def blocks(self) -> Iterator[Block]:
        while (convolution := self.take(nn.Conv2d)) is not None:
            _check_convolution(convolution)
            norm = self.take(nn.BatchNorm2d)
            if norm is None:
                raise NotFusableError(f"a convolution that is followed by {self.here()}")
            _check_norm(norm)
            if self.take(nn.ReLU) is None:
                raise NotFusableError(f"a batch norm that is followed by {self.here()}")
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
        pool, flatten = self.take(nn.AdaptiveAvgPool2d), self.take(nn.Flatten)
        if flatten is not None and (flatten.start_dim, flatten.end_dim) != (1, -1):
            raise NotFusableError(f"a flattening of other dimensions: {flatten}")
        dense = list(self._dense())
        if dense and flatten is None:
            raise NotFusableError("a linear layer behind a feature that is not flattened")
        if not dense and (pool is not None or flatten is not None):
            raise NotFusableError(f"an average or a flattening that is followed by {self.here()}")
        return (None if pool is None else _side(pool)), dense

    def _dense(self) -> Iterator[Dense]:
        while (layer := self.take(nn.Linear)) is not None:
            relu, dropout = self.take(nn.ReLU), self.take(nn.Dropout)
            if dropout is not None and dropout.p == 1:
                raise NotFusableError("a dropout that keeps nothing")
            yield Dense(
                self._names[id(layer)],
                layer.in_features,
                layer.out_features,
                layer.bias is not None,
                relu is not None,
                dropout.p if dropout is not None else 0.0,
            )

    def end(self) -> None:
        if self._at < len(self._layers):
            raise NotFusableError(f"layer {self.here()}")


def _check_convolution(layer: nn.Conv2d) -> None:
    plain = layer.kernel_size == (3, 3) and layer.stride == (1, 1) and layer.padding == (1, 1)
    if not (plain and layer.dilation == (1, 1) and layer.groups == 1 and layer.padding_mode == "zeros"):
        raise NotFusableError(f"a convolution other than 3×3 with stride 1 and padding 1: {layer}")


def _check_norm(layer: nn.BatchNorm2d) -> None:
    if not layer.affine:
        raise NotFusableError("a batch norm without an affine transformation")
    if not layer.track_running_stats or layer.running_mean is None:
        raise NotFusableError("a batch norm that keeps no statistics")
    if layer.momentum is None:
        raise NotFusableError("a batch norm without a momentum")


def _side(pool: nn.AdaptiveAvgPool2d) -> int:
    size: Any = pool.output_size
    sides = {size} if isinstance(size, int) else set(size or ())
    side = sides.pop() if len(sides) == 1 else None
    if side is None:
        raise NotFusableError(f"an average to a rectangle: {pool}")
    return int(side)


def _halves(pool: nn.MaxPool2d) -> bool:
    two = ((2, 2), 2)
    plain = pool.kernel_size in two and pool.stride in two and pool.padding in ((0, 0), 0)
    return plain and pool.dilation in ((1, 1), 1) and not pool.ceil_mode


def _check_tensors(chain: Chain, first: int, last: int, program: Program) -> None:
    """Refuse what a stack of the program's layers would not train as the plain path does."""
    used = program.tensors
    tensors = chain.tensors
    if len({id(tensors[name]) for name in used}) < len(used):
        raise NotFusableError("a layer, or a parameter of one, that is used twice")
    for name in (*chain.shared(first, last), *chain.local(first, last)):
        if name not in used and not name.endswith(".num_batches_tracked"):
            raise NotFusableError(f"tensor {name}, which no layer computes with")
    for name in used:
        if tensors[name].dtype != torch.float32:
            raise NotFusableError(f"tensor {name} of type {tensors[name].dtype}")
        if isinstance(tensors[name], nn.Parameter) and not tensors[name].requires_grad:
            raise NotFusableError(f"parameter {name}, which is not to be trained")


def _check_sizes(program: Program) -> None:
    _, height, width = program.shape
    for block in program.blocks:
        if block.pool and (height % 2 or width % 2):
            raise NotFusableError(f"a pool of {height}×{width} positions, which do not halve")
        height, width = (height // 2, width // 2) if block.pool else (height, width)
    if program.dense and height != width:
        raise NotFusableError(f"a feature of {height}×{width} positions before its exit: no square")
    side = program.side
    if side is not None and height % side:
        raise NotFusableError(f"an average of {height}×{width} positions to {side}×{side}")
