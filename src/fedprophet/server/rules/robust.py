"""What the rules share that limit bad clients: clipped updates, and means of the middle values."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedprophet.server.rules.registry import Parameters, Update

MAJORITY = 3
"""Among this many values, one can be outvoted by the others."""


@dataclass(frozen=True)
class Sent:
    """What one client sent of a parameter: its weight, what clipping scales its update by, and the value in float64."""

    weight: float
    scale: float
    value: Tensor


def join_each(
    current: Parameters,
    updates: Iterable[Update],
    join: Callable[[Tensor, Sequence[Sent]], Tensor],
    largest: float = 0.0,
) -> dict[str, Tensor]:
    """Join parameter by parameter, updates clipped to the norm `largest` (0: their median norm, the lower of two).

    Whole numbers, which count batches, get their median under every rule.
    """
    updates = list(updates)
    scales = _scales(current, updates, largest)
    joined = dict(current)
    for name in dict.fromkeys(name for _, parameters in updates for name in parameters):
        values = [(weight, s, p[name]) for (weight, p), s in zip(updates, scales, strict=True) if name in p]
        like = values[0][2]
        sent = [Sent(weight, scale, value.detach().to(like.device, torch.float64)) for weight, scale, value in values]
        known = current[name].detach().to(like.device) if name in current else torch.zeros_like(like)
        found = join(known.double(), sent) if known.is_floating_point() else _trimmed_mean(sent, middle)
        # A coordinate that nobody sent is 0/0.
        joined[name] = torch.where(torch.isnan(found), known, found.to(known.dtype))
    return joined


def _scales(current: Parameters, updates: Sequence[Update], largest: float) -> list[float]:
    """Return min(1, c / ‖Δ_k‖) of each update."""
    norms = [_norm(current, parameters) for _, parameters in updates]
    bound = largest or statistics.median_low(norms or [0.0])
    return [min(1.0, bound / norm) if norm > 0 else 1.0 for norm in norms]


def _norm(current: Parameters, parameters: Parameters) -> float:
    squares = 0.0
    for name, value in parameters.items():
        if value.is_floating_point():
            sent = value.detach().to(torch.float64)
            difference = sent - current[name].detach().to(sent.device) if name in current else sent
            squares += float(torch.nan_to_num(difference, nan=0.0).square().sum())
    return math.sqrt(squares)


def clipped_mean(base: Tensor, sent: Sequence[Sent]) -> Tensor:
    """Return the weighted mean of the scaled updates; what is not scaled enters as it was sent, without rounding."""
    total = weights = torch.zeros_like(base)
    for one in sent:
        moved = one.value if one.scale == 1 else base + one.scale * (one.value - base)
        there = ~torch.isnan(one.value)
        total = total + torch.where(there, moved * one.weight, 0.0)
        weights = weights + there.to(base.dtype) * one.weight
    return total / weights


def voted_mean(base: Tensor, sent: Sequence[Sent], cut: Callable[[int], int]) -> Tensor:
    """Return each coordinate's mean without the `cut(n)` smallest and largest of n values; of few, the clipped mean."""
    voted = _trimmed_mean(sent, cut)
    count = sum((~torch.isnan(one.value)).long() for one in sent)
    few = torch.as_tensor(count < MAJORITY)
    return torch.where(few, clipped_mean(base, sent), voted) if bool(few.any()) else voted


def middle(senders: int) -> int:
    """Return how many values to leave out at each end so that the middle one, or two, stay."""
    return max(senders - 1, 0) // 2


def _trimmed_mean(sent: Sequence[Sent], cut: Callable[[int], int]) -> Tensor:
    # Holes are sorted behind all numbers, so that the first `count` of each coordinate were sent.
    ordered = torch.stack([one.value for one in sent]).sort(dim=0).values
    count = (~torch.isnan(ordered)).sum(dim=0)
    ends = torch.tensor([cut(n) for n in range(len(sent) + 1)], device=ordered.device)[count]
    total = torch.zeros_like(ordered[0])
    for rank, row in enumerate(ordered):
        total = total + torch.where((rank >= ends) & (rank < count - ends), row, 0.0)
    return total / (count - 2 * ends)
