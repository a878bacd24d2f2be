"""The operations of `kernels` on a GPU: launches of what the `triton_…` files say, in tiles that `tiles` chooses.

Where the device can (Hopper and later) a tile of a convolution is a block of positions that the copy engine fetches
whole, zeros beyond the border included; elsewhere each thread computes addresses. Rarer convolutions (other kernels,
strides) are left to torch, client after client.
"""

from functools import cache

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fedprophet.fast import triton_convolutions as convolutions
from fedprophet.fast import triton_images as on_images
from fedprophet.fast import triton_norms as norms
from fedprophet.fast.kernels import (
    FEW,
    TINY,
    Ball,
    BatchNorm,
    Kernels,
    Scaling,
    Slopes,
    Statistics,
    gathered,
    row_count,
    unbiased,
)
from fedprophet.fast.tiles import block_tiles, divisor, row_tiles, sides
from fedprophet.precision import exact_products

PARTS = 64
"""The most parts (a power of two) that a reduction over rows is cut into. They are then added."""
ROWS = 128
CHANNELS = 32
"""Channels whose parts one program adds."""
BLOCK = 1024
LARGEST_TILE = 128
"""The most positions of a tile, and of a line of an image."""
SHARED = 200 * 1024
"""Bytes of a processor's own memory that the largest tiles need."""
_LARGEST = 3e38
"""Stands for infinity."""


class TritonKernels(Kernels):
    """The operations on one GPU."""

    tile = 64

    def __init__(self) -> None:
        super().__init__(multiple=16)
        self._torch = Kernels()

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
        if weight.shape[1] != 9 or stride != 1:
            with exact_products():
                found = self._torch.convolve(x, weight, shift, mask, turned, out, channels, add, stride)
            return found.contiguous()
        outputs = weight.shape[2 if turned else 3]
        y = x.new_empty((*x.shape[:4], outputs)) if out is None else out
        given = (add, shift, mask)
        assert all(tensor is None or tensor.is_contiguous() for tensor in (x, weight, y, *given))
        others = (*(weight if tensor is None else tensor for tensor in given), y)
        flags = (*(tensor is not None for tensor in given), turned)
        if _in_blocks(x):
            _launch_blocks(x, weight, others, flags, outputs)
        elif channels is not None and 9 * channels <= FEW and mask is None and add is None and not turned:
            _launch_few(x, weight, shift, y, channels)
        else:
            _launch(x, weight, others, flags, outputs)
        return y

    def finish(
        self, y: Tensor, shift: Tensor | None = None, mask: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        result, total = y if out is None else out, y.numel()
        assert all(tensor is None or tensor.is_contiguous() for tensor in (y, shift, mask, result))
        tensors = y, y if shift is None else shift, y if mask is None else mask, result
        sizes = y.shape[1:4].numel(), y.shape[-1], total
        convolutions.finish[(triton.cdiv(total, BLOCK),)](*tensors, *sizes, shift is not None, mask is not None, BLOCK)
        return result

    def weight_gradient(self, x: Tensor, gradient: Tensor, kernel: int = 3, stride: int = 1) -> Tensor:
        if kernel != 3 or stride != 1:
            with exact_products():
                return self._torch.weight_gradient(x, gradient, kernel, stride).contiguous()
        clients, samples, height, width, inputs = x.shape
        outputs, rows = gradient.shape[-1], samples * height * width
        block_i, block_o = divisor(inputs, 64), divisor(outputs, 64 if x.dtype == torch.float32 else 128)
        tiles = (inputs // block_i) * (outputs // block_o)
        block_m = 32 if x.dtype == torch.float32 else 64
        # Enough parts to fill the device, and not so many that adding them takes longer than the product.
        parts = max(1, min(PARTS, triton.cdiv(1024, tiles * 9 * clients), triton.cdiv(rows, block_m)))
        steps = triton.cdiv(rows, block_m * parts)
        out = x.new_empty((parts, clients, 9, inputs, outputs), dtype=torch.float32)
        sizes, blocks = (rows, height, width, inputs, outputs, clients, steps), (block_m, block_i, block_o)
        convolutions.weight_gradient[(tiles, 9, parts * clients)](
            x, gradient, out, *sizes, _precision(x), *blocks, num_warps=4, num_stages=3
        )
        return out[0] if parts == 1 else out.sum(dim=0)

    def pool(self, x: Tensor, side: int = 2) -> tuple[Tensor, Tensor]:
        clients, samples, height, width, channels = x.shape
        y = x.new_empty((clients, samples, height // 2, width // 2, channels))
        winners = torch.empty_like(y, dtype=torch.uint8)
        on_images.pool[(triton.cdiv(y.numel(), BLOCK),)](x, y, winners, y.numel(), height, width, channels, side, BLOCK)
        return y, winners

    def unpool(self, winners: Tensor, gradient: Tensor, side: int = 2) -> Tensor:
        assert gradient.is_contiguous()
        clients, samples, height, width, channels = gradient.shape
        y = gradient.new_empty((clients, samples, 2 * height, 2 * width, channels))
        # Windows that lie apart write what is theirs; where they overlap, positions ask them.
        kernel, total = (on_images.unpool, gradient.numel()) if side == 2 else (on_images.unpool_overlapping, y.numel())
        kernel[(triton.cdiv(total, BLOCK),)](winners, gradient, y, total, 2 * height, 2 * width, channels, BLOCK)
        return y

    def average(self, x: Tensor, side: int) -> Tensor:
        assert x.is_contiguous()
        clients, samples, height, width, channels = x.shape
        y = x.new_empty((clients, samples, side * side * channels))
        block_c = min(64, triton.next_power_of_2(channels))
        grid = (clients * samples * side * side, triton.cdiv(channels, block_c))
        on_images.average[grid](x, y, height, width, channels, side, ROWS, block_c)
        return y

    def average_gradient(
        self, gradient: Tensor, x: Tensor, side: int, weight: float, masked: bool, out: Tensor | None = None
    ) -> Tensor:
        y, gradient, total = torch.empty_like(x) if out is None else out, gradient.contiguous(), x.numel()
        assert x.is_contiguous()
        assert y.is_contiguous()
        height, width, channels = x.shape[2:]
        on_images.average_gradient[(triton.cdiv(total, BLOCK),)](
            gradient, x, y, total, height, width, channels, side, weight, masked, BLOCK
        )
        return y

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
        y = torch.empty_like(x) if out is None else out
        assert all(tensor.is_contiguous() for tensor in (x, weight, bias, targets, y))
        clients, samples, height, width, channels = x.shape
        classes = max(16, triton.next_power_of_2(weight.shape[2]))
        sizes = samples, height * width, channels, weight.shape[2]
        block_m = min(ROWS // 2, triton.next_power_of_2(height * width))
        block_c = min(64, triton.next_power_of_2(channels), max(1, 8192 // classes))
        on_images.head_gradient[(samples, clients)](
            x, weight, bias, targets, y, *sizes, strong_convexity, masked, block_m, block_c, classes
        )
        return y

    def norm_statistics(self, x: Tensor, norm: BatchNorm) -> Statistics:
        clients, channels = x.shape[0], x.shape[-1]
        given = (norm.weight, norm.bias, norm.weight if norm.before is None else norm.before)
        running = (norm.running_mean, norm.running_var)
        assert all(_fits(values, clients, channels) for values in (*given, *running))
        sums = self._row_sums(x)
        out = x.new_empty((4, clients, channels), dtype=torch.float32)
        sizes, numbers = (row_count(x), channels, clients, len(sums)), (norm.epsilon, norm.momentum, unbiased(x))
        norms.norm_statistics[(triton.cdiv(channels, CHANNELS), clients)](
            sums, *given, *running, out, *sizes, *numbers, norm.before is not None, PARTS, CHANNELS
        )
        return Statistics(*out.unbind())

    def fold(self, weight: Tensor, norm: BatchNorm, out: Tensor, shift: Tensor, add: bool) -> None:
        clients, channels = weight.shape[0], weight.shape[-1]
        given = (norm.weight, norm.bias, norm.weight if norm.before is None else norm.before)
        # What all clients share lies in memory once: its clients are no step apart.
        values = [each.contiguous() for each in (*given, norm.running_mean, norm.running_var)]
        assert all(_fits(each, clients, channels) for each in (*values, shift))
        assert weight[0].is_contiguous()
        assert out.shape == weight.shape
        assert out.is_contiguous()
        rows = weight.shape[1] * weight.shape[2]
        block_c = min(64, triton.next_power_of_2(channels))
        block_m = 2048 // block_c
        sizes, flags = (weight.stride(0), rows, channels), (norm.before is not None, add)
        norms.fold[(triton.cdiv(rows, block_m), triton.cdiv(channels, block_c), clients)](
            weight, *values, out, shift, *sizes, norm.epsilon, *flags, block_m, block_c
        )

    def scale_shift(
        self, x: Tensor, scale: Tensor, shift: Tensor, add: Tensor | None = None, relu: bool = True
    ) -> Tensor:
        return self._per_channel(x, None, None, None, scale, shift, add, relu)

    def norm_slopes(self, gradient: Tensor, active: Tensor, x: Tensor, statistics: Statistics) -> Slopes:
        clients, channels = x.shape[0], x.shape[-1]
        given = (statistics.mean, statistics.inverse, statistics.scale)
        assert all(_fits(values, clients, channels) for values in given)
        sums = self._row_sums(x, (gradient, active, statistics.mean))
        out = x.new_empty((4, clients, channels), dtype=torch.float32)
        norms.norm_slopes[(triton.cdiv(channels, CHANNELS), clients)](
            sums, *given, out, row_count(x), channels, clients, len(sums), PARTS, CHANNELS
        )
        return Slopes(*out.unbind())

    def norm_gradient(self, gradient: Tensor, active: Tensor, x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return self._per_channel(x, gradient, active, a, b, c)

    def ascend(
        self, x: Tensor, scaled: Tensor, clean: Tensor, gradient: Tensor, ball: Ball, scaling: Scaling, spread: bool
    ) -> None:
        assert all(tensor.is_contiguous() for tensor in (x, scaled, clean, gradient))
        clients, samples, height, width, channels = x.shape
        far = ball.norm == "l2"
        if far and spread:
            gradient, spread = F.pad(gathered(gradient, channels), (0, scaling.channels - channels)), False
        parts = max(1, min(8, triton.cdiv(x.shape[2:].numel(), 4 * BLOCK))) if far else 1
        sums = self._sample_sums(x, clean, gradient, scaling, parts) if far else ball.radius
        positions = clients * samples * height * width
        block_c = min(triton.next_power_of_2(channels), 64)
        block_p = 2048 // block_c
        tensors = x, clean, gradient, scaling.mean, scaling.std, ball.radius, ball.step, sums, scaled
        sizes = positions, height, width, channels, scaling.channels, gradient.shape[-1]
        bounds = max(ball.low, -_LARGEST), min(ball.high, _LARGEST)
        on_images.ascend[(triton.cdiv(positions, block_p), triton.cdiv(channels, block_c))](
            *tensors, *sizes, *bounds, far, spread, parts, TINY, block_p, block_c
        )

    @staticmethod
    def _sample_sums(x: Tensor, clean: Tensor, gradient: Tensor, scaling: Scaling, parts: int) -> Tensor:
        samples, size = x.shape[0] * x.shape[1], x.shape[2:].numel()
        sums = x.new_empty((samples, parts, 3))
        steps = triton.cdiv(size, BLOCK * parts)
        on_images.sample_sums[(samples, parts)](
            x, clean, gradient, scaling.std, sums, size, x.shape[-1], scaling.channels, parts, BLOCK, steps
        )
        return sums

    def _row_sums(self, x: Tensor, back: tuple[Tensor, Tensor, Tensor] | None = None) -> Tensor:
        """Return two sums and their centre, of each part of the rows: parts × clients × 3 × channels.

        `back`, on the way back: the gradient, what was active, and the means.
        """
        others = (x, x, x) if back is None else back
        assert all(tensor.is_contiguous() for tensor in (x, *others))
        clients, channels, rows = x.shape[0], x.shape[-1], row_count(x)
        block_c = min(64, triton.next_power_of_2(channels))
        parts = max(1, min(PARTS, triton.cdiv(rows, ROWS)))
        steps = triton.cdiv(rows, ROWS * parts)
        out = x.new_empty((parts, clients, 3, channels), dtype=torch.float32)
        norms.sums[(triton.cdiv(channels, block_c), clients, parts)](
            x, *others, out, rows, channels, clients, steps, back is not None, ROWS, block_c
        )
        return out

    def _per_channel(
        self,
        x: Tensor,
        gradient: Tensor | None,
        active: Tensor | None,
        a: Tensor | None,
        b: Tensor,
        c: Tensor,
        add: Tensor | None = None,
        relu: bool = False,
    ) -> Tensor:
        y, total = torch.empty_like(x), x.numel()
        assert add is None or add.is_contiguous()
        images = x, x if gradient is None else gradient, x if active is None else active
        numbers = b if a is None else a.contiguous(), b.contiguous(), c.contiguous()
        sizes, flags = (row_count(x), x.shape[-1], total), (gradient is not None, add is not None, relu)
        norms.affine[(triton.cdiv(total, BLOCK),)](
            *images, *numbers, x if add is None else add, y, *sizes, *flags, BLOCK
        )
        return y


def _fits(values: Tensor, clients: int, channels: int) -> bool:
    """Whether there is one float32 number for each client and channel, row after row in memory."""
    return values.shape == (clients, channels) and values.dtype == torch.float32 and values.is_contiguous()


@cache
def has_copy_engine(device: int) -> bool:
    """Whether a device has a copy engine that fetches blocks of tensors, and room for those of a pipeline."""
    memory = triton.runtime.driver.active.utils.get_device_properties(device)["max_shared_mem"]
    return torch.cuda.get_device_capability(device)[0] >= 9 and bool(memory >= SHARED)


def _in_blocks(x: Tensor) -> bool:
    """Whether a convolution can be cut into blocks of lines or of whole images."""
    _, _, _, width, inputs = x.shape
    return x.dtype == torch.bfloat16 and width <= LARGEST_TILE and inputs % 64 == 0 and has_copy_engine(x.get_device())


def _launch(x: Tensor, weight: Tensor, others: tuple[Tensor, ...], flags: tuple[bool, ...], outputs: int) -> None:
    clients, samples, height, width, inputs = x.shape
    rows = samples * height * width
    sizes = rows, height, width, inputs, outputs
    *blocks, warps, stages = row_tiles(rows, inputs, outputs, x.dtype)
    block_m, block_n, _ = blocks
    convolutions.convolve[((outputs // block_n) * triton.cdiv(rows, block_m), clients)](
        x, weight, *others, *sizes, *flags, _precision(x), *blocks, num_warps=warps, num_stages=stages
    )


def _launch_few(x: Tensor, weight: Tensor, shift: Tensor | None, y: Tensor, channels: int) -> None:
    clients, samples, height, width, padded = x.shape
    rows, outputs = samples * height * width, y.shape[-1]
    block_n = divisor(outputs, 64)
    sizes = rows, height, width, padded, outputs, channels
    tensors = x, weight, weight if shift is None else shift, y
    convolutions.convolve_few[((outputs // block_n) * triton.cdiv(rows, ROWS), clients)](
        *tensors, *sizes, shift is not None, _precision(x), ROWS, block_n, FEW
    )


def _launch_blocks(
    x: Tensor, weight: Tensor, others: tuple[Tensor, ...], flags: tuple[bool, ...], outputs: int
) -> None:
    clients, samples, height, width, inputs = x.shape
    turned = flags[-1]
    rows = clients * samples * height * width
    positions, block_n, block_k, warps, stages = block_tiles(rows, height, width, inputs, outputs, turned)
    images, lines, across = sides(positions, height, width)
    x_blocks = TensorDescriptor.from_tensor(
        x.view(clients * samples, height, width, inputs), [images, lines, across, block_k]
    )
    shape = [block_n, block_k] if turned else [block_k, block_n]
    w_blocks = TensorDescriptor.from_tensor(weight.view(-1, weight.shape[3]), shape)
    tiles = triton.cdiv(samples, images) * triton.cdiv(height, lines)
    sizes = samples, height, width, inputs, outputs
    tile = images, lines, across, across == width and height % lines == 0, block_n, block_k
    convolutions.convolve_blocks[((outputs // block_n) * tiles, clients)](
        x_blocks, w_blocks, *others, *sizes, *flags, *tile, num_warps=warps, num_stages=stages
    )


def _precision(x: Tensor) -> str:
    """Return how products of float32 are made: in three parts, which is as exact as float32 and uses tensor cores."""
    return "tf32x3" if x.dtype == torch.float32 else "tf32"
