"""Accuracies as the paper reports them, from the counts that clients send, with confidence intervals."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fedprophet.messages.answers import Evaluated
from fedprophet.server.aggregate import Aggregator
from fedprophet.server.coordinator import Record
from fedprophet.server.rejections import LARGEST_COUNT, sound_answers, weight_fault

Z = 1.959963984540054
"""The normal quantile of a two-sided 95 % interval."""

Interval = tuple[float, float]
InputKind = Literal["clean", "adversarial"]
"""The inputs that an accuracy is about: the name of a field of `Evaluated`."""


@dataclass(frozen=True)
class Accuracy:
    """Clean and adversarial accuracy in [0, 1], and over how many samples."""

    clean: float
    adversarial: float
    samples: int


@dataclass(frozen=True)
class Estimate:
    """One accuracy in [0, 1] with the samples it rests on and its 95 % interval; without samples there is none."""

    accuracy: float | None
    samples: int
    interval: Interval


def note_accuracy(answers: Sequence[Evaluated], aggregator: Aggregator, record: Record) -> Accuracy | None:
    """Return the personalised accuracy of a round and note it; None where the answers are over no sample.

    It is that of each client on its own held-out samples, joined by the run's rule: under the mean, as in the paper,
    weighted by shard size. A client without held-out samples has no accuracy and does not count.
    """
    sound = sound_answers(answers, evaluation_fault, record)
    counted = aggregator.believed([answer for answer in sound if answer.samples > 0 and answer.weight > 0], record)
    if not counted:
        return None
    shares = [(each.weight, (each.clean / each.samples, each.adversarial / each.samples)) for each in counted]
    clean, adversarial = aggregator.join_numbers(shares)
    accuracy = Accuracy(clean, adversarial, sum(answer.samples for answer in counted))
    record |= {"clean": accuracy.clean, "adversarial": accuracy.adversarial, "samples": accuracy.samples}
    return accuracy


def personalised_estimate(answers: Sequence[Evaluated], inputs: InputKind) -> Estimate:
    """Return the personalised accuracy on one kind of inputs with its stratified interval, p ± 1.96 s, cut to [0, 1].

    Client k of weight w_k (its share of all shards) got x_k of n_k samples right. Clients are independent strata, so

        s² = Σ w_k² p̃_k (1 − p̃_k) / n_k     with     p̃_k = (x_k + z²/2) / (n_k + z²),  z = 1.96.

    p̃_k is the centre of Wilson's interval: with x_k / n_k itself a client that got all or nothing right would claim to
    have no variance, however few samples it has. The clients asked are taken as given, not as a sample of all clients.
    """
    counted = [answer for answer in answers if evaluation_fault(answer) is None and answer.samples > 0]
    total = sum(answer.weight for answer in counted)
    if not total:
        return Estimate(None, 0, (0.0, 1.0))
    value, variance = 0.0, 0.0
    for answer in counted:
        right, n = getattr(answer, inputs), answer.samples
        centre = (right + Z**2 / 2) / (n + Z**2)
        value += answer.weight * right / n
        variance += (answer.weight / total) ** 2 * centre * (1 - centre) / n
    value, reach = value / total, Z * math.sqrt(variance)
    samples = sum(answer.samples for answer in counted)
    return Estimate(value, samples, (max(0.0, value - reach), min(1.0, value + reach)))


def pooled_estimate(answers: Sequence[Evaluated], inputs: InputKind) -> Estimate:
    """Return the plain accuracy on one kind of inputs over all samples, with Wilson's interval."""
    right, samples = sum(getattr(answer, inputs) for answer in answers), sum(answer.samples for answer in answers)
    return Estimate(right / samples if samples else None, samples, wilson(right, samples))


def wilson(right: int, samples: int) -> Interval:
    """Return Wilson's 95 % score interval for `right` of `samples`; without samples anything is possible.

    Its ends are (p + z²/2n ± z √(p (1 − p)/n + z²/4n²)) / (1 + z²/n).
    """
    if samples == 0:
        return 0.0, 1.0
    p, scale = right / samples, 1 + Z**2 / samples
    centre = (p + Z**2 / (2 * samples)) / scale
    reach = Z * math.sqrt(p * (1 - p) / samples + Z**2 / (4 * samples**2)) / scale
    # At 0 and 1 the end is exact; rounding would move it a little.
    return (0.0 if right == 0 else centre - reach), (1.0 if right == samples else centre + reach)


def evaluation_fault(answer: Evaluated) -> str | None:
    """Return why an evaluation cannot be counted, or None where it can."""
    samples = answer.samples
    if not 0 <= samples <= LARGEST_COUNT:
        return f"it evaluated {samples} samples"
    if reason := weight_fault(answer.weight):
        return reason
    for name, right in (("clean", answer.clean), ("adversarial", answer.adversarial)):
        if not 0 <= right <= samples:
            return f"its evaluation has {right} of {samples} samples right ({name})"
    if any(not 0 <= count <= samples for count in answer.broken.values()):
        return f"its attack broke {max(answer.broken.values(), key=abs)} of {samples} samples"
    return None
