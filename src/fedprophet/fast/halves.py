"""3×3 convolutions of float32 numbers on a GPU's tensor cores, as layers that stand in for torch's.

A GPU multiplies halves many times faster than float32 numbers: an H200 has 990 against 67 TFLOP/s by
its data sheet. One product of float32 numbers takes three of halves (`triton_halves`), so a third of that is left.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import triton
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from triton.tools.tensor_descriptor import TensorDescriptor

from fedprophet.fast import triton_halves
from fedprophet.fast.gpu import has_copy_engine
from fedprophet.fast.reading import NotFusableError
from fedprophet.fast.tiles import Tiles, divisor, sides

BLOCK = 4096
LEAST_CHANNELS = 64
"""What a tile has of them: 128 bytes of halves, as the copy engine fetches them."""
Halves = tuple[Tensor, Tensor, Tensor]
"""The first and second halves of numbers, and the power of two of each row."""


class RowNumbers(Protocol):
    """A norm layer with numbers for each sample."""

    def numbers(self) -> tuple[Tensor, Tensor]:
        """Return what the channels of each sample are multiplied by, and what is added to them (N×C)."""


@dataclass(frozen=True)
class Ending:
    """What follows a convolution in one go: channels multiplied by `factor` (N×C), `shift` added (N×C; C without a
    factor), and a ReLU.
    """

    factor: Tensor | None = None
    shift: Tensor | None = None
    relu: bool = False


NOTHING = Ending()


class HalvesConvolution(nn.Module):
    """A convolution with fixed weights, of float32 numbers, whose products are made of halves.

    `norm` is a norm layer behind it, which the convolution's bias is part of; `relu`: one follows. It has a gradient
    for its input and none for anything else.
    """

    def __init__(self, layer: nn.Conv2d, norm: RowNumbers | None = None, relu: bool = False) -> None:
        super().__init__()
        taps = layer.weight.detach().permute(2, 3, 1, 0).reshape(-1, layer.out_channels)
        self.weight = split(taps.contiguous().unsqueeze(0))
        self._bias = None if layer.bias is None else layer.bias.detach()
        self.norm, self._relu = norm, relu

    def forward(self, x: Tensor) -> Tensor:
        factor, shift = (None, self._bias) if self.norm is None else self.norm.numbers()
        if factor is not None and len(factor) != len(x):
            raise NotFusableError("a norm layer that does not read one row for each sample")
        ending = Ending(factor, shift, self._relu)
        found: Tensor = _Convolution.apply(x, self.weight, ending)  # type: ignore[no-untyped-call]
        return found


def fits(layer: nn.Conv2d) -> bool:
    """Whether a layer is of the kind that is made here, on a device that halves are quick on."""
    return (
        (layer.kernel_size, layer.stride, layer.padding) == ((3, 3), (1, 1), (1, 1))
        and (layer.dilation, layer.groups, layer.padding_mode) == ((1, 1), 1, "zeros")
        and layer.in_channels % LEAST_CHANNELS == layer.out_channels % LEAST_CHANNELS == 0
        and layer.weight.dtype == torch.float32
        and layer.weight.is_cuda
        and has_copy_engine(layer.weight.get_device())
    )


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Halves, ending: Ending) -> Tensor:
        y = convolve(split(_rows(x)), weight, ending)
        ctx.weight, ctx.factor = weight, ending.factor
        if ending.relu:
            ctx.save_for_backward(y)
        return _like(y, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (active,) = ctx.saved_tensors or (None,)
        active = None if active is None else _rows(active)
        back = convolve(split(_rows(gradient), active, ctx.factor), ctx.weight, turned=True)
        return _like(back, gradient), None, None


def _rows(x: Tensor) -> Tensor:
    """Return images with their channels as the last dimension."""
    return x.permute(0, 2, 3, 1).contiguous()


def _like(y: Tensor, x: Tensor) -> Tensor:
    """Return images with their channels where another tensor has them in memory: a model may count on that."""
    return y if x.is_contiguous(memory_format=torch.channels_last) else y.contiguous()


def convolve(
    x: Halves, weight: Halves, ending: Ending = NOTHING, turned: bool = False, tiling: Tiles | None = None
) -> Tensor:
    """Return the convolution of images (N×H×W×C), or with `turned` what takes gradients back.

    `weight` are the halves of 1×(9·C_in)×C_out numbers. The result is N×C×H×W, with its channels last in memory. It is
    no view of another tensor: what follows may work on it in place.
    """
    samples, height, width, inputs = x[0].shape
    outputs = weight[0].shape[1] // 9 if turned else weight[0].shape[2]
    block_m, block_n, block_k, warps, stages = tiling or tiles(outputs)
    y = torch.empty((samples, outputs, height, width), device=x[2].device, memory_format=torch.channels_last)
    if not samples:
        return y
    images, lines, across = sides(block_m, height, width)
    x_blocks = [TensorDescriptor.from_tensor(part, [images, lines, across, block_k]) for part in x[:2]]
    shape = [block_n, block_k] if turned else [block_k, block_n]
    w_blocks = [TensorDescriptor.from_tensor(part[0], shape) for part in weight[:2]]
    others = x[2], weight[2], y if ending.factor is None else ending.factor, y if ending.shift is None else ending.shift
    sizes = samples, height, width, inputs, outputs
    flags = ending.factor is not None, ending.shift is not None, ending.relu, turned
    tile = images, lines, across, across == width and height % lines == 0, block_n, block_k
    count = triton.cdiv(samples, images) * triton.cdiv(height, lines) * triton.cdiv(width, across)
    triton_halves.convolve[((outputs // block_n) * count,)](
        *x_blocks, *w_blocks, *others, y, *sizes, *flags, *tile, num_warps=warps, num_stages=stages
    )
    return y


def split(x: Tensor, active: Tensor | None = None, factor: Tensor | None = None) -> Halves:
    """Return the halves of numbers that lie row after row: of those where `active` > 0, times a factor for channels."""
    assert all(given is None or given.is_contiguous() for given in (x, active, factor))
    high, low = (x.new_empty(x.shape, dtype=torch.float16) for _ in range(2))  # row after row, also those of 1×1 images
    scale = x.new_empty(len(x))
    given = x, x if active is None else active, x if factor is None else factor
    sizes, flags = (x.shape[1:].numel(), x.shape[-1]), (active is not None, factor is not None)
    if len(x):
        triton_halves.split[(len(x),)](*given, high, low, scale, *sizes, *flags, BLOCK, num_warps=8)
    return high, low, scale


def tiles(outputs: int) -> Tiles:
    """Return positions, outputs and inputs of a tile, warps and pipeline stages."""
    return (128, 128, 64, 8, 3) if divisor(outputs, 128) == 128 else (128, 64, 64, 4, 2)
