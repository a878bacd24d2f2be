"""Accuracies as the paper reports them, from the counts that clients send, and how far they can be trusted."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fedprophet.messages.task import ClientUpdate
from fedprophet.server.rejections import LARGEST_COUNT, weight_fault

Z = 1.959963984540054
"""The normal quantile of a two-sided 95 % interval."""

Interval = tuple[float, float]


@dataclass(frozen=True)
class Accuracy:
    """Clean and adversarial accuracy in [0, 1], and over how many samples."""

    clean: float
    adversarial: float
    samples: int


@dataclass(frozen=True)
class Estimate:
    """One accuracy in [0, 1] with the samples it rests on and its 95 % interval."""

    accuracy: float
    samples: int
    interval: Interval


def personalised(updates: Sequence[ClientUpdate]) -> Accuracy:
    """Return the mean, weighted by shard size, of each client's accuracy on its own held-out samples.

    A client without held-out samples has no accuracy and does not count. With one update this is its plain accuracy.
    """
    counted = _counted(updates)
    samples = int(sum(u.metrics["samples"] for u in counted))
    return Accuracy(_weighted(counted, "clean"), _weighted(counted, "adversarial"), samples)


def personalised_estimate(updates: Sequence[ClientUpdate], metric: str) -> Estimate:
    """Return the personalised accuracy of one metric with its stratified interval, p ± 1.96 s, cut to [0, 1].

    Client k of weight w_k (its share of all shards) got x_k of n_k samples right. Clients are independent strata, so

        s² = Σ w_k² p̃_k (1 − p̃_k) / n_k     with     p̃_k = (x_k + z²/2) / (n_k + z²),  z = 1.96.

    p̃_k is the centre of Wilson's interval: with x_k / n_k itself a client that got all or nothing right would claim to
    have no variance, however few samples it has. The clients asked are taken as given, not as a sample of all clients.
    """
    counted = _counted(updates)
    samples = int(sum(u.metrics["samples"] for u in counted))
    if not counted:
        return Estimate(0.0, 0, (0.0, 1.0))
    total, variance = sum(u.weight for u in counted), 0.0
    for update in counted:
        right, n = update.metrics.get(metric, 0.0), update.metrics["samples"]
        centre = (right + Z**2 / 2) / (n + Z**2)
        variance += (update.weight / total) ** 2 * centre * (1 - centre) / n
    value, reach = _weighted(counted, metric), Z * math.sqrt(variance)
    return Estimate(value, samples, (max(0.0, value - reach), min(1.0, value + reach)))


def pooled_estimate(updates: Sequence[ClientUpdate], metric: str) -> Estimate:
    """Return the plain accuracy of one metric over all samples, with Wilson's interval."""
    right, samples = (int(sum(u.metrics.get(name, 0.0) for u in updates)) for name in (metric, "samples"))
    return Estimate(right / samples if samples else 0.0, samples, wilson(right, samples))


def wilson(right: int, samples: int) -> Interval:
    """Return Wilson's 95 % score interval for `right` of `samples`; without samples anything is possible.

    Its ends are (p + z²/2n ± z √(p (1 − p)/n + z²/4n²)) / (1 + z²/n).
    """
    if samples == 0:
        return 0.0, 1.0
    p, scale = right / samples, 1 + Z**2 / samples
    centre = (p + Z**2 / (2 * samples)) / scale
    reach = Z * math.sqrt(p * (1 - p) / samples + Z**2 / (4 * samples**2)) / scale
    # At 0 and 1 the end is exactly there; rounding would leave it a little beside.
    return (0.0 if right == 0 else centre - reach), (1.0 if right == samples else centre + reach)


def evaluation_fault(update: ClientUpdate) -> str | None:
    """Return why an evaluation cannot be counted, or None where it can."""
    samples = update.metrics.get("samples")
    if samples is None or not 0 <= samples <= LARGEST_COUNT:
        return "its evaluation has no number of samples" if samples is None else f"it evaluated {samples} samples"
    impossible = weight_fault(update.weight)
    if impossible:
        return impossible
    for name in ("clean", "adversarial"):
        right = update.metrics.get(name, 0.0)
        if not 0 <= right <= samples:
            return f"its evaluation has {right} of {samples:g} samples right ({name})"
    return None


def _counted(updates: Sequence[ClientUpdate]) -> list[ClientUpdate]:
    counted = [u for u in updates if evaluation_fault(u) is None and u.metrics["samples"] > 0]
    return counted if sum(update.weight for update in counted) > 0 else []


def _weighted(counted: Sequence[ClientUpdate], metric: str) -> float:
    if not counted:
        return 0.0
    shares = (u.weight * u.metrics.get(metric, 0.0) / u.metrics["samples"] for u in counted)
    return sum(shares) / sum(u.weight for u in counted)
