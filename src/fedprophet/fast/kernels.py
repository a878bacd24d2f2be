"""The operations that stacks of networks are made of, in plain torch: for any device, and to test the GPU's against.

Images are stacked as clients × samples × height × width × channels (K×N×H×W×C), convolutions as K×T×C_in×C_out with the
T taps row by row: nine for a 3×3 convolution. Statistics have one number for each client and channel (K×C), in float32.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_input, conv2d_weight

FEW = 32
"""The most numbers that a position of an image of few channels reads, and sends gradients to."""
TINY = 1e-12
"""Keeps the direction of a zero gradient finite."""


@dataclass(frozen=True)
class Scaling:
    """How float32 inputs become what the first convolution reads: (x − mean) / std in `dtype`, padded to `channels`."""

    mean: Tensor
    std: Tensor
    dtype: torch.dtype
    channels: int

    def __call__(self, x: Tensor) -> Tensor:
        scaled = ((x - self.mean) / self.std).to(self.dtype)
        padding = self.channels - x.shape[-1]
        return F.pad(scaled, (0, padding)) if padding else scaled

    def back(self, gradient: Tensor) -> Tensor:
        """Return the gradient with respect to the inputs, in float32."""
        return gradient[..., : len(self.std)].float() / self.std


@dataclass(frozen=True)
class Ball:
    """Where an attack may go: a norm's ball of a radius that a captured graph reads anew, and bounds of the inputs."""

    norm: str
    radius: Tensor
    step: Tensor
    low: float
    high: float


@dataclass(frozen=True)
class BatchNorm:
    """A batch norm layer and the bias of the convolution in front of it, if that has one; everything is K×C."""

    weight: Tensor
    bias: Tensor
    before: Tensor | None
    """The convolution's bias. It leaves no trace behind a batch norm but in its running mean."""
    running_mean: Tensor
    running_var: Tensor
    epsilon: float
    momentum: float


@dataclass(frozen=True)
class Statistics:
    """Of one batch: mean and 1 / sqrt(variance + epsilon), and with the layer's weight and bias: scale · x + shift."""

    mean: Tensor
    inverse: Tensor
    scale: Tensor
    shift: Tensor


@dataclass(frozen=True)
class Slopes:
    """What sums over a batch give on the way back through a norm layer, with x̂ = (x − mean) · inverse.

    The gradient of what the layer read is scale · (g − Σ g / M − x̂ · Σ g x̂ / M) for M rows: scale · g + b · x + c.
    """

    bias: Tensor
    """The gradient of the layer's bias, Σ g."""
    weight: Tensor
    """The gradient of its weight, Σ g · x̂."""
    b: Tensor
    c: Tensor


class Kernels:
    """Every operation in plain torch: client after client, with torch's own convolutions in channels-last layout.

    A device that does better overrides them (`gpu`). Channels are padded with zeros to a multiple of `multiple`; fewer
    channels than a multiple of `tile` take as long.
    """

    tile = 1

    def __init__(self, multiple: int = 1) -> None:
        self.multiple = multiple

    def convolve(
        self,
        x: Tensor,
        weight: Tensor,
        shift: Tensor | None = None,
        mask: Tensor | None = None,
        turned: bool = False,
        out: Tensor | None = None,
        channels: int | None = None,
        add: Tensor | None = None,
        stride: int = 1,
    ) -> Tensor:
        """Return the convolution, and what is added to it; with `shift`, that is added and a ReLU follows; `mask` keeps
        where it is > 0.

        `turned`: the convolution that takes gradients back from the outputs to the inputs. `out` takes the result.
        `channels` says how many of the inputs' are more than padding, where that is known.
        """
        if weight.shape[1] == 1:
            stacked = _multiplied(x, weight[:, 0], turned, stride)
        else:
            convolved = _convolved_back if turned else _convolved
            stacked = _stack([convolved(images, taps, stride) for images, taps in zip(x, weight, strict=True)])
        return self.finish(stacked if add is None else stacked.add_(add), shift, mask, out)

    def finish(
        self, y: Tensor, shift: Tensor | None = None, mask: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Add, rectify and mask as `convolve` does, given what a product left, which may be overwritten."""
        y = y if shift is None else y.add_(_spread(shift, y)).relu_()
        y = y if mask is None else y.mul_(mask > 0)
        return y if out is None else out.copy_(y)

    def weight_gradient(self, x: Tensor, gradient: Tensor, kernel: int = 3, stride: int = 1) -> Tensor:
        """Return the gradient of a convolution's weight, in float32."""
        if kernel == 1:
            read = x[:, :, ::stride, ::stride].flatten(1, 3)
            return torch.bmm(read.transpose(1, 2), gradient.flatten(1, 3)).float().unsqueeze(1)
        found = []
        for images, outputs in zip(x, gradient, strict=True):
            images, outputs = images.permute(0, 3, 1, 2), outputs.permute(0, 3, 1, 2)
            shape = (outputs.shape[1], images.shape[1], kernel, kernel)
            weight = conv2d_weight(images, shape, outputs, stride, kernel // 2)  # type: ignore[no-untyped-call]
            found.append(weight.permute(2, 3, 1, 0).reshape(kernel**2, shape[1], shape[0]))
        return _stack(found).float()

    def pool(self, x: Tensor, side: int = 2) -> tuple[Tensor, Tensor]:
        """Return the max-pool that halves what a ReLU gave, and which position of its window won (uint8).

        The window is 2×2, or 3×3 and reaches beyond the border; where none is above 0, the number behind the last wins.
        """
        k, n, h, w, c = x.shape
        top = x.new_zeros((k, n, h // 2, w // 2, c))
        winners = torch.full_like(top, side * side, dtype=torch.uint8)
        around = F.pad(x, (0, 0, side - 2, 0, side - 2, 0))
        for place in range(side * side):
            seen = around[:, :, place // side :: 2, place % side :: 2][:, :, : h // 2, : w // 2]
            # The first of the largest wins.
            winners = winners.masked_fill_(seen > top, place)
            top = torch.maximum(top, seen)
        return top, winners

    def unpool(self, winners: Tensor, gradient: Tensor, side: int = 2) -> Tensor:
        """Return the gradient of a ReLU and such a max-pool."""
        k, n, h, w, c = gradient.shape
        border = side - 2
        total = gradient.new_zeros((k, n, 2 * h + border, 2 * w + border, c))
        for place in range(side * side):
            seen = total[:, :, place // side :: 2, place % side :: 2][:, :, :h, :w]
            seen += gradient * (winners == place)
        return total[:, :, border:, border:].contiguous()

    def average(self, x: Tensor, side: int) -> Tensor:
        """Return the means over side × side equal parts of each image: K×N×(side·side·C)."""
        k, n, h, w, c = x.shape
        parts = x.float().view(k, n, side, h // side, side, w // side, c)
        return parts.mean(dim=(3, 5)).to(x.dtype).view(k, n, -1)

    def average_gradient(
        self, gradient: Tensor, x: Tensor, side: int, weight: float, masked: bool, out: Tensor | None = None
    ) -> Tensor:
        """Return the gradient of `average` plus weight · x, for images x; `masked`: where x > 0. `out` takes it."""
        k, n, h, w, c = x.shape
        lines, across = h // side, w // side
        parts = (gradient.float() / (lines * across)).view(k, n, side, 1, side, 1, c)
        total = weight * x.float() + parts.expand(k, n, side, lines, side, across, c).reshape(x.shape)
        total = (total * (x > 0) if masked else total).to(x.dtype)
        return total if out is None else out.copy_(total)

    def maximum(self, x: Tensor, side: int) -> Tensor:
        """Return the largest numbers of side × side equal parts of each image: K×N×(side·side·C)."""
        k, n, h, w, c = x.shape
        return x.view(k, n, side, h // side, side, w // side, c).amax(dim=(3, 5)).flatten(2)

    def maximum_gradient(
        self, gradient: Tensor, x: Tensor, side: int, masked: bool, out: Tensor | None = None
    ) -> Tensor:
        """Return the gradient of `maximum`, for images x; `masked`: where x > 0. `out` takes it.

        The first of the largest numbers of a part, row by row, takes all of it, as in torch's own max-pools.
        """
        k, n, h, w, c = x.shape
        lines, across = h // side, w // side
        parts = x.view(k, n, side, lines, side, across, c).transpose(3, 4).flatten(4, 5)
        top, winners = parts.max(dim=4, keepdim=True)
        sent = gradient.to(x.dtype).reshape(top.shape)
        sent = sent * (top > 0) if masked else sent
        spread = torch.zeros_like(parts).scatter_(4, winners, sent)
        total = spread.reshape(k, n, side, side, lines, across, c).transpose(3, 4).reshape(x.shape)
        return total if out is None else out.copy_(total)

    def head_gradient(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        targets: Tensor,
        strong_convexity: float,
        masked: bool,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return the gradient of every sample's loss at a head: a linear layer (K×C×classes) on the mean of an image.

        The loss is the cross-entropy with one-hot `targets` plus strong_convexity / 2 · ‖x‖²; `masked`: where x > 0.
        """
        scores = torch.baddbmm(bias.to(weight.dtype).unsqueeze(1), self.average(x, 1), weight).float()
        gradient = torch.bmm((scores.softmax(dim=2) - targets).to(x.dtype), weight.transpose(1, 2))
        return self.average_gradient(gradient, x, 1, strong_convexity, masked, out)

    def norm_statistics(self, x: Tensor, norm: BatchNorm) -> Statistics:
        """Return the statistics over samples and positions, and let the running ones follow, in place."""
        variance, mean = torch.var_mean(x.float(), dim=(1, 2, 3), correction=0)
        inverse = torch.rsqrt(variance + norm.epsilon)
        scale = norm.weight * inverse
        norm.running_mean.lerp_(mean if norm.before is None else mean + norm.before, norm.momentum)
        norm.running_var.lerp_(variance * unbiased(x), norm.momentum)
        return Statistics(mean, inverse, scale, norm.bias - mean * scale)

    def fold(self, weight: Tensor, norm: BatchNorm, out: Tensor, shift: Tensor, add: bool) -> None:
        """Make a norm layer with its running statistics part of the convolution in front of it.

        `out` takes the convolution, and `shift` what the layer adds; `add`: to what is there already.
        """
        scale = norm.weight * torch.rsqrt(norm.running_var + norm.epsilon)
        torch.mul(weight, scale[:, None, None, :], out=out)
        offset = -norm.running_mean if norm.before is None else -norm.running_mean + norm.before
        added = norm.bias + scale * offset
        if add:
            shift.add_(added)
        else:
            shift.copy_(added)

    def scale_shift(
        self, x: Tensor, scale: Tensor, shift: Tensor, add: Tensor | None = None, relu: bool = True
    ) -> Tensor:
        """Return max(0, scale · x + shift), or the same without the max(0, …); `add` is added before."""
        result = torch.addcmul(_spread(shift, x), _spread(scale, x), x.float())
        result = result if add is None else result.add_(add)
        return (result.relu_() if relu else result).to(x.dtype)

    def norm_slopes(self, gradient: Tensor, active: Tensor, x: Tensor, statistics: Statistics) -> Slopes:
        """Return what the way back needs, where g is the gradient where `active` > 0."""
        g = gradient.float() * (active > 0)
        total, product = g.sum(dim=(1, 2, 3)), (g * x.float()).sum(dim=(1, 2, 3))
        slope = (product - statistics.mean * total) * statistics.inverse
        rows = row_count(x)
        b = -statistics.scale * statistics.inverse * slope / rows
        c = -statistics.scale * total / rows - b * statistics.mean
        return Slopes(total, slope, b, c)

    def norm_gradient(self, gradient: Tensor, active: Tensor, x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        """Return a · g + b · x + c, where g is the gradient where `active` > 0."""
        g = gradient.float() * (active > 0)
        return (_spread(a, x) * g + _spread(b, x) * x.float() + _spread(c, x)).to(x.dtype)

    def ascend(
        self, x: Tensor, scaled: Tensor, clean: Tensor, gradient: Tensor, ball: Ball, scaling: Scaling, spread: bool
    ) -> None:
        """Move inputs one step up the gradient, in place, and `scaled` with them; the gradient is of scaled ones.

        `spread`: it still lies with the outputs of the first convolution, see `gathered`.
        """
        gradient = gathered(gradient, x.shape[-1]) if spread else gradient
        delta = STEPS[ball.norm](x - clean, scaling.back(gradient), ball)
        scaled.copy_(scaling(x.copy_((clean + delta).clamp_(ball.low, ball.high))))


def _linf_step(delta: Tensor, gradient: Tensor, ball: Ball) -> Tensor:
    delta = delta + ball.step * gradient.sign()
    return torch.minimum(torch.maximum(delta, -ball.radius), ball.radius)


def _l2_step(delta: Tensor, gradient: Tensor, ball: Ball) -> Tensor:
    delta = delta + ball.step * gradient / (sample_norms(gradient) + TINY)
    return delta * (ball.radius / (sample_norms(delta) + TINY)).clamp(max=1.0)


STEPS = {"linf": _linf_step, "l2": _l2_step}


def row_count(x: Tensor) -> int:
    """Return how many values a client's statistics of one channel are taken over."""
    return x.shape[1:4].numel()


def unbiased(x: Tensor) -> float:
    """Return the factor that makes a batch's variance an unbiased estimate."""
    rows = row_count(x)
    return rows / (rows - 1)


def gathered(spread: Tensor, channels: int) -> Tensor:
    """Return the gradient of a convolution's input, given what every output position sends to its nine neighbours.

    `spread` is K×N×H×W×(9·channels, padded). It is one small product, which a convolution of gradients into few
    channels is not; the caller adds up what it needs.
    """
    height, width = spread.shape[2:4]
    around = F.pad(spread[..., : 9 * channels], (0, 0, 1, 1, 1, 1))
    total = spread.new_zeros((*spread.shape[:4], channels))
    for tap in range(9):
        # What a tap read lies to its side, so what it sends back comes from the other one.
        top, left = 2 - tap // 3, 2 - tap % 3
        sent = slice(tap * channels, (tap + 1) * channels)
        total += around[:, :, top : top + height, left : left + width, sent]
    return total


def sample_norms(x: Tensor) -> Tensor:
    """Return the l2 norm of every sample, so that it broadcasts."""
    norms: Tensor = torch.linalg.vector_norm(x, dim=(2, 3, 4), keepdim=True)
    return norms


def _stack(parts: list[Tensor]) -> Tensor:
    return parts[0].unsqueeze(0) if len(parts) == 1 else torch.stack(parts)


def _multiplied(x: Tensor, weight: Tensor, turned: bool, stride: int) -> Tensor:
    """Return a 1×1 convolution, which is a product for each position that its stride does not skip.

    As a convolution with a stride it is not left to torch: see `engines.folding.is_strided_pointwise`.
    """
    if not turned:
        read = x[:, :, ::stride, ::stride]
        return torch.bmm(read.flatten(1, 3), weight).view(*read.shape[:4], -1)
    k, n, h, w, _ = x.shape
    back = x.new_zeros((k, n, h * stride, w * stride, weight.shape[1]))
    back[:, :, ::stride, ::stride] = torch.bmm(x.flatten(1, 3), weight.transpose(1, 2)).view(k, n, h, w, -1)
    return back


def _convolved(images: Tensor, taps: Tensor, stride: int) -> Tensor:
    """Return the convolution of one client's images."""
    filters = _filters(taps)
    result = F.conv2d(images.permute(0, 3, 1, 2), filters, stride=stride, padding=filters.shape[2] // 2)
    return result.permute(0, 2, 3, 1)


def _convolved_back(gradient: Tensor, taps: Tensor, stride: int) -> Tensor:
    """Return the gradient of one client's images, whose sides a stride divides."""
    filters, outputs = _filters(taps), gradient.permute(0, 3, 1, 2)
    samples, _, height, width = outputs.shape
    shape = (samples, filters.shape[1], stride * height, stride * width)
    found: Tensor = conv2d_input(shape, filters, outputs, stride, filters.shape[2] // 2)  # type: ignore[no-untyped-call]
    return found.permute(0, 2, 3, 1)


def _filters(taps: Tensor) -> Tensor:
    """Return one client's taps as torch's filters."""
    number, inputs, outputs = taps.shape
    side = math.isqrt(number)
    return taps.reshape(side, side, inputs, outputs).permute(3, 2, 0, 1)


def _spread(values: Tensor, like: Tensor) -> Tensor:
    """Return K×C numbers so that they broadcast against a stack of images."""
    return values.view(len(values), *[1] * (like.ndim - 2), -1)
