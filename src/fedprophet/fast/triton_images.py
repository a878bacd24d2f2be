"""What lies between convolutions, in Triton: pools, exits, and the attack's steps on images. `gpu` launches it."""

import triton
import triton.language as tl

from fedprophet.fast.triton_launch import on_its_device


@on_its_device
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


@on_its_device
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


@on_its_device
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


@on_its_device
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


@on_its_device
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


@on_its_device
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


@on_its_device
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


@on_its_device
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
