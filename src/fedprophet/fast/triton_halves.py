"""Products of float32 numbers on tensor cores, in Triton: each number is a pair of 16-bit halves. `halves` launches it.

A number x of a row whose largest magnitude is about 2^e is kept as

    x = 2^(e−14) · (h + 2^−11 · l)    with    h = half(2^(14−e) · x)    and    l = half(2^11 · (2^(14−e) · x − h)),

22 bits in all, and a product of two such numbers is three products of halves:

    x·y ≈ 2^(…) · (h_x·h_y + 2^−11 · (h_x·l_y + l_x·h_y)).

What is left out, 2^−22 · l_x·l_y, is as small as what float32 rounds off (Ootomo & Yokota, 2022). Every row has an
exponent of its own, so that a sample whose gradient is tiny keeps as many bits of it as any other. An infinite number
has no second half: what it reaches is no number, where torch's own may be infinite.
"""

import triton
import triton.language as tl

from fedprophet.fast.triton_launch import on_its_device

STEP = tl.constexpr(2048.0)
"""How much larger the first half is than the second."""
TOP = tl.constexpr(14)
"""The exponent that the largest number of a row is given: halves end below 2^16."""
INFINITY = tl.constexpr(float("inf"))


@triton.jit
def _values(x_ptr, active_ptr, factor_ptr, row, at, size, channels, MASK: tl.constexpr, FACTOR: tl.constexpr):
    """Some numbers of a row, times the factors of its channels; 0 where `active` is not above 0."""
    inside = at < size
    x = tl.load(x_ptr + row * size + at, mask=inside, other=0.0)
    if MASK:
        x = tl.where(tl.load(active_ptr + row * size + at, mask=inside, other=0.0) <= 0, 0.0, x)
    if FACTOR:
        x *= tl.load(factor_ptr + row * channels + at % channels, mask=inside, other=0.0)
    return x


@on_its_device
@triton.jit
def split(
    x_ptr,
    active_ptr,
    factor_ptr,
    high_ptr,
    low_ptr,
    scale_ptr,
    size,
    channels,
    MASK: tl.constexpr,
    FACTOR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row into its halves, and the power of two that they have to be multiplied by."""
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, size, BLOCK):
        x = _values(x_ptr, active_ptr, factor_ptr, row, first + at, size, channels, MASK, FACTOR)
        # What is infinite, or no number, must not push the others out of the range of halves.
        largest = tl.maximum(largest, tl.where(tl.abs(x) < INFINITY, tl.abs(x), 0.0))
    # The bits of a float32: 23 of the fraction, then the exponent plus 127.
    exponent = tl.maximum(tl.max(largest, axis=0).to(tl.int32, bitcast=True) >> 23, TOP + 1)
    up = ((254 - exponent + TOP) << 23).to(tl.float32, bitcast=True)
    tl.store(scale_ptr + row, ((exponent - TOP) << 23).to(tl.float32, bitcast=True))
    for first in range(0, size, BLOCK):
        inside, to = first + at < size, row * size + first + at
        x = _values(x_ptr, active_ptr, factor_ptr, row, first + at, size, channels, MASK, FACTOR) * up
        high = x.to(tl.float16)
        tl.store(high_ptr + to, high, mask=inside)
        tl.store(low_ptr + to, ((x - high.to(tl.float32)) * STEP).to(tl.float16), mask=inside)


@on_its_device
@triton.jit(do_not_specialize=["samples"])
def convolve(
    x_high,
    x_low,
    w_high,
    w_low,
    x_scale_ptr,
    w_scale_ptr,
    factor_ptr,
    shift_ptr,
    y_ptr,
    samples,
    height,
    width,
    inputs,
    outputs,
    FACTOR: tl.constexpr,
    SHIFT: tl.constexpr,
    RELU: tl.constexpr,
    TURNED: tl.constexpr,
    IMAGES: tl.constexpr,
    LINES: tl.constexpr,
    WIDTH: tl.constexpr,
    FITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A 3×3 convolution in tiles that the copy engine fetches, as `triton_convolutions.convolve_blocks`.

    Without FITS a tile may also be a part of a line, so that images are of any width.
    With FACTOR and SHIFT the result is multiplied and added to, by numbers of each sample's channels or, if there is a
    SHIFT alone, of the channels. Tensor cores cut off what they add, always towards 0: so they add up BLOCK_K products
    of first halves at most, and the sum of these sums is rounded as float32 numbers are.
    """
    tile = tl.program_id(0)
    column, row = tile % (outputs // BLOCK_N), tile // (outputs // BLOCK_N)
    BLOCK_M: tl.constexpr = IMAGES * LINES * WIDTH
    down = tl.cdiv(height, LINES)
    if FITS:
        left = 0
    else:
        parts = tl.cdiv(width, WIDTH)
        left, row = (row % parts) * WIDTH, row // parts
    image, line = (row // down) * IMAGES, (row % down) * LINES
    n = column * BLOCK_N
    steps = inputs // BLOCK_K
    w_scale = tl.load(w_scale_ptr)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    rest = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(9 * steps):
        tap = step // steps
        channel = (step % steps) * BLOCK_K
        place = [image, line + tap // 3 - 1, left + tap % 3 - 1, channel]
        a = x_high.load(place).reshape(BLOCK_M, BLOCK_K)
        a_low = x_low.load(place).reshape(BLOCK_M, BLOCK_K)
        if TURNED:
            b = w_high.load([(8 - tap) * outputs + n, channel]).T
            b_low = w_low.load([(8 - tap) * outputs + n, channel]).T
        else:
            b = w_high.load([tap * inputs + channel, n])
            b_low = w_low.load([tap * inputs + channel, n])
        # The factor keeps the compiler from adding up in the tensor cores; as a power of two it rounds nothing.
        total += tl.dot(a, b) * w_scale
        rest = tl.dot(a, b_low, rest)
        rest = tl.dot(a_low, b, rest)
    columns = n + tl.arange(0, BLOCK_N)
    r = tl.arange(0, BLOCK_M)
    sample = image + r // (LINES * WIDTH)
    inside = sample < samples
    if FITS:
        m = (image.to(tl.int64) * height + line) * width + r
    else:
        h, w = line + (r // WIDTH) % LINES, left + r % WIDTH
        inside = inside & (h < height) & (w < width)
        m = (sample.to(tl.int64) * height + h) * width + w
    scale = tl.load(x_scale_ptr + sample, mask=inside, other=0.0)
    y = (total + rest * (w_scale / STEP)) * scale[:, None]
    of = sample[:, None] * outputs + columns[None, :]
    if FACTOR:
        y = y * tl.load(factor_ptr + of, mask=inside[:, None], other=0.0)
        y += tl.load(shift_ptr + of, mask=inside[:, None], other=0.0)
    elif SHIFT:
        y += tl.load(shift_ptr + columns)[None, :]
    if RELU:
        y = tl.where(y <= 0, 0.0, y)  # a maximum would hide what is no number
    tl.store(y_ptr + m[:, None] * outputs + columns[None, :], y, mask=inside[:, None])
