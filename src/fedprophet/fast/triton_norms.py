"""Norm layers on a GPU, in Triton: sums over rows, what a layer makes of them, its way back. `gpu` launches them."""

import triton
import triton.language as tl

from fedprophet.fast.triton_launch import on_its_device


@on_its_device
@triton.jit(do_not_specialize=["rows", "clients", "steps"])
def sums(
    x_ptr,
    g_ptr,
    active_ptr,
    mean_ptr,
    out_ptr,
    rows,
    channels,
    clients,
    steps,
    GRADIENT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Σ d and Σ d² of a part of the rows, and their centre; with GRADIENT, Σ g and Σ g · d where `active` > 0.

    d is how far a number is from the mean of its channel's first rows, with GRADIENT from the mean of all: sums of
    numbers that are far from 0 and close to each other would leave little of their differences.
    """
    column, client, part = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    c = column * BLOCK_C + tl.arange(0, BLOCK_C)
    used = c < channels
    if GRADIENT:
        center = tl.load(mean_ptr + client * channels + c, mask=used, other=0.0)
    else:
        m = tl.arange(0, BLOCK_M)
        at = (client * rows + m)[:, None] * channels + c[None, :]
        first = tl.load(x_ptr + at, mask=(m < rows)[:, None] & used[None, :], other=0.0).to(tl.float32)
        center = tl.sum(first, axis=0) / tl.minimum(rows, BLOCK_M)
    one = tl.zeros((BLOCK_C,), dtype=tl.float32)
    two = tl.zeros((BLOCK_C,), dtype=tl.float32)
    for step in range(steps):
        m = (part * steps + step) * BLOCK_M + tl.arange(0, BLOCK_M)
        at = (client * rows + m)[:, None] * channels + c[None, :]
        inside = (m < rows)[:, None] & used[None, :]
        d = tl.where(inside, tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32) - center[None, :], 0.0)
        if GRADIENT:
            active = tl.load(active_ptr + at, mask=inside, other=0.0)
            g = tl.where(active > 0, tl.load(g_ptr + at, mask=inside, other=0.0).to(tl.float32), 0.0)
            one += tl.sum(g, axis=0)
            two += tl.sum(g * d, axis=0)
        else:
            one += tl.sum(d, axis=0)
            two += tl.sum(d * d, axis=0)
    at = ((part * clients + client) * 3) * channels + c
    tl.store(out_ptr + at, one, mask=used)
    tl.store(out_ptr + at + channels, two, mask=used)
    tl.store(out_ptr + at + 2 * channels, center, mask=used)


@triton.jit
def _added(sums_ptr, client, c, channels, clients, parts, BLOCK_P: tl.constexpr):
    """Return both sums that `sums` wrote, for some channels of one client, its parts added."""
    p = tl.arange(0, BLOCK_P)
    at = ((p * clients + client) * 3)[:, None] * channels + c[None, :]
    real = (p < parts)[:, None] & (c < channels)[None, :]
    one = tl.sum(tl.load(sums_ptr + at, mask=real, other=0.0), axis=0)
    two = tl.sum(tl.load(sums_ptr + at + channels, mask=real, other=0.0), axis=0)
    return one, two


@on_its_device
@triton.jit(do_not_specialize=["rows", "clients", "parts"])
def norm_statistics(
    sums_ptr,
    weight_ptr,
    bias_ptr,
    before_ptr,
    running_mean_ptr,
    running_var_ptr,
    out_ptr,
    rows,
    channels,
    clients,
    parts,
    epsilon,
    momentum,
    unbiased,
    BEFORE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Mean, inverse, scale and shift of a norm layer, given Σ d and Σ d² of `sums`; the running statistics follow."""
    column, client = tl.program_id(0), tl.program_id(1).to(tl.int64)
    c = column * BLOCK_C + tl.arange(0, BLOCK_C)
    used, of, size = c < channels, client * channels + c, clients * channels
    one, two = _added(sums_ptr, client, c, channels, clients, parts, BLOCK_P)
    moved = one / rows
    mean = tl.load(sums_ptr + (client * 3 + 2) * channels + c, mask=used, other=0.0) + moved
    # Not below 0 by more than rounding, which epsilon is for: what moves the centre is part of the variance.
    variance = two / rows - moved * moved
    inverse = tl.rsqrt(variance + epsilon)
    scale = tl.load(weight_ptr + of, mask=used, other=0.0) * inverse
    shift = tl.load(bias_ptr + of, mask=used, other=0.0) - mean * scale
    tl.store(out_ptr + of, mean, mask=used)
    tl.store(out_ptr + size + of, inverse, mask=used)
    tl.store(out_ptr + 2 * size + of, scale, mask=used)
    tl.store(out_ptr + 3 * size + of, shift, mask=used)
    whole = mean
    if BEFORE:
        whole += tl.load(before_ptr + of, mask=used, other=0.0)
    old = tl.load(running_mean_ptr + of, mask=used, other=0.0)
    tl.store(running_mean_ptr + of, old + momentum * (whole - old), mask=used)
    old = tl.load(running_var_ptr + of, mask=used, other=0.0)
    tl.store(running_var_ptr + of, old + momentum * (variance * unbiased - old), mask=used)


@on_its_device
@triton.jit(do_not_specialize=["rows", "clients", "parts"])
def norm_slopes(
    sums_ptr,
    mean_ptr,
    inverse_ptr,
    scale_ptr,
    out_ptr,
    rows,
    channels,
    clients,
    parts,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """The gradients of a norm layer's bias and weight, and b and c of its input's, given Σ g and Σ g · d of `sums`."""
    column, client = tl.program_id(0), tl.program_id(1).to(tl.int64)
    c = column * BLOCK_C + tl.arange(0, BLOCK_C)
    used, of, size = c < channels, client * channels + c, clients * channels
    total, product = _added(sums_ptr, client, c, channels, clients, parts, BLOCK_P)
    mean = tl.load(mean_ptr + of, mask=used, other=0.0)
    inverse = tl.load(inverse_ptr + of, mask=used, other=0.0)
    scale = tl.load(scale_ptr + of, mask=used, other=0.0)
    slope = product * inverse
    by_x = -scale * inverse * slope / rows
    tl.store(out_ptr + of, total, mask=used)
    tl.store(out_ptr + size + of, slope, mask=used)
    tl.store(out_ptr + 2 * size + of, by_x, mask=used)
    tl.store(out_ptr + 3 * size + of, -scale * total / rows - by_x * mean, mask=used)


@on_its_device
@triton.jit
def fold(
    weight_ptr,
    scale_ptr,
    bias_ptr,
    before_ptr,
    mean_ptr,
    variance_ptr,
    out_ptr,
    shift_ptr,
    apart,
    rows,
    channels,
    epsilon,
    BEFORE: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """A convolution times its norm layer's scale; the first of its tiles also writes, or with ADD adds, the shift.

    The clients' convolutions lie `apart` numbers from each other, 0 where they share one.
    """
    row, column, client = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    m = row * BLOCK_M + tl.arange(0, BLOCK_M)
    c = column * BLOCK_C + tl.arange(0, BLOCK_C)
    used, of = c < channels, client * channels + c
    variance = tl.load(variance_ptr + of, mask=used, other=1.0)
    scale = tl.load(scale_ptr + of, mask=used, other=0.0) * tl.rsqrt(variance + epsilon)
    at = m[:, None] * channels + c[None, :]
    inside = (m < rows)[:, None] & used[None, :]
    weight = tl.load(weight_ptr + client * apart + at, mask=inside, other=0.0) * scale[None, :]
    tl.store(out_ptr + client * rows * channels + at, weight.to(out_ptr.dtype.element_ty), mask=inside)
    writes = used & (row == 0)
    offset = -tl.load(mean_ptr + of, mask=writes, other=0.0)
    if BEFORE:
        offset += tl.load(before_ptr + of, mask=writes, other=0.0)
    shift = tl.load(bias_ptr + of, mask=writes, other=0.0) + scale * offset
    if ADD:
        shift += tl.load(shift_ptr + of, mask=writes, other=0.0)
    tl.store(shift_ptr + of, shift, mask=writes)


@on_its_device
@triton.jit
def affine(
    x_ptr,
    g_ptr,
    active_ptr,
    a_ptr,
    b_ptr,
    c_ptr,
    add_ptr,
    y_ptr,
    rows,
    channels,
    total,
    GRADIENT: tl.constexpr,
    ADD: tl.constexpr,
    RELU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """b · x + c for each channel, with ADD and RELU what they say; with GRADIENT also a · g, where `active` > 0."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    of = (at // (rows * channels)) * channels + at % channels
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(b_ptr + of, mask=inside, other=0.0) * x + tl.load(c_ptr + of, mask=inside, other=0.0)
    if GRADIENT:
        active = tl.load(active_ptr + at, mask=inside, other=0.0)
        g = tl.where(active > 0, tl.load(g_ptr + at, mask=inside, other=0.0).to(tl.float32), 0.0)
        y += tl.load(a_ptr + of, mask=inside, other=0.0) * g
    if ADD:
        y += tl.load(add_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if RELU:
        y = tl.maximum(y, 0.0)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)
