"""Writing down what a model does, with torch.fx: the graph of its operations, and programs that run a part of it."""

import inspect
import linecache
import operator
import random
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partialmethod
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx import Node
from torch.fx.proxy import Proxy

from fedprophet.cascade import draws
from fedprophet.cascade.draws import draws_refused
from fedprophet.errors import ModelError

REMEDY = "Change that code, or hand the model over as an explicit chain (fedprophet.cascade.atoms.explicit_chain)."
_TORCH = str(Path(torch.__file__).parent)
_NOT_THE_MODELS = (_TORCH, __file__, draws.__file__, random.__file__)
"""Code that calls the model's, or that the model's calls."""
_ROOT = "model"


class Host(nn.Module):
    """Calls the model as any caller would, so that inputs with defaults keep them. The trace's names start here."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Any:
        return self.model(x)


def public_name(target: str) -> str:
    """Return the model's own name of what the host calls `model.NAME`; '' for the model itself."""
    return target.removeprefix(_ROOT).removeprefix(".")


def is_constant(target: str) -> bool:
    """Whether a name is that of a tensor which the trace itself found: it lives on the host, which is never moved."""
    return "." not in target


@dataclass(frozen=True, eq=False)
class TracedProgram:
    """A stretch of a traced model. It is called with its input and the values of its `attributes`, which are what it
    reads from the model besides its layers: raw parameters and buffers, by their names at the host.
    """

    code: fx.GraphModule
    host: Host
    attributes: tuple[str, ...]

    def __call__(self, x: Tensor, values: Iterable[Any]) -> Any:
        # Straight to forward: this module has no hooks, and in small models the detour costs time.
        return self.code.forward(x, *values)

    def value(self, attribute: str) -> Any:
        """Return what the model holds there now: moving a model puts other buffers into it."""
        return operator.attrgetter(attribute)(self.host)


@dataclass(frozen=True, eq=False)
class Traced:
    """The operations of a model in one mode."""

    host: Host
    graph: fx.Graph
    output: Node
    """The node whose result the model gives back."""

    @property
    def input(self) -> Node:
        node: Node = next(node for node in self.graph.nodes if node.op == "placeholder")
        return node

    def module_of(self, node: Node) -> nn.Module:
        return self.host.get_submodule(str(node.target))

    def tensors_of(self, node: Node) -> tuple[Tensor, ...]:
        """Return the parameters and buffers that a node itself reads from the model."""
        if node.op not in ("call_module", "get_attr") or (node.op == "get_attr" and is_constant(str(node.target))):
            return ()
        held = operator.attrgetter(str(node.target))(self.host)
        if isinstance(held, nn.Module):
            return (*held.parameters(), *held.buffers())
        return (held,) if isinstance(held, Tensor) else ()

    def program(self, nodes: Iterable[Node], start: Node, end: Node) -> TracedProgram:
        """Return the program that computes `end` from `start` with the given nodes."""
        graph = fx.Graph()
        copies = {start: graph.placeholder("x")}
        nodes = list(nodes)
        attributes = dict.fromkeys(arg for node in nodes for arg in node.all_input_nodes if arg.op == "get_attr")
        for number, node in enumerate(attributes):
            copies[node] = graph.placeholder(f"attribute_{number}")
        for node in nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(copies[end])
        return TracedProgram(
            fx.GraphModule(self.host, graph), self.host, tuple(str(node.target) for node in attributes)
        )


def trace(model: nn.Module, training: bool) -> Traced:
    """Trace a model in training or evaluation mode; raise ModelError where it cannot be traced, and say where."""
    _check_inputs(model)
    host = Host(model)
    with _undisturbed(model, training):
        try:
            with draws_refused():
                graph = _Tracer(host).trace(host)
        except Exception as error:
            raise ModelError(_explain(model, error)) from error
    result = next(node for node in graph.nodes if node.op == "output").args[0]
    if not isinstance(result, Node):
        raise ModelError(
            f"{type(model).__name__} gives a {type(result).__name__}, not one tensor. Wrap it in a module that returns "
            "the class scores alone."
        )
    return Traced(host, graph, result)


class _Tracer(fx.Tracer):
    """Keeps torch's own layers whole, looks into all others, and leaves no tensor of the model frozen in."""

    def __init__(self, host: Host) -> None:
        super().__init__()
        self._attributes = {id(tensor): name for name, tensor in (*host.named_parameters(), *host.named_buffers())}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        # Where forward comes from counts: a user's subclass of a torch layer that keeps its forward is that layer.
        forward = type(m).forward
        origin = getattr(forward, "__module__", None) or ""
        return origin.startswith("torch.nn") and forward is not nn.Sequential.forward

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        name = self._attributes.get(id(attr_val)) if isinstance(attr_val, Tensor) else None
        if name is None:
            return attr_val
        if name not in parameter_proxy_cache:
            parameter_proxy_cache[name] = self.create_proxy(
                "get_attr", name, (), {}, proxy_factory_fn=lambda node: _TensorProxy(node, self, attr_val)
            )
        return parameter_proxy_cache[name]

    def proxy(self, node: Node) -> Proxy:
        return _Value(node, self)

    def to_bool(self, obj: Proxy) -> bool:
        # An assertion computes nothing: the chain leaves it to the model.
        frame = inspect.currentframe()
        while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_MODELS):
            frame = frame.f_back
        if frame is not None and _line(frame, frame.f_lineno).startswith("assert "):
            return True
        return super().to_bool(obj)


class _Value(Proxy):
    """A value in a trace. Its assignments stay assignments: another name of the same tensor must see them."""

    def _assign(self, assignment: Callable[..., Any], *arguments: Any) -> Any:
        return self.tracer.create_proxy("call_function", assignment, (self, *arguments), {})

    __iadd__ = partialmethod(_assign, operator.iadd)
    __isub__ = partialmethod(_assign, operator.isub)
    __imul__ = partialmethod(_assign, operator.imul)
    __itruediv__ = partialmethod(_assign, operator.itruediv)
    __setitem__ = partialmethod(_assign, operator.setitem)


class _TensorProxy(Proxy):
    """A parameter or buffer in a trace: its values are symbols, its shape is known."""

    def __init__(self, node: Node, tracer: fx.Tracer, tensor: Tensor) -> None:
        super().__init__(node, tracer)
        self.shape = tensor.shape
        self.ndim = tensor.ndim
        self.size: Callable[..., Any] = tensor.size
        self.dim: Callable[[], int] = tensor.dim
        self.numel: Callable[[], int] = tensor.numel


def _check_inputs(model: nn.Module) -> None:
    if any(nn.parameter.is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers())):
        raise ModelError(f"{type(model).__name__} has lazy layers without a shape yet: run it once on a batch first")
    parameters = inspect.signature(model.forward).parameters.values()
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p.name for p in parameters if p.default is inspect.Parameter.empty and p.kind not in variable]
    keywords = [p.name for p in parameters if p.name in needed and p.kind is inspect.Parameter.KEYWORD_ONLY]
    if len(needed) > 1 or keywords or not parameters:
        raise ModelError(
            f"{type(model).__name__}.forward takes {', '.join(needed) or 'nothing'}; a chain needs a model with "
            "exactly one input without a default. Wrap it in a module that takes the batch alone."
        )


@contextmanager
def _undisturbed(model: nn.Module, training: bool) -> Iterator[None]:
    """Set the mode of the whole model, and undo afterwards what its forward assigned to its modules."""
    found = [(module, dict(module.__dict__)) for module in model.modules()]
    try:
        with flags(tuple(model.modules()), training):
            yield
    finally:
        for module, before in found:
            module.__dict__.clear()
            module.__dict__.update(before)


@contextmanager
def flags(modules: Iterable[nn.Module], training: bool) -> Iterator[None]:
    """Set the training flag of exactly these modules, and put back what each had."""
    found = [(module, module.training) for module in modules]
    try:
        for module, before in found:
            if before != training:
                _set_flag(module, training)
        yield
    finally:
        # Backwards, so that a module that is given twice gets its first flag.
        for module, before in reversed(found):
            if module.training != before:
                _set_flag(module, before)


def _set_flag(module: nn.Module, training: bool) -> None:
    """Set a training flag past what nn.Module does when a module, parameter or buffer is assigned."""
    if type(module).__setattr__ is nn.Module.__setattr__:
        object.__setattr__(module, "training", training)
    else:
        module.training = training


def _explain(model: nn.Module, error: Exception) -> str:
    """Return where in the user's code a trace stopped, and why."""
    names = {id(module): name for name, module in model.named_modules()}
    frames = [
        (frame, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not frame.f_code.co_filename.startswith(_NOT_THE_MODELS)
    ]
    owners = [names[id(owner)] for frame, _ in frames if id(owner := frame.f_locals.get("self")) in names]
    where = f"submodule {owners[-1]!r}" if owners and owners[-1] else "the model itself"
    if frames:
        frame, line = frames[-1]
        text = _line(frame, line)
        where += f" ({frame.f_code.co_filename}, line {line}{': ' + text if text else ''})"
    reason = str(error).split(" See the torch.fx docs")[0].strip() or type(error).__name__
    return f"{type(model).__name__} cannot be cut by itself: tracing stopped in {where}: {reason}. {REMEDY}"


def _line(frame: FrameType, number: int) -> str:
    return linecache.getline(frame.f_code.co_filename, number, frame.f_globals).strip()


def without_data(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape on torch's meta device; in float32 where it holds fractions."""
    return torch.empty(tensor.shape, device="meta", dtype=torch.float32 if tensor.is_floating_point() else tensor.dtype)
