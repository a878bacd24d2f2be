"""Which channels of a model belong together.

Channels are followed through the model's operations (torch.fx). A convolution or linear layer makes a new group for its
outputs; norm layers, activations, pools and dropout keep it; the partners of a sum (or any other operation that works
element by element) share one group, so that a residual block and its shortcut keep the same channels. A flattened C×h×w
map has C·h·w inputs for the next linear layer: each channel is h·w neighbours in a row. The model's input channels and
its outputs, the classes, are never cut, nor is a group that is added to them.

A model with anything else between its channels (attention, grouped convolutions, concatenation) raises ModelError.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.fx import Node

from fedprophet.cascade import operations
from fedprophet.cascade.channels import ChannelAxis, Channels
from fedprophet.cascade.cut import has_matrix
from fedprophet.cascade.trace import Traced, public_name, trace, without_data
from fedprophet.errors import ModelError

REMEDY = (
    "Methods that train narrow sub-networks need plain convolutions, linear layers, batch norms, activations, pools "
    "and sums: change that code, or use a method that does not cut channels"
)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
BATCH_NORMS = (nn.modules.batchnorm._BatchNorm,)


def channels_of(model: nn.Module, input_shape: tuple[int, ...]) -> Channels:
    """Find the channels of a model that takes inputs of `input_shape` (without the batch); it stays as it is."""
    train, evaluate = (_follow(model, input_shape, training) for training in (True, False))
    if train != evaluate:
        raise ModelError(
            f"{type(model).__name__} cannot be narrowed: its layers are connected differently in training and in "
            f"evaluation. {REMEDY}"
        )
    if not train.groups:
        raise ModelError(f"{type(model).__name__} cannot be narrowed: no layer is left to cut but the last. {REMEDY}")
    return train


class _Groups:
    """Groups of channels, some of which turn out to be one."""

    def __init__(self) -> None:
        self.roots: dict[str, str] = {}
        """The group that each one is part of by now, in the order they were made."""
        self.fixed: set[str] = set()
        """Groups that are never cut."""
        self._widths: dict[str, int] = {}

    def add(self, name: str, width: int) -> None:
        """Make a group; a layer that is called again has it already."""
        self.roots.setdefault(name, name)
        self._widths[name] = width

    def join(self, one: str, other: str) -> None:
        """Make two groups one, under the name of the first of them to be made."""
        first, second = sorted((self.roots[one], self.roots[other]), key=list(self.roots).index)
        self.roots = {name: first if root == second else root for name, root in self.roots.items()}

    def cut(self) -> dict[str, int]:
        """Return the groups that can be cut, in the order they were made."""
        whole = {self.roots[name] for name in self.fixed}
        return {root: self._widths[root] for root in dict.fromkeys(self.roots.values()) if root not in whole}


class _Follower:
    """Follows channels from operation to operation. `shapes` has no entry for a value that is not one tensor, `flows`
    none for a value that holds nothing that is cut.
    """

    def __init__(self, model: nn.Module, traced: Traced, shapes: Mapping[Node, tuple[int, ...]]) -> None:
        self.model = model
        self.traced = traced
        self.shapes = shapes
        self.groups = _Groups()
        self.flows: dict[Node, ChannelAxis] = {}
        self.constants: dict[Node, bool] = {}
        """The values that do not depend on the input, and whether a parameter is among what they are made of."""
        self.axes: dict[int, dict[int, ChannelAxis]] = {}
        """By the identity of a tensor of the model, so that tied ones are cut alike, and its axis."""
        self.whole: list[tuple[str, Node, str]] = []
        """Groups that may not be cut, where, and why: that they are not is known only at the end."""

    def follow(self) -> Channels:
        for node in self.traced.graph.nodes:
            if node.op.startswith("call_") and (flow := self._step(node)) is not None:
                self.flows[node] = flow
            self._note_constant(node)
        if (outputs := self.flows.get(self.traced.output)) is not None:
            self.groups.fixed.add(outputs.group)
        cut = self.groups.cut()
        for group, node, reason in self.whole:
            if self.groups.roots[group] in cut:
                raise self.error(node, reason)
        axes = {}
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            flows = sorted(self.axes.get(id(tensor), {}).items())
            found = [ChannelAxis(axis, self.groups.roots[flow.group], flow.repeat) for axis, flow in flows]
            if kept := tuple(each for each in found if each.group in cut):
                axes[name] = kept
        return Channels(cut, axes)

    def operation(self, node: Node) -> str:
        return operations.operation(node, self.traced.module_of)

    def option(self, node: Node, position: int, name: str, default: object) -> object:
        return operations.option(node, self.traced.module_of, position, name, default)

    def source(self, node: Node) -> tuple[ChannelAxis, tuple[int, ...]]:
        """Return flow and shape of the first value with channels that a node reads."""
        arg = next(arg for arg in node.all_input_nodes if arg in self.flows)
        return self.flows[arg], self.shapes[arg]

    def use(self, node: Node, tensor: Tensor, axis: int, flow: ChannelAxis) -> None:
        """Note that an axis of a tensor of the model holds these channels."""
        before = self.axes.setdefault(id(tensor), {}).setdefault(axis, flow)
        if before.repeat != flow.repeat:
            raise self.error(node, "a tensor that is used twice has its channels laid out in two ways")
        self.groups.join(before.group, flow.group)

    def uncut(self, node: Node, axis: int, width: int) -> ChannelAxis:
        """Return a layer's inputs as channels that are never cut: another call of the layer may not cut them either."""
        name = f"inputs of {public_name(str(node.target))}"
        self.groups.add(name, width)
        self.groups.fixed.add(name)
        return ChannelAxis(axis, name)

    def error(self, node: Node, reason: str) -> ModelError:
        model = type(self.model).__name__
        if node.op == "call_module":
            layer = type(self.traced.module_of(node)).__name__
            return ModelError(
                f"{model} cannot be narrowed at {public_name(str(node.target))!r} ({layer}): {reason}. {REMEDY}"
            )
        owners = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
        owner = public_name(owners[-1]) if owners else ""
        where = f"submodule {owner!r}" if owner else "the model itself"
        name = self.operation(node) or str(getattr(node.target, "__name__", node.target))
        return ModelError(f"{model} cannot be narrowed at operation {name!r} in {where}: {reason}. {REMEDY}")

    def _step(self, node: Node) -> ChannelAxis | None:
        """Return where the channels of a node's result lie."""
        if node.op == "call_module":
            layer = self.traced.module_of(node)
            for kinds, layer_rule in LAYER_RULES:
                if isinstance(layer, kinds):
                    return layer_rule(self, node, layer)
            if has_matrix(layer):
                raise self.error(node, "layers of this kind are never cut")
        name = self.operation(node)
        other = _pool if operations.is_pool(name) else _elementwise if operations.is_dropout(name) else None
        rule = RULES.get(name, other)
        trained = [arg for arg in node.all_input_nodes if self.constants.get(arg)]
        if trained and rule is not _elementwise and not self.constants.keys() >= set(node.all_input_nodes):
            raise self.error(node, f"it uses parameter {_named(trained[0])!r} outside a layer")
        if self.flows.keys().isdisjoint(node.all_input_nodes) or name in operations.NO_TENSORS:
            return None
        if rule is None or node not in self.shapes:
            raise self.error(node, "what it does to channels is not known")
        return rule(self, node)

    def _note_constant(self, node: Node) -> None:
        if node.op == "placeholder" or not self.constants.keys() >= set(node.all_input_nodes):
            return
        own = any(isinstance(tensor, nn.Parameter) for tensor in self.traced.tensors_of(node))
        self.constants[node] = own or any(self.constants[arg] for arg in node.all_input_nodes)


def _weighted(follower: _Follower, node: Node, layer: Any, axis: int) -> ChannelAxis:
    """Make a new group for the outputs of a layer; `axis` is where channels lie in its input and its output."""
    if {name for name, _ in layer.named_parameters()} - {"weight", "bias"}:
        raise follower.error(node, "its weight is computed from other parameters")
    name = public_name(str(node.target))
    follower.groups.add(name, layer.weight.shape[0])
    made = ChannelAxis(axis, name)
    follower.use(node, layer.weight, 0, made)
    if layer.bias is not None:
        follower.use(node, layer.bias, 0, made)
    given = follower.flows.get(node.all_input_nodes[0]) or follower.uncut(node, axis, layer.weight.shape[1])
    _check_axis(follower, node, given, axis)
    follower.use(node, layer.weight, 1, given)
    return made


def _convolution(follower: _Follower, node: Node, layer: Any) -> ChannelAxis:
    if layer.groups != 1:
        raise follower.error(node, f"a convolution with {layer.groups} groups ties single channels to each other")
    return _weighted(follower, node, layer, axis=1)


def _linear(follower: _Follower, node: Node, layer: Any) -> ChannelAxis:
    return _weighted(follower, node, layer, axis=len(follower.shapes[node]) - 1)


def _by_channel(follower: _Follower, node: Node, layer: Any) -> ChannelAxis | None:
    """Keep the channels of a layer that has one number for each of them: a batch norm, a PReLU."""
    given = follower.flows.get(node.all_input_nodes[0])
    for name in ("weight", "bias", "running_mean", "running_var"):
        tensor = getattr(layer, name, None)
        if tensor is not None and tensor.numel() > 1:
            flow = given or follower.uncut(node, 1, tensor.numel())
            _check_axis(follower, node, flow, axis=1)
            follower.use(node, tensor, 0, flow)
    return given


def _check_axis(follower: _Follower, node: Node, flow: ChannelAxis, axis: int) -> None:
    if flow.axis != axis:
        raise follower.error(node, f"it expects channels in dimension {axis}, and they lie in dimension {flow.axis}")


def _pool(follower: _Follower, node: Node) -> ChannelAxis:
    flow, shape = follower.source(node)
    positions = int(follower.operation(node)[-2])  # maxpool2d has two dimensions of positions, the last ones
    if flow.axis >= len(shape) - positions:
        raise follower.error(node, f"it pools over dimension {flow.axis}, where the channels lie")
    return flow


def _elementwise(follower: _Follower, node: Node) -> ChannelAxis | None:
    """Join the groups of all partners; what meets a value that is never cut is never cut either."""
    result = follower.shapes[node]
    tensors = [arg for arg in node.all_input_nodes if arg in follower.shapes]
    if len(tensors) > 1 and follower.operation(node) not in PARTNERS:
        raise follower.error(node, "what it does with several tensors is not known")
    found: ChannelAxis | None = None
    for arg in tensors:
        flow, shape = follower.flows.get(arg), follower.shapes[arg]
        if flow is None or shape[flow.axis] < result[flow.axis + len(result) - len(shape)]:
            continue  # A single channel that is spread over its partner's can never be cut.
        flow = flow._replace(axis=flow.axis + len(result) - len(shape))
        if found is not None and (found.axis, found.repeat) != (flow.axis, flow.repeat):
            raise follower.error(node, "its partners have their channels in different places")
        follower.groups.join((found or flow).group, flow.group)
        found = found or flow
    if found is not None:
        for arg in tensors:
            _meet(follower, node, found, arg)
    return found


def _meet(follower: _Follower, node: Node, flow: ChannelAxis, partner: Node) -> None:
    """Leave channels whole that are combined with a value of as many numbers that is not cut."""
    shape, rank = follower.shapes[partner], len(follower.shapes[node])
    if partner in follower.flows or rank - flow.axis > len(shape) or shape[flow.axis - rank] == 1:
        return
    if partner in follower.constants:
        reason = f"it combines channels with {_named(partner)!r}, which belongs to no layer"
        follower.whole.append((flow.group, node, reason))
    else:
        follower.groups.fixed.add(flow.group)


def _softmax(follower: _Follower, node: Node) -> ChannelAxis:
    """Keep the classes; a softmax over channels inside the model would change with their number."""
    flow, shape = follower.source(node)
    dim = follower.option(node, 1, "dim", None)
    if not isinstance(dim, int) or dim % len(shape) == flow.axis:
        follower.whole.append((flow.group, node, "it compares the channels with each other"))
    return flow


def _reduced(follower: _Follower, node: Node) -> ChannelAxis:
    """Follow a mean, sum or maximum over positions."""
    flow, shape = follower.source(node)
    dims = follower.option(node, 1, "dim", None)
    axes = {dim % len(shape) for dim in (dims if isinstance(dims, tuple | list) else [dims]) if isinstance(dim, int)}
    if not axes or flow.axis in axes:
        raise follower.error(node, "it is taken over the channels")
    before = 0 if follower.option(node, 2, "keepdim", False) else sum(axis < flow.axis for axis in axes)
    return flow._replace(axis=flow.axis - before)


def _squeezed(follower: _Follower, node: Node) -> ChannelAxis:
    flow, shape = follower.source(node)
    dim = follower.option(node, 1, "dim", None)
    if not isinstance(dim, int) or dim % len(shape) == flow.axis:
        follower.whole.append((flow.group, node, "it would drop a single channel: name another dimension"))
    return _reshaped(follower, node)


def _viewed(follower: _Follower, node: Node) -> ChannelAxis:
    flow = _reshaped(follower, node)
    sizes: Any = node.args[1:] or (node.kwargs.get("shape"),)
    sizes = sizes[0] if len(sizes) == 1 else sizes
    size = sizes[flow.axis] if isinstance(sizes, tuple | list) else None
    if size != -1 and not _is_size_of(follower, size, flow):
        follower.whole.append((flow.group, node, "it does not leave the number of channels open: use flatten(1)"))
    return flow


def _is_size_of(follower: _Follower, size: object, flow: ChannelAxis) -> bool:
    """Whether a size is read from a tensor with the same channels: `x.shape[1]`, `x.size(1)`. Then it follows them."""
    if not isinstance(size, Node) or follower.operation(size) not in ("getitem", "size") or len(size.args) != 2:
        return False
    source: Any = size.all_input_nodes[0]
    if follower.operation(size) == "getitem":
        source = source.args[0]
    given = follower.flows.get(source)
    if given is None or size.args[1] not in (given.axis, given.axis - len(follower.shapes[source])):
        return False
    return follower.groups.roots[given.group] == follower.groups.roots[flow.group]


def _reshaped(follower: _Follower, node: Node) -> ChannelAxis:
    """Find the channels in a new shape: kept as a dimension, or merged with the dimensions behind them."""
    flow, old = follower.source(node)
    new = follower.shapes[node]
    before = math.prod(old[: flow.axis])
    merged = [math.prod(old[flow.axis : end]) for end in range(flow.axis + 1, len(old) + 1)]
    for axis, size in enumerate(new):
        if math.prod(new[:axis]) == before and size in merged and size >= old[flow.axis]:
            return ChannelAxis(axis, flow.group, flow.repeat * (size // old[flow.axis]))
    raise follower.error(
        node, f"shape {_shown(old)} becomes {_shown(new)}, where no dimension holds whole channels in a row"
    )


LAYER_RULES: tuple[tuple[tuple[type[nn.Module], ...], Callable[[_Follower, Node, Any], ChannelAxis | None]], ...] = (
    (CONVOLUTIONS, _convolution),
    ((nn.Linear,), _linear),
    ((*BATCH_NORMS, nn.PReLU), _by_channel),
)
PARTNERS = frozenset({"add", "sub", "mul", "truediv", "div", "pow", "maximum", "minimum"})
"""Operations that combine two tensors element by element."""
COPIES = frozenset({"identity", "contiguous", "clone", "detach", "to", "float", "half", "double"})
RULES: Mapping[str, Callable[[_Follower, Node], ChannelAxis | None]] = {
    **dict.fromkeys(operations.ELEMENTWISE | PARTNERS | COPIES, _elementwise),
    **dict.fromkeys(("softmax", "logsoftmax"), _softmax),
    **dict.fromkeys(("mean", "sum", "amax", "amin"), _reduced),
    **dict.fromkeys(("flatten", "unsqueeze"), _reshaped),
    **dict.fromkeys(("view", "reshape"), _viewed),
    "squeeze": _squeezed,
}
"""What operations without tensors of their own do to channels, by `operations.operation`'s names."""


class _Shapes(fx.Interpreter):
    """Runs a trace on tensors without data, and notes the shape of every value that is one tensor."""

    def __init__(self, traced: Traced) -> None:
        super().__init__(traced.host, graph=traced.graph)
        self.shapes: dict[Node, tuple[int, ...]] = {}

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, Tensor):
            self.shapes[n] = tuple(result.shape)
        return result

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        layer = self.fetch_attr(target)
        tensors = (*layer.named_parameters(), *layer.named_buffers())
        return functional_call(layer, {name: without_data(tensor) for name, tensor in tensors}, args, kwargs)

    def fetch_attr(self, target: str) -> Any:
        value = super().fetch_attr(target)
        return without_data(value) if isinstance(value, Tensor) else value


def _follow(model: nn.Module, input_shape: tuple[int, ...], training: bool) -> Channels:
    traced = trace(model, training)
    shapes = _Shapes(traced)
    try:
        with torch.no_grad(), torch.device("meta"):
            shapes.run(torch.empty((2, *input_shape)))  # a batch norm cannot be trained on one sample
    except Exception as error:
        raise ModelError(
            f"{type(model).__name__} does not run on inputs of shape {_shown(input_shape)} without data: "
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}"
        ) from error
    return _Follower(model, traced, shapes.shapes).follow()


def _named(node: Node) -> str:
    return public_name(str(node.target)) if node.op == "get_attr" else node.name


def _shown(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape))
