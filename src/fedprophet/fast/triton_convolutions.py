"""Convolutions on a GPU, in Triton: one launch for all clients, bf16 or float32, float32 sums. `gpu` launches them.

A 3×3 convolution is an implicit matrix product: the nine taps and the input channels are one long sum, and images are
never unfolded. Clients are a dimension of a grid; tiles are its first one, which alone may be long.
"""

import triton
import triton.language as tl

from fedprophet.fast.triton_launch import on_its_device


@on_its_device
@triton.jit(do_not_specialize=["rows"])
def convolve(
    x_ptr,
    w_ptr,
    add_ptr,
    shift_ptr,
    mask_ptr,
    y_ptr,
    rows,
    height,
    width,
    inputs,
    outputs,
    ADD: tl.constexpr,
    SHIFT: tl.constexpr,
    MASK: tl.constexpr,
    TURNED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Any device, any size: every thread computes the addresses of what it reads."""
    tile, client = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column, row = tile % (outputs // BLOCK_N), tile // (outputs // BLOCK_N)
    m = row * BLOCK_M + tl.arange(0, BLOCK_M)
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    inside = m < rows
    position = m % (height * width)
    h, w = position // width, position % width
    x_at = x_ptr + client * rows * inputs + (m.to(tl.int64) * inputs)[:, None] + k[None, :]
    w_base = w_ptr + client * 9 * inputs * outputs
    if TURNED:
        w_at = w_base + n[None, :] * inputs + k[:, None]
    else:
        w_at = w_base + k[:, None] * outputs + n[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    tap = 0
    channel = 0
    for _ in range(9 * inputs // BLOCK_K):
        dh, dw = tap // 3 - 1, tap % 3 - 1
        valid = (h + dh >= 0) & (h + dh < height) & (w + dw >= 0) & (w + dw < width) & inside
        a = tl.load(x_at + ((dh * width + dw) * inputs + channel), mask=valid[:, None], other=0.0)
        if TURNED:
            b = tl.load(w_at + ((8 - tap) * inputs * outputs + channel))
        else:
            b = tl.load(w_at + (tap * inputs + channel) * outputs)
        total = tl.dot(a, b, total, input_precision=PRECISION)
        channel += BLOCK_K
        next_tap = channel >= inputs
        tap = tl.where(next_tap, tap + 1, tap)
        channel = tl.where(next_tap, 0, channel)
    at = (client * rows + m)[:, None] * outputs + n[None, :]
    if ADD:
        total += tl.load(add_ptr + at, mask=inside[:, None], other=0.0).to(tl.float32)
    if SHIFT:
        total = tl.maximum(total + tl.load(shift_ptr + client * outputs + n)[None, :], 0.0)
    if MASK:
        total = tl.where(tl.load(mask_ptr + at, mask=inside[:, None], other=0.0) > 0, total, 0.0)
    tl.store(y_ptr + at, total.to(y_ptr.dtype.element_ty), mask=inside[:, None])


@on_its_device
@triton.jit(do_not_specialize=["rows"])
def convolve_few(
    x_ptr,
    w_ptr,
    shift_ptr,
    y_ptr,
    rows,
    height,
    width,
    padded,
    outputs,
    CHANNELS: tl.constexpr,
    SHIFT: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Images of few channels: all nine taps are one short sum, gathered number by number."""
    tile, client = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column, row = tile % (outputs // BLOCK_N), tile // (outputs // BLOCK_N)
    m = row * BLOCK_M + tl.arange(0, BLOCK_M)
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    tap, channel, used = k // CHANNELS, k % CHANNELS, k < 9 * CHANNELS
    inside = m < rows
    position = m % (height * width)
    h = (position // width)[:, None] + (tap // 3 - 1)[None, :]
    w = (position % width)[:, None] + (tap % 3 - 1)[None, :]
    valid = (h >= 0) & (h < height) & (w >= 0) & (w < width) & inside[:, None] & used[None, :]
    moved = ((tap // 3 - 1) * width + tap % 3 - 1) * padded + channel
    x_at = x_ptr + client * rows * padded + (m.to(tl.int64) * padded)[:, None] + moved[None, :]
    a = tl.load(x_at, mask=valid, other=0.0)
    w_at = w_ptr + (client * 9 * padded + tap * padded + channel)[:, None] * outputs + n[None, :]
    b = tl.load(w_at, mask=used[:, None], other=0.0)
    total = tl.dot(a, b, input_precision=PRECISION)
    if SHIFT:
        total = tl.maximum(total + tl.load(shift_ptr + client * outputs + n)[None, :], 0.0)
    at = (client * rows + m)[:, None] * outputs + n[None, :]
    tl.store(y_ptr + at, total.to(y_ptr.dtype.element_ty), mask=inside[:, None])


@on_its_device
@triton.jit(do_not_specialize=["samples"])
def convolve_blocks(
    x_blocks,
    w_blocks,
    add_ptr,
    shift_ptr,
    mask_ptr,
    y_ptr,
    samples,
    height,
    width,
    inputs,
    outputs,
    ADD: tl.constexpr,
    SHIFT: tl.constexpr,
    MASK: tl.constexpr,
    TURNED: tl.constexpr,
    IMAGES: tl.constexpr,
    LINES: tl.constexpr,
    WIDTH: tl.constexpr,
    FITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A tile is some lines of one image, or several whole images; the copy engine fetches it, moved by each tap.

    FITS: images are as wide as a tile and whole tiles high. Else tiles reach beyond them, where nothing is written.
    """
    tile, client = tl.program_id(0), tl.program_id(1)
    column, row = tile % (outputs // BLOCK_N), tile // (outputs // BLOCK_N)
    BLOCK_M: tl.constexpr = IMAGES * LINES * WIDTH
    across = tl.cdiv(height, LINES)
    image, line = (row // across) * IMAGES, (row % across) * LINES
    first = client * samples + image
    n = column * BLOCK_N
    steps = inputs // BLOCK_K
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(9 * steps):
        tap = step // steps
        channel = (step % steps) * BLOCK_K
        a = x_blocks.load([first, line + tap // 3 - 1, tap % 3 - 1, channel]).reshape(BLOCK_M, BLOCK_K)
        if TURNED:
            b = w_blocks.load([(client * 9 + 8 - tap) * outputs + n, channel]).T
        else:
            b = w_blocks.load([(client * 9 + tap) * inputs + channel, n])
        total = tl.dot(a, b, total)
    columns = n + tl.arange(0, BLOCK_N)
    r = tl.arange(0, BLOCK_M)
    # The last tile of a client may reach into the next one's images.
    inside = image + r // (LINES * WIDTH) < samples
    if FITS:
        m = ((client.to(tl.int64) * samples + image) * height + line) * width + r
    else:
        h, w = line + (r // WIDTH) % LINES, r % WIDTH
        inside = inside & (h < height) & (w < width)
        m = ((client.to(tl.int64) * samples + image + r // (LINES * WIDTH)) * height + h) * width + w
    at = m[:, None] * outputs + columns[None, :]
    if ADD:
        total += tl.load(add_ptr + at, mask=inside[:, None], other=0.0).to(tl.float32)
    if SHIFT:
        total = tl.maximum(total + tl.load(shift_ptr + client * outputs + columns)[None, :], 0.0)
    if MASK:
        total = tl.where(tl.load(mask_ptr + at, mask=inside[:, None], other=0.0) > 0, total, 0.0)
    tl.store(y_ptr + at, total.to(y_ptr.dtype.element_ty), mask=inside[:, None])


@on_its_device
@triton.jit
def finish(
    x_ptr,
    shift_ptr,
    mask_ptr,
    y_ptr,
    rows,
    channels,
    total,
    SHIFT: tl.constexpr,
    MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What the convolutions above end with, for those that are made as products."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    y = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if SHIFT:
        of = (at // (rows * channels)) * channels + at % channels
        y = tl.maximum(y + tl.load(shift_ptr + of, mask=inside, other=0.0), 0.0)
    if MASK:
        y = tl.where(tl.load(mask_ptr + at, mask=inside, other=0.0) > 0, y, 0.0)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@on_its_device
@triton.jit(do_not_specialize=["rows", "clients", "steps"])
def weight_gradient(
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
