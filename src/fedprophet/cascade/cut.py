"""Where a model can be cut, and what belongs together.

A place between two operations is a cut if exactly one tensor lives across it and no parameter or buffer is used on both
sides. That gives the finest segments; atoms are made of them by these rules:

- An atom begins at a segment that has a matrix: a convolution, linear, attention or embedding layer, or a raw parameter
  matrix that a function such as F.linear multiplies with. Norms, activations, pools and dropout belong to the atom they
  follow, and what comes before the first matrix belongs to the first atom.
- Behind the first matrix, once a value of three or more dimensions (feature maps, tokens) has become a vector for each
  sample and stays one to the end, the rest is the classifier and belongs to the last atom. The number of dimensions
  is followed from operation to operation (a 2-d convolution gives four, flatten(1) two, x[:, 0] one less). A model of
  linear layers alone never has three, so each of its linear layers is an atom.
"""

import posixpath
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import dropwhile

from torch import nn
from torch.fx import Node

from fedprophet.cascade import operations
from fedprophet.cascade.operations import Range
from fedprophet.cascade.trace import Traced, TracedProgram, public_name, trace
from fedprophet.errors import ModelError

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True)
class Layer:
    """A matrix of the model: the name of the layer (or raw parameter) that holds it, and what kind it is."""

    name: str
    kind: str


@dataclass(frozen=True)
class Segment:
    """Operations between two neighbouring cuts."""

    nodes: tuple[Node, ...]
    start: Node
    end: Node
    layers: tuple[Layer, ...]


@dataclass(frozen=True)
class Part:
    """What one atom is in one mode. `tensors` are the identities of the parameters and buffers it uses."""

    name: str
    labels: tuple[str, ...]
    bounds: Range
    program: TracedProgram
    tensors: frozenset[int]
    leaves: tuple[nn.Module, ...]
    writes_input: bool


@dataclass(frozen=True)
class Facts:
    """What a trace says about one part of an explicit chain."""

    layers: tuple[Layer, ...]
    bounds: Range
    leaves: tuple[nn.Module, ...]
    writes_input: bool


def cut(model: nn.Module, training: bool) -> tuple[Part, ...]:
    """Cut a model, as it is in training or in evaluation, into the parts that become its atoms."""
    traced = trace(model, training)
    groups = _group(traced, _segments(traced))
    names = _names(groups)
    counts: Counter[str] = Counter()
    parts = []
    for group, name in zip(groups, names, strict=True):
        kinds = [kind for segment in group for kind in _kind(model, segment.layers)]
        parts.append(_part(traced, group, name, label(kinds, counts)))
    return tuple(parts)


def inspect_module(module: nn.Module, input_range: Range) -> Facts:
    """Look into one part of an explicit chain; where it cannot be traced, expect anything."""
    try:
        traced = trace(module, training=False)
    except ModelError:
        leaves = tuple(child for child in module.modules() if not list(child.children()))
        names = {id(child): name for name, child in module.named_modules()}
        layers = tuple(Layer(names[id(leaf)], _layer_kind(leaf)) for leaf in leaves if has_matrix(leaf))
        return Facts(layers, operations.UNBOUNDED, leaves, writes_input=True)
    nodes = _values(traced)
    return Facts(
        _layers(traced, nodes, _constants(traced)),
        operations.result_range(traced.output, traced.module_of, set(nodes), input_range),
        _leaves(traced, nodes),
        _writes(traced, nodes, traced.input),
    )


def label(kinds: Iterable[str], counts: Counter[str]) -> tuple[str, ...]:
    """Return labels for people, numbered over the model by kind: `Conv 1`, `Conv 2`, `Linear 1`."""
    labels = []
    for kind in kinds:
        counts[kind] += 1
        labels.append(f"{kind} {counts[kind]}")
    return tuple(labels)


def has_matrix(leaf: nn.Module) -> bool:
    """Whether a layer multiplies with a matrix: it has a parameter of two or more dimensions and is no norm."""
    return not isinstance(leaf, operations.NORMS) and any(p.ndim >= 2 for p in leaf.parameters())


def _part(traced: Traced, group: Sequence[Segment], name: str, labels: tuple[str, ...]) -> Part:
    nodes = [node for segment in group for node in segment.nodes]
    start, end = group[0].start, group[-1].end
    read = [*nodes, *(arg for node in nodes for arg in node.all_input_nodes if arg.op == "get_attr")]
    return Part(
        name,
        labels,
        operations.result_range(end, traced.module_of, set(nodes)),
        traced.program(nodes, start, end),
        frozenset(id(tensor) for node in read for tensor in traced.tensors_of(node)),
        _leaves(traced, nodes),
        _writes(traced, nodes, start),
    )


def _values(traced: Traced) -> list[Node]:
    return [node for node in traced.graph.nodes if node.op.startswith("call_")]


def _leaves(traced: Traced, nodes: Iterable[Node]) -> tuple[nn.Module, ...]:
    return tuple(dict.fromkeys(traced.module_of(node) for node in nodes if node.op == "call_module"))


def _writes(traced: Traced, nodes: Iterable[Node], start: Node) -> bool:
    """Whether the nodes write to the memory of `start`, which belongs to the caller."""
    aliases = {start}
    for node in nodes:
        if aliases.isdisjoint(node.all_input_nodes):
            continue
        if operations.writes_first_argument(node, traced.module_of):
            # Its result lies in the memory of that argument alone.
            if (node.args[0] if node.args else node.kwargs.get("input")) in aliases:
                return True
        elif operations.may_be_view(node, traced.module_of):
            aliases.add(node)
    return False


def _segments(traced: Traced) -> list[Segment]:
    _read_batch_size_nearby(traced)
    nodes, constants = _values(traced), _constants(traced)
    places = {node: place for place, node in enumerate(nodes)}
    last_use = {
        node: max((places.get(user, len(nodes)) for user in node.users), default=-1) for node in (traced.input, *nodes)
    }
    crossed = _crossed_by_tensors(traced, places)
    segments = []
    live, start, begin = {traced.input}, traced.input, 0
    for place, node in enumerate(nodes):
        live = {value for value in live | {node} if last_use[value] > place}
        if len(live) != 1 or place in crossed or not all(_is_tensor(traced, value) for value in live):
            continue
        end = next(iter(live))
        inside = tuple(nodes[begin : place + 1])
        segments.append(Segment(inside, start, end, _layers(traced, inside, constants)))
        start, begin = end, place + 1
    if not nodes:
        raise ModelError("the model gives its input back unchanged: there is nothing to train")
    if begin < len(nodes):
        raise ModelError("the model does not give one tensor. Wrap it in a module that returns the class scores alone.")
    return segments


def _crossed_by_tensors(traced: Traced, places: Mapping[Node, int]) -> set[int]:
    """Return the places after which a cut would have a parameter or buffer on both sides."""
    uses: dict[int, list[int]] = {}
    for node in traced.graph.nodes:
        users = [node] if node in places else [user for user in node.users if user in places]
        for tensor in traced.tensors_of(node):
            uses.setdefault(id(tensor), []).extend(places[user] for user in users)
    return {place for spans in uses.values() if spans for place in range(min(spans), max(spans))}


def _is_tensor(traced: Traced, node: Node) -> bool:
    """Whether a value is one tensor, as far as one can tell: no shape, and nothing that is unpacked by number."""
    name = operations.operation(node, traced.module_of)
    if name in operations.NO_TENSORS or name in operations.SEVERAL_TENSORS:
        return False
    indexed = (user for user in node.users if operations.operation(user, traced.module_of) == "getitem")
    return all(isinstance(user.args[1], tuple) for user in indexed)


def _constants(traced: Traced) -> set[Node]:
    """Return the nodes that do not depend on the input."""
    constants: set[Node] = set()
    for node in traced.graph.nodes:
        if node.op != "placeholder" and constants.issuperset(node.all_input_nodes):
            constants.add(node)
    return constants


def _read_batch_size_nearby(traced: Traced) -> None:
    """Let a reshape that keeps the batch size read it from its own tensor.

    A model that notes its batch size first and reshapes with it at the end would have two values alive all along. It is
    done only where each operation in between is known to keep dimension 0.
    """
    keeping, sizes = {traced.input}, set()
    for node in list(traced.graph.nodes):
        if node.op not in ("call_module", "call_method", "call_function"):
            continue
        name = operations.operation(node, traced.module_of)
        tensors = [arg for arg in node.all_input_nodes if arg.op != "get_attr"]
        if name in ("view", "reshape") and len(node.args) > 2 and node.args[0] in keeping and node.args[1] in sizes:
            with traced.graph.inserting_before(node):
                size = traced.graph.call_method("size", (node.args[0], 0))
            node.args = (node.args[0], size, *node.args[2:])
            keeping.add(node)
        elif _is_batch_size(traced, node, keeping):
            sizes.add(node)
        elif tensors and keeping.issuperset(tensors) and operations.keeps_batch(node, traced.module_of):
            keeping.add(node)


def _is_batch_size(traced: Traced, node: Node, keeping: set[Node]) -> bool:
    name = operations.operation(node, traced.module_of)
    if name == "size":
        return node.args[0] in keeping and node.args[1:] == (0,)
    if name != "getitem" or node.args[1] != 0 or not isinstance(shape := node.args[0], Node):
        return False
    kind = operations.operation(shape, traced.module_of)
    return (kind == "shape" or (kind == "size" and len(shape.args) == 1)) and shape.args[0] in keeping


def _layers(traced: Traced, nodes: Iterable[Node], constants: set[Node]) -> tuple[Layer, ...]:
    found: dict[str, Layer] = {}
    for node in nodes:
        if node.op == "call_module" and has_matrix(traced.module_of(node)):
            layer = Layer(public_name(str(node.target)), _layer_kind(traced.module_of(node)))
        else:
            kind = operations.MATRIX_FUNCTIONS.get(operations.operation(node, traced.module_of), "")
            matrices = _raw_matrices(traced, node, constants) if kind and node.op != "call_module" else []
            if not matrices or node in constants:
                continue
            layer = Layer(public_name(matrices[0]).removesuffix(".weight"), kind)
        found.setdefault(layer.name, layer)
    return tuple(found.values())


def _raw_matrices(traced: Traced, node: Node, constants: set[Node]) -> list[str]:
    """Return the names of the parameter matrices that a function's arguments are computed from alone."""
    names: list[str] = []
    ahead = [arg for arg in node.all_input_nodes if arg in constants]
    while ahead:
        arg = ahead.pop()
        ahead.extend(arg.all_input_nodes)
        matrices = [t for t in traced.tensors_of(arg) if isinstance(t, nn.Parameter) and t.ndim >= 2]
        names.extend(str(arg.target) for _ in matrices)
    return names


def _layer_kind(leaf: nn.Module) -> str:
    base = operations.torch_class(leaf)
    return re.sub(r"\dd$", "", type(leaf).__name__ if base is nn.Module else base.__name__)


def _group(traced: Traced, segments: Sequence[Segment]) -> list[list[Segment]]:
    classifier = _classifier(traced, segments)
    groups: list[list[Segment]] = [[]]
    for number, segment in enumerate(segments):
        has_begun = any(before.layers for before in groups[-1])
        if segment.layers and has_begun and number < classifier:
            groups.append([])
        groups[-1].append(segment)
    return groups


def _classifier(traced: Traced, segments: Sequence[Segment]) -> int:
    """Return the number of the first segment of the classifier; the number of segments where there is none."""
    ranks: dict[Node, int | None] = {}
    for node in _values(traced):
        ranks[node] = operations.result_rank(node, traced.module_of, ranks)
    first = len(segments)
    while first > 0 and all(
        (ranks.get(node) or 3) <= 2 for node in (segments[first - 1].start, segments[first - 1].end)
    ):
        first -= 1
    behind = dropwhile(lambda segment: not segment.layers, segments[:first])
    spread = any(max(ranks.get(segment.start) or 0, ranks.get(segment.end) or 0) >= 3 for segment in behind)
    return first if spread else len(segments)


def _kind(model: nn.Module, layers: Sequence[Layer]) -> tuple[str, ...]:
    """Return what people call a segment: its layer's kind, or the class of the block that holds its layers."""
    if len(layers) < 2:
        return tuple(layer.kind for layer in layers)
    owner = _common([layer.name for layer in layers])
    while owner and type(model.get_submodule(owner)) in CONTAINERS:
        owner = owner.rpartition(".")[0]
    return (type(model.get_submodule(owner)).__name__,) if owner else ("Block",)


def kinds_of_part(module: nn.Module, layers: Sequence[Layer]) -> tuple[str, ...]:
    """Return what people call a part of an explicit chain: its layers where it only holds them, else its class."""
    if len(layers) < 2 or type(module) in CONTAINERS:
        return tuple(layer.kind for layer in layers)
    return (type(module).__name__,)


def _common(names: Sequence[str]) -> str:
    """Return the name of the innermost module that holds all of these."""
    return posixpath.commonpath([name.replace(".", "/") for name in names]).replace("/", ".")


def _names(groups: Sequence[Sequence[Segment]]) -> list[str]:
    """Name each atom after the layer, or the block, that it begins with."""
    heads = [next((segment.layers for segment in group if segment.layers), ()) for group in groups]
    layers = [[layer.name for layer in head] for head in heads]
    names = [_common(owned) if owned else "" for owned in layers]
    return [
        name if name and names.count(name) == 1 else "..".join(dict.fromkeys((*owned[:1], *owned[-1:]))) or "model"
        for name, owned in zip(names, layers, strict=True)
    ]
