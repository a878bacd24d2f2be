"""The operations of `kernels` in Triton: one launch for all clients, bf16 or float32, float32 sums.

A convolution is an implicit matrix product: the nine taps and the input channels are one long sum, and images are never
unfolded. Clients are a dimension of the grid.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

PARTS = 64
"""A reduction over rows is cut into at most so many parts, which are then added."""
ROWS = 128
BLOCK = 1024


@triton.jit
def _convolve(
    x_ptr,
    w_ptr,
    shift_ptr,
    mask_ptr,
    y_ptr,
    rows,
    height,
    width,
    inputs,
    outputs,
    SHIFT: tl.constexpr,
    MASK: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    column, row, client = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    m = row * BLOCK_M + tl.arange(0, BLOCK_M)
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    inside = m < rows
    position = m % (height * width)
    h, w = position // width, position % width
    x_base = x_ptr + client * rows * inputs
    w_base = w_ptr + client * 9 * inputs * outputs
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    tap = 0
    channel = 0
    for _ in range(9 * inputs // BLOCK_K):
        dh, dw = tap // 3 - 1, tap % 3 - 1
        valid = (h + dh >= 0) & (h + dh < height) & (w + dw >= 0) & (w + dw < width) & inside
        x_at = x_base + (m + dh * width + dw)[:, None] * inputs + (channel + k)[None, :]
        a = tl.load(x_at, mask=valid[:, None], other=0.0)
        b = tl.load(w_base + (tap * inputs + channel + k)[:, None] * outputs + n[None, :])
        total = tl.dot(a, b, total, input_precision=PRECISION)
        channel += BLOCK_K
        next_tap = channel >= inputs
        tap = tl.where(next_tap, tap + 1, tap)
        channel = tl.where(next_tap, 0, channel)
    at = (client * rows + m)[:, None] * outputs + n[None, :]
    if SHIFT:
        total = tl.maximum(total + tl.load(shift_ptr + client * outputs + n)[None, :], 0.0)
    if MASK:
        total = tl.where(tl.load(mask_ptr + at, mask=inside[:, None], other=0.0) > 0, total, 0.0)
    tl.store(y_ptr + at, total.to(y_ptr.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _weight_gradient(
    x_ptr,
    g_ptr,
    out_ptr,
    rows,
    height,
    width,
    inputs,
    outputs,
    clients,
    steps,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_O: tl.constexpr,
):
    tile, tap, part_client = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    client, part = (part_client % clients).to(tl.int64), part_client // clients
    across = outputs // BLOCK_O
    i = (tile // across) * BLOCK_I + tl.arange(0, BLOCK_I)
    o = (tile % across) * BLOCK_O + tl.arange(0, BLOCK_O)
    dh, dw = tap // 3 - 1, tap % 3 - 1
    x_base = x_ptr + client * rows * inputs
    g_base = g_ptr + client * rows * outputs
    total = tl.zeros((BLOCK_I, BLOCK_O), dtype=tl.float32)
    for step in range(steps):
        m = (part * steps + step) * BLOCK_M + tl.arange(0, BLOCK_M)
        inside = m < rows
        position = m % (height * width)
        h, w = position // width + dh, position % width + dw
        valid = (h >= 0) & (h < height) & (w >= 0) & (w < width) & inside
        a = tl.load(x_base + (m + dh * width + dw)[None, :] * inputs + i[:, None], mask=valid[None, :], other=0.0)
        b = tl.load(g_base + m[:, None] * outputs + o[None, :], mask=inside[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    at = ((part * clients + client) * 9 + tap) * inputs * outputs
    tl.store(out_ptr + at + i[:, None] * outputs + o[None, :], total)


@triton.jit
def _pool(x_ptr, y_ptr, total, height, width, channels, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    c, rest = at % channels, at // channels
    w, rest = rest % (width // 2), rest // (width // 2)
    h, n = rest % (height // 2), rest // (height // 2)
    corner = x_ptr + ((n * height + 2 * h) * width + 2 * w) * channels + c
    down = width * channels
    one = tl.load(corner, mask=inside, other=0.0)
    two = tl.load(corner + channels, mask=inside, other=0.0)
    three = tl.load(corner + down, mask=inside, other=0.0)
    four = tl.load(corner + down + channels, mask=inside, other=0.0)
    tl.store(y_ptr + at, tl.maximum(tl.maximum(one, two), tl.maximum(three, four)), mask=inside)


@triton.jit
def _unpool(x_ptr, g_ptr, y_ptr, total, height, width, channels, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    c, rest = at % channels, at // channels
    w, rest = rest % (width // 2), rest // (width // 2)
    h, n = rest % (height // 2), rest // (height // 2)
    corner = ((n * height + 2 * h) * width + 2 * w) * channels + c
    down = width * channels
    one = tl.load(x_ptr + corner, mask=inside, other=0.0)
    two = tl.load(x_ptr + corner + channels, mask=inside, other=0.0)
    three = tl.load(x_ptr + corner + down, mask=inside, other=0.0)
    four = tl.load(x_ptr + corner + down + channels, mask=inside, other=0.0)
    top = tl.maximum(tl.maximum(one, two), tl.maximum(three, four))
    g = tl.where(top > 0, tl.load(g_ptr + at, mask=inside, other=0.0), 0.0)
    # The first of the largest takes it all.
    first = one == top
    second = (two == top) & (first == 0)
    third = (three == top) & (first == 0) & (second == 0)
    fourth = (first == 0) & (second == 0) & (third == 0)
    tl.store(y_ptr + corner, tl.where(first, g, 0.0), mask=inside)
    tl.store(y_ptr + corner + channels, tl.where(second, g, 0.0), mask=inside)
    tl.store(y_ptr + corner + down, tl.where(third, g, 0.0), mask=inside)
    tl.store(y_ptr + corner + down + channels, tl.where(fourth, g, 0.0), mask=inside)


@triton.jit
def _sums(
    x_ptr,
    g_ptr,
    active_ptr,
    out_ptr,
    rows,
    channels,
    clients,
    steps,
    GRADIENT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Σ x and Σ x² of a part of the rows; with GRADIENT, Σ g and Σ g · x where `active` > 0."""
    column, client, part = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    c = column * BLOCK_C + tl.arange(0, BLOCK_C)
    used = c < channels
    one = tl.zeros((BLOCK_C,), dtype=tl.float32)
    two = tl.zeros((BLOCK_C,), dtype=tl.float32)
    for step in range(steps):
        m = (part * steps + step) * BLOCK_M + tl.arange(0, BLOCK_M)
        at = (client * rows + m)[:, None] * channels + c[None, :]
        inside = (m < rows)[:, None] & used[None, :]
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if GRADIENT:
            active = tl.load(active_ptr + at, mask=inside, other=0.0)
            g = tl.where(active > 0, tl.load(g_ptr + at, mask=inside, other=0.0).to(tl.float32), 0.0)
            one += tl.sum(g, axis=0)
            two += tl.sum(g * x, axis=0)
        else:
            one += tl.sum(x, axis=0)
            two += tl.sum(x * x, axis=0)
    at = ((part * clients + client) * 2) * channels + c
    tl.store(out_ptr + at, one, mask=used)
    tl.store(out_ptr + at + channels, two, mask=used)


@triton.jit
def _affine(
    x_ptr,
    g_ptr,
    active_ptr,
    a_ptr,
    b_ptr,
    c_ptr,
    y_ptr,
    rows,
    channels,
    total,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """max(0, b · x + c) for each channel; with GRADIENT, a · g + b · x + c where g is kept where `active` > 0."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    of = (at // (rows * channels)) * channels + at % channels
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(b_ptr + of, mask=inside, other=0.0) * x + tl.load(c_ptr + of, mask=inside, other=0.0)
    if GRADIENT:
        active = tl.load(active_ptr + at, mask=inside, other=0.0)
        g = tl.where(active > 0, tl.load(g_ptr + at, mask=inside, other=0.0).to(tl.float32), 0.0)
        y += tl.load(a_ptr + of, mask=inside, other=0.0) * g
    else:
        y = tl.maximum(y, 0.0)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


class TritonKernels:
    """The operations of `kernels.Kernels` on one GPU."""

    multiple = 16

    def convolve(self, x: Tensor, weight: Tensor, shift: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        clients, samples, height, width, inputs = x.shape
        outputs, rows = weight.shape[-1], samples * height * width
        y = x.new_empty((clients, samples, height, width, outputs))
        block_m, block_n, block_k, warps, stages = _tiles(rows, inputs, outputs, x.dtype)
        _convolve[(outputs // block_n, triton.cdiv(rows, block_m), clients)](
            x,
            weight,
            weight if shift is None else shift,
            weight if mask is None else mask,
            y,
            rows,
            height,
            width,
            inputs,
            outputs,
            shift is not None,
            mask is not None,
            _precision(x),
            block_m,
            block_n,
            block_k,
            num_warps=warps,
            num_stages=stages,
        )
        return y

    def weight_gradient(self, x: Tensor, gradient: Tensor) -> Tensor:
        clients, samples, height, width, inputs = x.shape
        outputs, rows = gradient.shape[-1], samples * height * width
        block_i, block_o = _divisor(inputs, 64), _divisor(outputs, 64 if x.dtype == torch.float32 else 128)
        tiles = (inputs // block_i) * (outputs // block_o)
        block_m = 32 if x.dtype == torch.float32 else 64
        # Enough parts to fill the device, and not so many that adding them takes longer than the product.
        parts = max(1, min(PARTS, triton.cdiv(1024, tiles * 9 * clients), triton.cdiv(rows, block_m)))
        steps = triton.cdiv(rows, block_m * parts)
        out = x.new_empty((parts, clients, 9, inputs, outputs), dtype=torch.float32)
        _weight_gradient[(tiles, 9, parts * clients)](
            x,
            gradient,
            out,
            rows,
            height,
            width,
            inputs,
            outputs,
            clients,
            steps,
            _precision(x),
            block_m,
            block_i,
            block_o,
            num_warps=4,
            num_stages=3,
        )
        return out[0] if parts == 1 else out.sum(dim=0)

    def pool(self, x: Tensor) -> Tensor:
        clients, samples, height, width, channels = x.shape
        y = x.new_empty((clients, samples, height // 2, width // 2, channels))
        _pool[(triton.cdiv(y.numel(), BLOCK),)](x, y, y.numel(), height, width, channels, BLOCK)
        return y

    def unpool(self, x: Tensor, gradient: Tensor) -> Tensor:
        _, _, height, width, channels = x.shape
        y, total = torch.empty_like(x), gradient.numel()
        _unpool[(triton.cdiv(total, BLOCK),)](x, gradient, y, total, height, width, channels, BLOCK)
        return y

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        one, two = self._row_sums(x, None, None)
        rows = x.shape[1:4].numel()
        mean = one / rows
        return mean, (two / rows - mean.square()).clamp_(min=0)

    def scale_shift_relu(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return self._per_channel(x, None, None, None, scale, shift)

    def norm_sums(self, gradient: Tensor, active: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return self._row_sums(x, gradient, active)

    def norm_gradient(self, gradient: Tensor, active: Tensor, x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return self._per_channel(x, gradient, active, a, b, c)

    def _row_sums(self, x: Tensor, gradient: Tensor | None, active: Tensor | None) -> tuple[Tensor, Tensor]:
        clients, channels, rows = x.shape[0], x.shape[-1], x.shape[1:4].numel()
        block_c = min(64, triton.next_power_of_2(channels))
        parts = max(1, min(PARTS, triton.cdiv(rows, ROWS)))
        steps = triton.cdiv(rows, ROWS * parts)
        out = x.new_empty((parts, clients, 2, channels), dtype=torch.float32)
        _sums[(triton.cdiv(channels, block_c), clients, parts)](
            x,
            x if gradient is None else gradient,
            x if active is None else active,
            out,
            rows,
            channels,
            clients,
            steps,
            gradient is not None,
            ROWS,
            block_c,
        )
        one, two = out.sum(dim=0).unbind(dim=1)
        return one, two

    def _per_channel(
        self, x: Tensor, gradient: Tensor | None, active: Tensor | None, a: Tensor | None, b: Tensor, c: Tensor
    ) -> Tensor:
        y, total = torch.empty_like(x), x.numel()
        _affine[(triton.cdiv(total, BLOCK),)](
            x,
            x if gradient is None else gradient,
            x if active is None else active,
            b if a is None else a.contiguous(),
            b.contiguous(),
            c.contiguous(),
            y,
            x.shape[1:4].numel(),
            x.shape[-1],
            total,
            gradient is not None,
            BLOCK,
        )
        return y


def _precision(x: Tensor) -> str:
    """Return how products of float32 are made: in three parts, which is as exact as float32 and uses tensor cores."""
    return "tf32x3" if x.dtype == torch.float32 else "tf32"


def _divisor(size: int, most: int) -> int:
    """Return the largest power of two, at most `most`, that divides a multiple of 16."""
    return min(most, size & -size)


def _tiles(rows: int, inputs: int, outputs: int, dtype: Any) -> tuple[int, int, int, int, int]:
    """Return tile sizes, warps and pipeline stages, as they were fastest on an H200."""
    if dtype == torch.float32:
        return 64, _divisor(outputs, 64), _divisor(inputs, 32), 4, 2
    block_n, block_k = _divisor(outputs, 128), _divisor(inputs, 64)
    if rows <= 512:  # few rows for each client: smaller tiles fill the device
        return 64, block_n, block_k, 4, 4
    return (128, block_n, block_k, 8, 3) if block_n >= 64 else (128, block_n, block_k, 4, 4)
