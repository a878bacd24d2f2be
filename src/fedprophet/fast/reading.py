"""Reading a part of a chain as a program (`program`): the layers of its atoms in order, and sums of paths.

A part that is not of a program's form raises `NotFusableError`, which says why. It is left to the plain path.
"""

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from fedprophet.cascade.atoms import Atom, Chain
from fedprophet.cascade.heads import head_name, head_shape
from fedprophet.cascade.trace import TracedProgram
from fedprophet.fast.program import Block, Convolution, Dense, LayerProgram
from fedprophet.models.normalize import Normalize

AdaptivePool = nn.AdaptiveAvgPool2d | nn.AdaptiveMaxPool2d
USED_TWICE = "a layer, or a parameter of one, that is used twice"


class NotFusableError(Exception):
    """Something that stacks cannot run; the text says what."""


def read_program(
    chain: Chain, first: int, last: int, head: int | None, shape: tuple[int, ...], classes: int
) -> LayerProgram:
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
        raise NotFusableError(f"it begins with {parser.here()}, not with a convolution, a batch norm and a ReLU")
    pool, dense = parser.exit()
    parser.end()
    side, maximum = None if pool is None else _side(pool), isinstance(pool, nn.AdaptiveMaxPool2d)
    shape = channels, height, width
    program = LayerProgram(shape, normalize, blocks, side, tuple(dense), convex=False, maximum=maximum)
    _check_tensors(chain, first, last, program)
    if head is not None:
        program = _with_head(program, head, classes)
    _check_sizes(program)
    return program


def _with_head(body: LayerProgram, head: int, classes: int) -> LayerProgram:
    """Return a program that ends in the auxiliary head of a module."""
    if body.dense:
        raise NotFusableError("an auxiliary head behind a linear layer")
    shape = head_shape(body.feature, classes)
    if shape.pool is not None and shape.pool[0] != shape.pool[1]:
        raise NotFusableError("an auxiliary head that pools to a rectangle")
    side = None if shape.pool is None else shape.pool[0]
    dense = Dense(head_name(head), shape.inputs, classes, bias=True)
    return replace(body, side=side, dense=(dense,), convex=True)


@dataclass(frozen=True)
class _Sum:
    """Two paths of layers from one place that are added: `main` is the longer one."""

    main: tuple[Any, ...]
    shortcut: tuple[Any, ...]


def _layers(atom: Atom) -> Iterator[Any]:
    """Yield the layers that an atom calls, one after the other; a `_Sum` where paths meet."""
    work, training = atom.body.evaluate, atom.body.train
    if isinstance(work, nn.Module):
        yield from _flat(work)
        return
    found = _called(work)
    if not isinstance(training, TracedProgram) or _called(training) != found:
        raise NotFusableError(f"{atom.name} does other things in training than in evaluation")
    yield from found


def _flat(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers of a module; hooks, or a forward of its own, would do more than the layers say."""
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    if any(hooks) or "forward" in vars(module):
        raise NotFusableError(f"hooks on a layer {type(module).__name__}")
    if type(module).forward is nn.Sequential.forward:
        for child in module._modules.values():
            yield from _flat(child) if child is not None else ()
    elif type(module) is not nn.Identity:
        yield module


_FLATTEN = nn.Flatten()


def _called(program: TracedProgram) -> list[Any]:
    """Return the layers of a traced program, in which paths part and meet again at a sum."""
    start, *nodes, end = program.code.graph.nodes
    if any(node.op == "placeholder" for node in nodes):
        raise NotFusableError("a tensor that no layer of torch's own holds")
    places: dict[fx.Node, list[Any]] = {start: []}
    for node in nodes:
        places[node] = _led_to(node, program, places)
    targets = [str(node.target) for node in nodes if node.op == "call_module"]
    called = [target for target in targets if program.code.get_submodule(target).state_dict()]
    if len(set(called)) < len(called):
        raise NotFusableError(USED_TWICE)
    used = {source for node in (*nodes, end) for source in node.all_input_nodes}
    if not isinstance(end.args[0], fx.Node) or len(used) < len(places):
        raise NotFusableError("results that its output does not depend on")
    return places[end.args[0]]


def _led_to(node: fx.Node, program: TracedProgram, places: dict[fx.Node, list[Any]]) -> list[Any]:
    """Return the layers from the program's input to the output of a node."""
    before = [places[source] for source in node.all_input_nodes]
    if node.op == "call_module" and len(node.args) == len(before) == 1 and not node.kwargs:
        return [*before[0], *_flat(program.code.get_submodule(str(node.target)))]
    if _is_flatten(node):
        return [*before[0], _FLATTEN]
    if _is_sum(node):
        return _added(*before)
    raise NotFusableError(f"operation {getattr(node.target, '__name__', node.target)}")


def _is_sum(node: fx.Node) -> bool:
    """Whether a node adds two tensors, and changes none that another node reads."""
    two = len(node.args) == len(node.all_input_nodes) == 2 and not node.kwargs
    in_place = node.target is operator.iadd and len(node.all_input_nodes[0].users) == 1
    return two and (node.target in (operator.add, torch.add) or in_place)


def _added(one: list[Any], other: list[Any]) -> list[Any]:
    """Return two paths that meet as one: what they have in common, and the sum of the rest."""
    alike = next(
        (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a is not b), min(len(one), len(other))
    )
    short, long = sorted((one[alike:], other[alike:]), key=len)
    return [*one[:alike], _Sum(tuple(long), tuple(short))]


def _is_flatten(node: fx.Node) -> bool:
    """Whether a node makes one vector of each sample."""
    named = node.target == "flatten" if node.op == "call_method" else node.target is torch.flatten
    given = dict(zip(("start_dim", "end_dim"), node.args[1:], strict=False)) | dict(node.kwargs)
    return named and given in ({"start_dim": 1}, {"start_dim": 1, "end_dim": -1})


class _Parser:
    """Reads layers in order."""

    def __init__(self, layers: Sequence[Any], names: dict[int, str]) -> None:
        self._layers = list(layers)
        self._names = names
        self._at = 0

    def here(self) -> str:
        """Return what comes next, for an error."""
        return type(self._layers[self._at]).__name__ if self._at < len(self._layers) else "its end"

    def take(self, kind: type[Any]) -> Any:
        """Return the next layer where it is of exactly this kind, else None: a subclass may do anything."""
        if self._at < len(self._layers) and type(self._layers[self._at]) is kind:
            self._at += 1
            return self._layers[self._at - 1]
        return None

    def normalize(self) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
        layer = self.take(Normalize)
        return None if layer is None else layer.numbers

    def blocks(self) -> Iterator[Block]:
        while True:
            paths = self.take(_Sum)
            if paths is not None:
                yield from self._residual(paths)
            elif (convolution := self.convolution()) is not None:
                self._relu()
                yield Block(**vars(convolution), pool=self._pool())
            else:
                return

    def convolution(self) -> Convolution | None:
        """Take a convolution and its batch norm."""
        layer = self.take(nn.Conv2d)
        if layer is None:
            return None
        _check_convolution(layer)
        norm = self.take(nn.BatchNorm2d)
        if norm is None:
            raise NotFusableError(f"a convolution that is followed by {self.here()}")
        _check_norm(norm)
        names, sizes = (self._names[id(layer)], self._names[id(norm)]), (layer.in_channels, layer.out_channels)
        kernel, stride = layer.kernel_size[0], layer.stride[0]
        return Convolution(*names, *sizes, layer.bias is not None, norm.eps, norm.momentum, kernel, stride)

    def _residual(self, paths: _Sum) -> Iterator[Block]:
        """Read two blocks with a shortcut around them; the ReLU of the second comes behind the sum."""
        main, shortcut = _Parser(paths.main, self._names), _Parser(paths.shortcut, self._names)
        first = main.convolution()
        second = main.convolution() if first is not None and main.take(nn.ReLU) is not None else None
        if first is None or second is None:
            raise NotFusableError(f"a sum of paths that is no residual block: one path has {main.here()}")
        projection = shortcut.convolution()
        main.end()
        shortcut.end()
        self._relu()
        yield Block(**vars(first))
        yield Block(**vars(second), pool=self._pool(), residual=True, projection=projection)

    def _relu(self) -> None:
        if self.take(nn.ReLU) is None:
            raise NotFusableError(f"a batch norm that is followed by {self.here()}")

    def _pool(self) -> int:
        pool = self.take(nn.MaxPool2d)
        return 0 if pool is None else _halving(pool)

    def exit(self) -> tuple[AdaptivePool | None, list[Dense]]:
        pool: AdaptivePool | None = self.take(nn.AdaptiveAvgPool2d) or self.take(nn.AdaptiveMaxPool2d)
        flatten = self.take(nn.Flatten)
        if flatten is not None and (flatten.start_dim, flatten.end_dim) != (1, -1):
            raise NotFusableError(f"a flattening of other dimensions: {flatten}")
        dense = list(self._dense())
        if dense and flatten is None:
            raise NotFusableError("a linear layer behind a feature that is not flattened")
        if not dense and (pool is not None or flatten is not None):
            raise NotFusableError(f"a pool or a flattening that is followed by {self.here()}")
        return pool, dense

    def _dense(self) -> Iterator[Dense]:
        while (layer := self.take(nn.Linear)) is not None:
            relu, dropout = self.take(nn.ReLU), self.take(nn.Dropout)
            if dropout is not None and dropout.p == 1:
                raise NotFusableError("a dropout that keeps nothing")
            name, sizes = self._names[id(layer)], (layer.in_features, layer.out_features)
            yield Dense(name, *sizes, layer.bias is not None, relu is not None, 0.0 if dropout is None else dropout.p)

    def end(self) -> None:
        if self._at < len(self._layers):
            raise NotFusableError(f"layer {self.here()}")


def _check_convolution(layer: nn.Conv2d) -> None:
    side, step = layer.kernel_size[0], layer.stride[0]
    square = (layer.kernel_size, layer.stride) == ((side, side), (step, step)) and side % 2 == 1 and step in (1, 2)
    padded = layer.padding in ((side // 2, side // 2), "same" if step == 1 else None) and layer.padding_mode == "zeros"
    if not (square and padded and layer.dilation == (1, 1) and layer.groups == 1):
        raise NotFusableError(f"a convolution other than those of a VGG or a ResNet: {layer}")


def _check_norm(layer: nn.BatchNorm2d) -> None:
    if not layer.affine:
        raise NotFusableError("a batch norm without an affine transformation")
    if not layer.track_running_stats or layer.running_mean is None:
        raise NotFusableError("a batch norm that keeps no statistics")
    if layer.momentum is None:
        raise NotFusableError("a batch norm without a momentum")
    if layer.eps == 0:
        raise NotFusableError("a batch norm without an epsilon, which would divide padding by zero")


def _side(pool: AdaptivePool) -> int:
    size: Any = pool.output_size
    sides = {size} if isinstance(size, int) else set(size or ())
    side = sides.pop() if len(sides) == 1 else None
    if side is None:
        raise NotFusableError(f"a pool to a rectangle: {pool}")
    if isinstance(pool, nn.AdaptiveMaxPool2d) and pool.return_indices:
        raise NotFusableError(f"a pool that says where its maxima were: {pool}")
    return int(side)


def _halving(pool: nn.MaxPool2d) -> int:
    """Return the side of a pool's window; only those are known that leave half of the positions."""
    for side in (2, 3):
        settings = (pool.kernel_size, pool.stride, pool.padding, pool.dilation)
        known = zip(settings, (side, 2, side - 2, 1), strict=True)
        if all(value in (number, (number, number)) for value, number in known) and not pool.ceil_mode:
            return side
    raise NotFusableError(f"a pool other than 2×2, or 3×3 with stride 2: {pool}")


def _check_tensors(chain: Chain, first: int, last: int, program: LayerProgram) -> None:
    """Refuse tensors that a stack would train differently from the plain path."""
    used = program.tensors
    tensors = chain.tensors
    if len({id(tensors[name]) for name in used}) < len(used):
        raise NotFusableError(USED_TWICE)
    for name in (*chain.shared(first, last), *chain.local(first, last)):
        if name not in used and not name.endswith(".num_batches_tracked"):
            raise NotFusableError(f"tensor {name}, which no layer computes with")
    for name in used:
        if tensors[name].dtype != torch.float32:
            raise NotFusableError(f"tensor {name} of type {tensors[name].dtype}")
        if isinstance(tensors[name], nn.Parameter) and not tensors[name].requires_grad:
            raise NotFusableError(f"parameter {name}, which is not to be trained")


def _check_sizes(program: LayerProgram) -> None:
    for block, (height, width) in zip(program.blocks, program.sizes, strict=False):
        if height % block.shrinks or width % block.shrinks:
            what = "a pool" if block.pool else "a stride"
            raise NotFusableError(f"{what} on {height}×{width} positions, which do not halve")
    height, width = program.sizes[-1]
    if program.dense and height != width:
        raise NotFusableError(f"a feature of {height}×{width} positions before its exit: no square")
    side = program.side
    if side is not None and height % side:
        raise NotFusableError(f"a pool of {height}×{width} positions to {side}×{side}")
