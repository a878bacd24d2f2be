"""What a GPU runs, in Triton: one launch for all clients, bf16 or float32, float32 sums. `gpu` launches it.

A 3×3 convolution is an implicit matrix product: the nine taps and the input channels are one long sum, and images are
never unfolded. Clients are a dimension of a grid; tiles and samples are its first one, which alone may be long.
"""

import triton
import triton.language as tl


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


@triton.jit
def pool(x_ptr, y_ptr, winner_ptr, total, height, width, channels, SIDE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    c, rest = at % channels, at // channels
    w, rest = rest % (width // 2), rest // (width // 2)
    h, n = rest % (height // 2), rest // (height // 2)
    top = tl.zeros((BLOCK,), dtype=x_ptr.dtype.element_ty)
    winner = tl.full((BLOCK,), SIDE * SIDE, dtype=tl.int32)
    for place in tl.static_range(SIDE * SIDE):
        line, column = 2 * h + place // SIDE - (SIDE - 2), 2 * w + place % SIDE - (SIDE - 2)
        there = inside
        if SIDE > 2:
            there = inside & (line >= 0) & (column >= 0)
        value = tl.load(x_ptr + ((n * height + line) * width + column) * channels + c, mask=there, other=0.0)
        # The first of the largest takes the gradient, unless the ReLU before gave nothing.
        winner = tl.where(value > top, place, winner)
        top = tl.maximum(top, value)
    tl.store(y_ptr + at, top, mask=inside)
    tl.store(winner_ptr + at, winner.to(tl.uint8), mask=inside)


@triton.jit
def unpool(winner_ptr, g_ptr, y_ptr, total, height, width, channels, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    c, rest = at % channels, at // channels
    w, rest = rest % (width // 2), rest // (width // 2)
    h, n = rest % (height // 2), rest // (height // 2)
    corner = y_ptr + ((n * height + 2 * h) * width + 2 * w) * channels + c
    down = width * channels
    winner = tl.load(winner_ptr + at, mask=inside, other=4)
    g = tl.load(g_ptr + at, mask=inside, other=0.0)
    tl.store(corner, tl.where(winner == 0, g, 0.0), mask=inside)
    tl.store(corner + channels, tl.where(winner == 1, g, 0.0), mask=inside)
    tl.store(corner + down, tl.where(winner == 2, g, 0.0), mask=inside)
    tl.store(corner + down + channels, tl.where(winner == 3, g, 0.0), mask=inside)


@triton.jit
def unpool_overlapping(winner_ptr, g_ptr, y_ptr, total, height, width, channels, BLOCK: tl.constexpr):
    """The windows are 3×3: a position adds up what the one, two or four windows send that it may have won."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    c, rest = at % channels, at // channels
    w, rest = rest % width, rest // width
    h, n = rest % height, rest // height
    y = tl.zeros((BLOCK,), dtype=tl.float32)
    for place in tl.static_range(9):
        # Window i begins at 2 i − 1.
        line, column = h + 1 - place // 3, w + 1 - place % 3
        sends = inside & (line % 2 == 0) & (column % 2 == 0) & (line < height) & (column < width)
        window = ((n * (height // 2) + line // 2) * (width // 2) + column // 2) * channels + c
        winner = tl.load(winner_ptr + window, mask=sends, other=9)
        y += tl.load(g_ptr + window, mask=sends & (winner == place), other=0.0).to(tl.float32)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def average(x_ptr, y_ptr, height, width, channels, side, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr):
    """The mean over one part of one image."""
    part, column = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lines, across = height // side, width // side
    sample, place = part // (side * side), part % (side * side)
    corner = (sample * height + (place // side) * lines) * width + (place % side) * across
    c = column * BLOCK_C + tl.arange(0, BLOCK_C)
    total = tl.zeros((BLOCK_C,), dtype=tl.float32)
    for start in range(0, lines * across, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)
        at = (corner + (p // across) * width + p % across)[:, None] * channels + c[None, :]
        real = (p < lines * across)[:, None] & (c < channels)[None, :]
        total += tl.sum(tl.load(x_ptr + at, mask=real, other=0.0).to(tl.float32), axis=0)
    mean = total / (lines * across)
    tl.store(y_ptr + part * channels + c, mean.to(y_ptr.dtype.element_ty), mask=c < channels)


@triton.jit
def average_gradient(
    g_ptr,
    x_ptr,
    y_ptr,
    total,
    height,
    width,
    channels,
    side,
    weight,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    c, rest = at % channels, at // channels
    w, rest = rest % width, rest // width
    h, n = rest % height, rest // height
    lines, across = height // side, width // side
    part = (n * side + h // lines) * side + w // across
    g = tl.load(g_ptr + part * channels + c, mask=inside, other=0.0).to(tl.float32) / (lines * across)
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    y = g + weight * x
    if MASKED:
        y = tl.where(x > 0, y, 0.0)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["samples"])
def head_gradient(
    x_ptr,
    w_ptr,
    b_ptr,
    t_ptr,
    y_ptr,
    samples,
    positions,
    channels,
    classes,
    weight,
    MASKED: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    CLASSES: tl.constexpr,
):
    """One sample: its mean over positions, the scores, how wrong they are, and that taken back to all positions."""
    client = tl.program_id(1).to(tl.int64)
    sample = client * samples + tl.program_id(0)
    k, p = tl.arange(0, CLASSES), tl.arange(0, BLOCK_P)
    known = k < classes
    w_at = w_ptr + client * channels * classes + k[None, :]
    scores = tl.load(b_ptr + client * classes + k, mask=known, other=0.0).to(tl.float32)
    for first in range(0, channels, BLOCK_C):
        c = first + tl.arange(0, BLOCK_C)
        total = tl.zeros((BLOCK_C,), dtype=tl.float32)
        for start in range(0, positions, BLOCK_P):
            real = (start + p < positions)[:, None] & (c < channels)[None, :]
            at = (sample * positions + start + p)[:, None] * channels + c[None, :]
            total += tl.sum(tl.load(x_ptr + at, mask=real, other=0.0).to(tl.float32), axis=0)
        used = (c < channels)[:, None] & known[None, :]
        w = tl.load(w_at + c[:, None] * classes, mask=used, other=0.0).to(tl.float32)
        scores += tl.sum((total / positions)[:, None] * w, axis=0)
    scores = tl.where(known, scores, float("-inf"))
    odds = tl.exp(scores - tl.max(scores, axis=0))
    wrong = odds / tl.sum(odds, axis=0) - tl.load(t_ptr + sample * classes + k, mask=known, other=0.0)
    for first in range(0, channels, BLOCK_C):
        c = first + tl.arange(0, BLOCK_C)
        used = (c < channels)[:, None] & known[None, :]
        w = tl.load(w_at + c[:, None] * classes, mask=used, other=0.0).to(tl.float32)
        g = (tl.sum(w * wrong[None, :], axis=1) / positions)[None, :]
        for start in range(0, positions, BLOCK_P):
            real = (start + p < positions)[:, None] & (c < channels)[None, :]
            at = (sample * positions + start + p)[:, None] * channels + c[None, :]
            x = tl.load(x_ptr + at, mask=real, other=0.0).to(tl.float32)
            y = g + weight * x
            if MASKED:
                y = tl.where(x > 0, y, 0.0)
            tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=real)


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


@triton.jit
def sample_sums(
    x_ptr, clean_ptr, g_ptr, std_ptr, out_ptr, size, channels, padded, parts, BLOCK: tl.constexpr, STEPS: tl.constexpr
):
    """Of a part of one sample: Σ g², Σ δ g and Σ δ², where δ is how far it is from the clean one."""
    sample, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    gg = tl.zeros((BLOCK,), dtype=tl.float32)
    dg = tl.zeros((BLOCK,), dtype=tl.float32)
    dd = tl.zeros((BLOCK,), dtype=tl.float32)
    for step in range(STEPS):
        at = (part * STEPS + step) * BLOCK + tl.arange(0, BLOCK)
        inside = at < size
        c = at % channels
        g = tl.load(g_ptr + (sample * (size // channels) + at // channels) * padded + c, mask=inside, other=0.0)
        g = g.to(tl.float32) / tl.load(std_ptr + c, mask=inside, other=1.0)
        x = tl.load(x_ptr + sample * size + at, mask=inside, other=0.0)
        d = x - tl.load(clean_ptr + sample * size + at, mask=inside, other=0.0)
        gg += g * g
        dg += d * g
        dd += d * d
    at = out_ptr + (sample * parts + part) * 3
    tl.store(at, tl.sum(gg, axis=0))
    tl.store(at + 1, tl.sum(dg, axis=0))
    tl.store(at + 2, tl.sum(dd, axis=0))


@triton.jit
def ascend(
    x_ptr,
    clean_ptr,
    g_ptr,
    mean_ptr,
    std_ptr,
    radius_ptr,
    step_ptr,
    sums_ptr,
    z_ptr,
    positions,
    height,
    width,
    channels,
    padded,
    spread,
    low,
    high,
    L2: tl.constexpr,
    SPREAD: tl.constexpr,
    PARTS: tl.constexpr,
    TINY: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One step of PGD for each position and channel; what `z` is padded with is left alone."""
    position = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    real = (position < positions)[:, None] & (c < channels)[None, :]
    wide = position.to(tl.int64)
    of = wide[:, None] * channels + c[None, :]
    if SPREAD:
        # What each tap sent is gathered from the neighbour that it came from.
        g = tl.zeros((BLOCK_P, BLOCK_C), dtype=tl.float32)
        here = position % (height * width)
        h, w = here // width, here % width
        for tap in tl.static_range(9):
            dh, dw = tap // 3 - 1, tap % 3 - 1
            valid = (h - dh >= 0) & (h - dh < height) & (w - dw >= 0) & (w - dw < width)
            at = (wide - (dh * width + dw))[:, None] * spread + (tap * channels + c)[None, :]
            g += tl.load(g_ptr + at, mask=real & valid[:, None], other=0.0).to(tl.float32)
    else:
        g = tl.load(g_ptr + wide[:, None] * padded + c[None, :], mask=real, other=0.0).to(tl.float32)
    clean = tl.load(clean_ptr + of, mask=real, other=0.0)
    std = tl.load(std_ptr + c, mask=c < channels, other=1.0)[None, :]
    mean = tl.load(mean_ptr + c, mask=c < channels, other=0.0)[None, :]
    delta = tl.load(x_ptr + of, mask=real, other=0.0) - clean
    radius, step = tl.load(radius_ptr), tl.load(step_ptr)
    if L2:
        sample = sums_ptr + (wide // (height * width)) * (PARTS * 3)
        known = position < positions
        gg = tl.zeros((BLOCK_P,), dtype=tl.float32)
        dg = tl.zeros((BLOCK_P,), dtype=tl.float32)
        dd = tl.zeros((BLOCK_P,), dtype=tl.float32)
        for part in tl.static_range(PARTS):
            gg += tl.load(sample + part * 3, mask=known, other=0.0)
            dg += tl.load(sample + part * 3 + 1, mask=known, other=0.0)
            dd += tl.load(sample + part * 3 + 2, mask=known, other=0.0)
        # ‖δ + a g‖² = ‖δ‖² + 2 a δ·g + a² ‖g‖²
        along = step / (tl.sqrt(gg) + TINY)
        length = tl.sqrt(tl.maximum(dd + 2 * along * dg + along * along * gg, 0.0))
        shrunk = tl.minimum(radius / (length + TINY), 1.0)
        delta = (delta + along[:, None] * (g / std)) * shrunk[:, None]
    else:
        sign = tl.where(g > 0, 1.0, tl.where(g < 0, -1.0, 0.0))
        delta = tl.minimum(tl.maximum(delta + step * sign, -radius), radius)
    x = tl.minimum(tl.maximum(clean + delta, low), high)
    tl.store(x_ptr + of, x, mask=real)
    z = (x - mean) / std
    tl.store(z_ptr + wide[:, None] * padded + c[None, :], z.to(z_ptr.dtype.element_ty), mask=real)
