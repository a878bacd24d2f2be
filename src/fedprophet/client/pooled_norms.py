"""Batch norms of an atom that sees its batch in pieces, as if it saw all of it at once.

Mean and variance are gathered from all pieces before any is normalised, and the sums of the gradient before any is
passed on. With x̂ = (x − mean)/σ and the gradient g at the layer's output,

    ∂L/∂x = γ/σ · (g − mean(g) − x̂ · mean(g · x̂)),

where all means are over the batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


@dataclass(eq=False)
class PooledNorm:
    """A batch norm of the atom: its arguments, and what it needs to know of the whole batch."""

    running_mean: Tensor | None
    running_var: Tensor | None
    weight: Tensor | None
    momentum: float
    eps: float
    positions: int
    mean: Tensor
    var: Tensor
    gradient_means: tuple[Tensor, Tensor] | None = None

    def pooled(self, moments: "Moments") -> "PooledNorm":
        self.mean, self.var = moments.mean.to(self.mean.dtype), moments.variance.to(self.mean.dtype)
        return self

    def standardised(self, x: Tensor) -> Tensor:
        """Return x̂."""
        return (x - self._shaped(self.mean, x)).mul_(self._shaped(self.inverse_deviation, x))

    @property
    def inverse_deviation(self) -> Tensor:
        return (self.var + self.eps).rsqrt()

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum over all but the channels."""
        return x.sum(dim=_all_but_channels(x))

    def corrected(self, x: Tensor, gradient: Tensor) -> Tensor:
        """Return the gradient at the input, of which `gradient` is what does not go through the statistics."""
        assert self.gradient_means is not None
        plain, along = self.gradient_means
        scale = self.inverse_deviation if self.weight is None else self.inverse_deviation * self.weight.detach()
        through = self.standardised(x).mul_(self._shaped(along, x)).add_(self._shaped(plain, x))
        return through.mul_(self._shaped(-scale, x)).add_(gradient)

    def remember(self, samples: int) -> None:
        """Move the running statistics towards those of the batch, whose variance is then the unbiased one."""
        if self.running_mean is None or self.running_var is None:
            return
        count = samples * self.positions
        self.running_mean.lerp_(self.mean, self.momentum)
        self.running_var.lerp_(self.var * (count / (count - 1)), self.momentum)

    @staticmethod
    def _shaped(values: Tensor, x: Tensor) -> Tensor:
        return values.view(1, -1, *[1] * (x.dim() - 2))


class Moments:
    """Mean and variance of a whole batch, from those of its pieces (Chan et al., 1979), in float64."""

    def __init__(self) -> None:
        self.layer: PooledNorm | None = None
        self._count = 0

    def add(self, layer: PooledNorm, x: Tensor) -> None:
        self.layer = layer
        count = x.numel() // x.shape[1]
        variance, mean = torch.var_mean(x.detach(), dim=_all_but_channels(x), correction=0)
        variance, mean = variance.double(), mean.double()
        if not self._count:
            self._count, self.mean, self.variance = count, mean, variance
            return
        total = self._count + count
        apart, share = mean - self.mean, count / total
        self.variance = self.variance.lerp(variance, share) + apart.square() * (share * (1 - share))
        self.mean = self.mean + apart * share
        self._count = total


class EnoughError(Exception):
    """The pass has seen what it was for."""


class PooledNorms(TorchFunctionMode):
    """Lets the batch norms of one atom use the statistics of the whole batch, in the order in which they are called.

    `moments` gathers the statistics of the first one that has none, and ends the pass there. Of a `watched` one the
    input is `seen`, and on the way back from the atom's output the `gradient` at its own.
    """

    def __init__(
        self, norms: Sequence[PooledNorm], moments: Moments | None = None, watched: PooledNorm | None = None
    ) -> None:
        super().__init__()
        self._norms, self._moments, self._watched = norms, moments, watched
        self._called = 0
        self.seen: Tensor | None = None
        self.gradient: Tensor | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        return self._batch_norm(*args, **kwargs) if func is F.batch_norm else func(*args, **kwargs)

    def _batch_norm(
        self,
        x: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if not training:
            return F.batch_norm(x, running_mean, running_var, weight, bias, False, momentum, eps)
        if self._called == len(self._norms):
            assert self._moments is not None
            positions, none = x.numel() // x.shape[0] // x.shape[1], x.new_empty(0)
            layer = PooledNorm(running_mean, running_var, weight, momentum, eps, positions, none, none)
            self._moments.add(layer, x)
            raise EnoughError
        norm = self._norms[self._called]
        self._called += 1
        if torch.is_grad_enabled() and norm is not self._watched and norm.gradient_means is not None:
            x = _ThroughStatistics.apply(x, norm)  # type: ignore[no-untyped-call]
        output = F.batch_norm(x, norm.mean, norm.var, weight, bias, False, momentum, eps)
        if norm is self._watched:
            self.seen = x
            # A hook sees the gradient here even if the next layer works in place on this tensor.
            output.register_hook(self._take)  # type: ignore[no-untyped-call]
        return output

    def _take(self, gradient: Tensor) -> None:
        self.gradient = gradient


class _ThroughStatistics(torch.autograd.Function):
    """Passes a norm layer's input on, and adds to its gradient what goes through the batch's mean and variance."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: PooledNorm) -> Tensor:
        ctx.save_for_backward(x)
        ctx.norm = norm
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return ctx.norm.corrected(x, gradient), None


def _all_but_channels(x: Tensor) -> tuple[int, ...]:
    return (0, *range(2, x.dim()))
