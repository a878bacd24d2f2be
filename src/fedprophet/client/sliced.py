"""Convolutions and linear layers by slices of their weights: some output channels at a time, forward and backward.

oneDNN computes a convolution on a copy of its weight in an order of its own, and has the weight's gradient twice for a
moment. Where weights are what a layer has most of, that is most of what its training takes. By slices there is no more
than a slice of the copy and of the gradient: a step goes along a slice's gradient as soon as it is there, when nothing
else needs the slice, and forgets it. The gradient at the input is the sum of those by slices, which rounds in
another order; everything else is computed as ever.

Sliced are layers without groups whose weight is a parameter and has more bytes than their input. Where a weight is
used twice, or its gradients are summed (see `Descent`), its gradient is put together and left to autograd.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from fedprophet.client.descent import Descent

SLICES = 8
"""More of them save next to nothing: an eighth of a weight is less than what a layer takes beside it."""
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


class _Layer(ABC):
    """A kind of layer: what it computes with a slice of its weight, and the gradients at input, slice and bias."""

    axis: ClassVar[int]
    """Where its output has its channels."""

    @abstractmethod
    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor: ...
    @abstractmethod
    def back(self, gradient: Tensor, x: Tensor, weight: Tensor, wanted: Sequence[bool]) -> Gradients: ...


@dataclass(frozen=True)
class _Convolution(_Layer):
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    axis: ClassVar[int] = 1

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.convolution(x, weight, bias, *self._rest)

    def back(self, gradient: Tensor, x: Tensor, weight: Tensor, wanted: Sequence[bool]) -> Gradients:
        backward = torch.ops.aten.convolution_backward
        found: Gradients = backward(gradient, x, weight, [len(weight)], *self._rest, list(wanted))
        return found

    @property
    def _rest(self) -> tuple[Any, ...]:
        return self.stride, self.padding, self.dilation, False, [0] * len(self.stride), 1


class _Linear(_Layer):
    axis: ClassVar[int] = -1

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    def back(self, gradient: Tensor, x: Tensor, weight: Tensor, wanted: Sequence[bool]) -> Gradients:
        rows, inputs = gradient.flatten(0, -2), x.flatten(0, -2)
        return (
            gradient @ weight if wanted[0] else None,
            rows.t() @ inputs if wanted[1] else None,
            rows.sum(0) if wanted[2] else None,
        )


class _Call(NamedTuple):
    """A layer as it is called."""

    layer: _Layer
    x: Tensor
    weight: Tensor
    bias: Tensor | None

    @property
    def sliced(self) -> bool:
        """Whether slices of its weight are worth while."""
        weight = self.weight
        return isinstance(weight, nn.Parameter) and len(weight) >= SLICES and weight.nbytes > self.x.nbytes


def _convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> _Call | None:
    """Return a convolution of a batch; None where it has groups, or is padded by a rule instead of a number."""
    rank = weight.dim() - 2
    if groups != 1 or isinstance(padding, str) or x.dim() != weight.dim():
        return None
    numbers = ([each] * rank if isinstance(each, int) else list(each) for each in (stride, padding, dilation))
    return _Call(_Convolution(*((values * rank)[:rank] for values in numbers)), x, weight, bias)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> _Call | None:
    return _Call(_Linear(), x, weight, bias) if x.dim() > 1 else None


LAYERS: Mapping[Any, Callable[..., _Call | None]] = {
    F.conv1d: _convolution,
    F.conv2d: _convolution,
    F.conv3d: _convolution,
    F.linear: _linear,
}


NAMES = {"input": "x"}
"""Arguments that are called otherwise here."""


class SlicedWeights(TorchFunctionMode):
    """Computes layers by slices of their weights within a `with` block."""

    def __init__(self) -> None:
        super().__init__()
        self._descent: Descent | None = None
        self._uses: Counter[int] = Counter()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        named = {NAMES.get(name, name): value for name, value in kwargs.items()}
        call = LAYERS[func](*args, **named) if func in LAYERS else None
        if call is not None and call.sliced:
            result = _Sliced.apply(call.x, call.weight, call.bias, call.layer, self)  # type: ignore[no-untyped-call]
        else:
            result = func(*args, **kwargs)
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(result)):
            self._uses.update(id(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, nn.Parameter))
        return result

    @contextmanager
    def stepped_by(self, descent: Descent) -> Iterator[None]:
        """Let the way back from such layers step along the gradient of a slice as soon as it is there."""
        self._descent = descent
        try:
            with self:
                yield
        finally:
            self._descent = None

    def steps(self, weight: Tensor) -> Descent | None:
        """Return what steps along the slices of a weight; None where its whole gradient is needed."""
        descent, alone = self._descent, self._uses[id(weight)] == 1
        return descent if descent is not None and alone and descent.forgets(weight) else None


def by_slices(sliced: bool) -> AbstractContextManager[object]:
    """Compute layers by slices of their weights within a `with` block, if they are to be."""
    return SlicedWeights() if sliced else nullcontext()


class _Sliced(torch.autograd.Function):
    """A layer by slices of its weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: _Layer, mode: SlicedWeights) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.layer, ctx.mode = weight, layer, mode
        return torch.cat(
            [layer.run(x, weight[rows], None if bias is None else bias[rows]) for rows in _slices(weight)], layer.axis
        )

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x,), weight = ctx.saved_tensors, ctx.weight
        descent = ctx.mode.steps(weight) if ctx.needs_input_grad[1] else None
        at_input: Tensor | None = None
        weights, biases = [], []
        for rows in _slices(weight):
            part = gradient.narrow(ctx.layer.axis, rows.start, rows.stop - rows.start).contiguous()
            more, at_weight, at_bias = ctx.layer.back(part, x, weight[rows], ctx.needs_input_grad[:3])
            if more is not None:
                at_input = more if at_input is None else at_input.add_(more)
            if at_weight is not None:
                weights.append(at_weight) if descent is None else descent.step_rows(weight, rows, at_weight)
            if at_bias is not None:
                biases.append(at_bias)
            del part, more, at_weight
        whole = [torch.cat(parts) if parts else None for parts in (weights, biases)]
        return at_input, *whole, None, None


def _slices(weight: Tensor) -> Iterator[slice]:
    size = -(-len(weight) // SLICES)
    return (slice(start, min(start + size, len(weight))) for start in range(0, len(weight), size))
