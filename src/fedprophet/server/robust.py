"""Rules that join what clients have trained. All but the mean bound what a few bad clients can do to the model.

An update is a client's weight q_k and the parameters that it sent. As in Eq. 16 and 17, each parameter is joined over
those who sent it, and what nobody sent stays. A coordinate that is NaN was not sent either: clients whose sub-network
has only some channels leave such holes (updates with a NaN of their own never come this far). All is computed in
float64, in the order given, so that the result depends on nothing but its inputs.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedprophet.config.config import AggregateSection
from fedprophet.server.aggregate import Parameters, partial_average

Update = tuple[float, Parameters]
Rule = Callable[[Parameters, Iterable[Update], AggregateSection], dict[str, Tensor]]
MAJORITY = 3
"""Of so many values one can be outvoted by the others."""


def mean(current: Parameters, updates: Iterable[Update], settings: AggregateSection) -> dict[str, Tensor]:
    """Return the paper's partial average, w_n ← Σ_k q_k w_{n,k} / Σ_k q_k: a single client can move it anywhere."""
    return partial_average(current, updates)


def clip(current: Parameters, updates: Iterable[Update], settings: AggregateSection) -> dict[str, Tensor]:
    """Norm clipping (Sun et al., 2019): nobody moves the model further than c.

    A client's update Δ_k is the difference between all that it sent and what the server has. It is scaled to a norm of
    at most c, and the scaled ones are averaged:

        w_n ← w_n + Σ_k q_k min(1, c / ‖Δ_k‖₂) Δ_{n,k} / Σ_k q_k

    c = 0 in the settings stands for the median norm of these updates, the lower one of two. Directions and weights stay
    as they were sent. What the server does not have yet counts from zero.
    """
    return _joined(current, list(updates), settings.clip, _clipped)


def trimmed_mean(current: Parameters, updates: Iterable[Update], settings: AggregateSection) -> dict[str, Tensor]:
    """Coordinate-wise trimmed mean (Yin et al., 2018).

    Of the n values that were sent for a coordinate, the ⌈trim · n⌉ smallest and as many of the largest are left out,
    but never all; the others are averaged. All clients count alike, whatever the size of their shard: who was left out
    must not come back in by weight. Values of fewer than three clients, of which none can be outvoted, are clipped to
    the median norm of the updates and averaged.
    """
    return _joined(current, list(updates), 0.0, lambda base, sent: _voted(base, sent, settings.trimmed))


def median(current: Parameters, updates: Iterable[Update], settings: AggregateSection) -> dict[str, Tensor]:
    """Coordinate-wise median (Yin et al., 2018): of an even number of values the mean of the middle two.

    All clients count alike. Values of fewer than three clients are clipped and averaged, as in `trimmed_mean`.
    """
    return _joined(current, list(updates), 0.0, lambda base, sent: _voted(base, sent, _middle))


RULES: Mapping[str, Rule] = {"mean": mean, "clip": clip, "trimmed-mean": trimmed_mean, "median": median}
"""The rules by their names in the configuration."""


@dataclass(frozen=True)
class _Sent:
    """What one client sent of a parameter: its weight, what clipping scales its update by, and the value in float64."""

    weight: float
    scale: float
    value: Tensor


def _joined(
    current: Parameters, updates: Sequence[Update], bound: float, join: Callable[[Tensor, Sequence[_Sent]], Tensor]
) -> dict[str, Tensor]:
    """Join parameter by parameter. Whole numbers, which count batches, get their median under every rule."""
    scales = _scales(current, updates, bound)
    joined = dict(current)
    for name in dict.fromkeys(name for _, parameters in updates for name in parameters):
        values = [(weight, s, p[name]) for (weight, p), s in zip(updates, scales, strict=True) if name in p]
        sent = [_Sent(weight, scale, value.detach().to(torch.float64)) for weight, scale, value in values]
        like = values[0][2]
        known = current[name].detach().to(like.device) if name in current else torch.zeros_like(like)
        found = join(known.double(), sent) if known.is_floating_point() else _trimmed(sent, _middle)
        # A coordinate that nobody sent is 0/0.
        joined[name] = torch.where(torch.isnan(found), known, found.to(known.dtype))
    return joined


def _scales(current: Parameters, updates: Sequence[Update], bound: float) -> list[float]:
    """Return min(1, c / ‖Δ_k‖) of each update, c being the bound, or the median norm where that is 0."""
    norms = [_norm(current, parameters) for _, parameters in updates]
    largest = bound or statistics.median_low(norms or [0.0])
    return [min(1.0, largest / norm) if norm > 0 else 1.0 for norm in norms]


def _norm(current: Parameters, parameters: Parameters) -> float:
    squares = 0.0
    for name, value in parameters.items():
        if value.is_floating_point():
            sent = value.detach().to(torch.float64)
            difference = sent - current[name].detach().to(sent.device) if name in current else sent
            squares += float(torch.nan_to_num(difference, nan=0.0).square().sum())
    return math.sqrt(squares)


def _clipped(base: Tensor, sent: Sequence[_Sent]) -> Tensor:
    """Return the weighted mean of the scaled updates; what is not scaled enters as it was sent, without rounding."""
    total = weights = torch.zeros_like(base)
    for one in sent:
        moved = one.value if one.scale == 1 else base + one.scale * (one.value - base)
        there = ~torch.isnan(one.value)
        total = total + torch.where(there, moved * one.weight, 0.0)
        weights = weights + there.to(base.dtype) * one.weight
    return total / weights


def _voted(base: Tensor, sent: Sequence[_Sent], cut: Callable[[int], int]) -> Tensor:
    """Return each coordinate's mean without the `cut(n)` smallest and largest of n values, where these are enough."""
    voted = _trimmed(sent, cut)
    count = sum((~torch.isnan(one.value)).long() for one in sent)
    few = torch.as_tensor(count < MAJORITY)
    return torch.where(few, _clipped(base, sent), voted) if bool(few.any()) else voted


def _middle(senders: int) -> int:
    """Return how many values to leave out at each end so that the middle one, or two, stay."""
    return max(senders - 1, 0) // 2


def _trimmed(sent: Sequence[_Sent], cut: Callable[[int], int]) -> Tensor:
    # Holes are sorted behind all numbers, so that the first `count` of each coordinate were sent.
    ordered = torch.stack([one.value for one in sent]).sort(dim=0).values
    count = (~torch.isnan(ordered)).sum(dim=0)
    ends = torch.tensor([cut(n) for n in range(len(sent) + 1)], device=ordered.device)[count]
    total = torch.zeros_like(ordered[0])
    for rank, row in enumerate(ordered):
        total = total + torch.where((rank >= ends) & (rank < count - ends), row, 0.0)
    return total / (count - 2 * ends)
