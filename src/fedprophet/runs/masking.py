"""Signs of gradient masking: a model that only looks robust, because attacks that follow gradients lose their way.

Each sign compares two attacks on the same samples. There is no sampling noise between them, only an attack's luck, so a
difference counts from two samples and more than 1 % on.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fedprophet.messages.task import ClientUpdate
from fedprophet.server.accuracy import wilson

TOLERANCE = 0.01
LEAST = 2
MEANING = "The model may hide its gradients; then accuracies under gradient attacks overstate its robustness."


@dataclass(frozen=True)
class Tally:
    """How many of some samples were classified correctly under an attack."""

    correct: int
    samples: int

    def __str__(self) -> str:
        return f"{self.correct} of {self.samples} ({100 * self.correct / max(self.samples, 1):.1f} %)"


def tally(updates: Sequence[ClientUpdate], metric: str = "adversarial") -> Tally:
    """Return the plain sum over clients or parts of the test set."""
    correct, samples = (sum(u.metrics.get(name, 0.0) for u in updates) for name in (metric, "samples"))
    return Tally(int(correct), int(samples))


def _clear(difference: int, samples: int) -> bool:
    return difference >= LEAST and difference > TOLERANCE * samples


def black_box_alone(attack: str, where: str, updates: Sequence[ClientUpdate]) -> str | None:
    """Square sees no gradient: what it breaks after gradient attacks have failed speaks against the gradients."""
    left = tally(updates)
    broken = tally(updates, "broken:square").correct
    if not _clear(broken, left.samples):
        return None
    return (
        f"{where}: {attack}'s gradient attacks left {Tally(left.correct + broken, left.samples)} samples correct, and "
        f"the black-box attack Square after them only {left}. {MEANING}"
    )


def weaker_than(attack: str, strong: Tally, other: str, weak: Tally, where: str) -> str | None:
    """AutoAttack is the stronger attack: where it leaves more samples correct than PGD, its gradients misled it."""
    if strong.samples != weak.samples or not _clear(strong.correct - weak.correct, strong.samples):
        return None
    return (
        f"{where}: {attack} left {strong} samples correct, more than {other}, the weaker attack, which left {weak}. "
        f"{MEANING}"
    )


def larger_radius(attack: str, radius: float, usual: Tally, larger: float, found: Tally) -> str | None:
    """A larger ball contains the smaller one: an attack in it cannot do worse, unless it loses its way."""
    if not _clear(found.correct - usual.correct, usual.samples):
        return None
    return (
        f"{attack} with the larger radius {larger:g} left {found} test samples correct, more than with {radius:g}, "
        f"which left {usual}. {MEANING}"
    )


def beyond_chance(attack: str, radius: float, found: Tally, chance: float) -> str | None:
    """Within 0.5 of every image lies the same grey: an attack that finds its way leaves about chance, or less."""
    if wilson(found.correct, found.samples)[0] <= chance:
        return None
    return (
        f"{attack} with the radius {radius:g}, within which every image can be turned into the same grey, left {found} "
        f"test samples correct, where chance is {100 * chance:.1f} %. {MEANING}"
    )
