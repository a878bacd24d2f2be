"""Accuracies as the paper reports them, from the counts that clients send."""

from collections.abc import Sequence
from dataclasses import dataclass

from fedprophet.client.task import ClientUpdate


@dataclass(frozen=True)
class Accuracy:
    """Clean and adversarial accuracy in [0, 1], and over how many samples."""

    clean: float
    adversarial: float
    samples: int


def personalised(updates: Sequence[ClientUpdate]) -> Accuracy:
    """Return the mean, weighted by shard size, of each client's accuracy on its own held-out samples.

    A client without held-out samples has no accuracy and does not count. With one update this is its plain accuracy.
    """
    counted = [update for update in updates if update.metrics["samples"] > 0]
    total = sum(update.weight for update in counted)
    if not counted or total == 0:
        return Accuracy(0.0, 0.0, 0)

    def mean(metric: str) -> float:
        shares = (u.weight * u.metrics.get(metric, 0.0) / u.metrics["samples"] for u in counted)
        return sum(shares) / total

    return Accuracy(mean("clean"), mean("adversarial"), int(sum(u.metrics["samples"] for u in counted)))
