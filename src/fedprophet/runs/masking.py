"""Signs of gradient masking: a model that only looks robust, because attacks that follow gradients lose their way.

Each sign compares two attacks on the same samples. There is no sampling noise between them, only an attack's luck, so a
difference counts from two samples and more than 1 % on.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from fedprophet.attacks.names import attack_label, is_stepwise
from fedprophet.messages.answers import Evaluated
from fedprophet.runs.evaluator import AttackResult, Evaluator, threat_of
from fedprophet.server.accuracy import wilson
from fedprophet.threat import ThreatModel

TOLERANCE = 0.01
LEAST = 2
CHECK_SAMPLES = 200
"""The check with larger radii uses at most this many samples of the test set."""
CHECK_STEPS = 20
"""It takes at least this many steps: an attack of few steps cannot cross a large ball."""
LARGER = 4
"""The larger radius is this many times the run's own."""
GREY = 0.5
"""Within this radius every image in [0, 1] can be turned into the same grey one."""
MEANING = "The model may hide its gradients; then accuracies under gradient attacks overstate its robustness."


@dataclass(frozen=True)
class Tally:
    """How many of some samples were classified correctly under an attack."""

    correct: int
    samples: int

    def __str__(self) -> str:
        return f"{self.correct} of {self.samples} ({100 * self.correct / max(self.samples, 1):.1f} %)"


def tally(answers: Sequence[Evaluated]) -> Tally:
    """Return the plain sum over clients or parts of the test set."""
    return Tally(sum(answer.adversarial for answer in answers), sum(answer.samples for answer in answers))


@dataclass(frozen=True)
class MaskingCheck:
    """How an attack fared in larger balls: correct samples by radius, the run's own radius first."""

    attack: str
    radius: float
    found: Mapping[float, Tally]

    def warnings(self, chance: float) -> Iterator[str]:
        """Yield the signs of gradient masking."""
        label, usual = attack_label(self.attack), self.found[self.radius]
        for radius, found in self.found.items():
            yield from larger_radius(label, self.radius, usual, radius, found)
        if GREY in self.found:
            yield from beyond_chance(label, GREY, self.found[GREY], chance)


def check_masking(evaluator: Evaluator, attacks: Sequence[str]) -> dict[str, MaskingCheck]:
    """Repeat the stepwise attacks on some test samples, in the run's own ball and in larger ones."""
    possible = 0 < evaluator.session.config.attack.radius < 1
    return {name: _check(evaluator, name) for name in attacks if possible and is_stepwise(name)}


def _check(evaluator: Evaluator, attack: str) -> MaskingCheck:
    name, threat = threat_of(evaluator.session, attack)
    assert threat is not None
    samples = min(evaluator.test_samples, CHECK_SAMPLES)
    larger = sorted({min(LARGER * threat.radius, 1.0), GREY})
    found = {}
    for each in [threat, *(_widened(threat, radius) for radius in larger if radius > threat.radius)]:
        what = f"{attack}, masking check, radius {each.radius:g}"
        found[each.radius] = tally(evaluator.over_test_set(name, each, samples, what))
    return MaskingCheck(attack, threat.radius, found)


def _widened(threat: ThreatModel, radius: float) -> ThreatModel:
    """Return the threat in a larger ball, with steps that can cross it."""
    steps = max(threat.steps, CHECK_STEPS)
    return replace(threat, radius=radius, steps=steps, step=2.5 * radius / steps)


def masking_warnings(
    labels: Tensor, results: Mapping[str, AttackResult], checks: Mapping[str, MaskingCheck]
) -> dict[str, list[str]]:
    """Return the signs of gradient masking by the attack they are about; `labels` are those of the test set."""
    chance = float(labels.bincount().max()) / len(labels)
    return {
        name: [*_between_attacks(name, results), *(checks[name].warnings(chance) if name in checks else ())]
        for name in results
    }


def _between_attacks(name: str, results: Mapping[str, AttackResult]) -> Iterator[str]:
    """Compare an attack of several components with its own black-box part, and with the stepwise attacks."""
    for where, answers in {"personalised": results[name].clients, "global": results[name].test}.items():
        if not any(answer.broken for answer in answers):
            continue
        yield from black_box_alone(attack_label(name), where, answers)
        for other in filter(is_stepwise, results):
            weak = tally(results[other].clients if where == "personalised" else results[other].test)
            yield from weaker_than(attack_label(name), tally(answers), attack_label(other), weak, where)


# The signs -----------------------------------------------------------------------------------------------------------


def _clear(difference: int, samples: int) -> bool:
    return difference >= LEAST and difference > TOLERANCE * samples


def black_box_alone(attack: str, where: str, answers: Sequence[Evaluated]) -> Iterator[str]:
    """Square sees no gradient: what it breaks after gradient attacks have failed speaks against the gradients."""
    left = tally(answers)
    broken = sum(answer.broken.get("square", 0) for answer in answers)
    if _clear(broken, left.samples):
        yield (
            f"{where}: {attack}'s gradient attacks left {Tally(left.correct + broken, left.samples)} samples correct, "
            f"and the black-box attack Square after them only {left}. {MEANING}"
        )


def weaker_than(attack: str, strong: Tally, other: str, weak: Tally, where: str) -> Iterator[str]:
    """AutoAttack is the stronger attack: if it leaves more samples correct than PGD, its gradients misled it."""
    if strong.samples == weak.samples and _clear(strong.correct - weak.correct, strong.samples):
        yield (
            f"{where}: {attack} left {strong} samples correct, more than {other}, the weaker attack, which left "
            f"{weak}. {MEANING}"
        )


def larger_radius(attack: str, radius: float, usual: Tally, larger: float, found: Tally) -> Iterator[str]:
    """A larger ball contains the smaller one: an attack in it cannot do worse, unless it loses its way."""
    if _clear(found.correct - usual.correct, usual.samples):
        yield (
            f"{attack} with the larger radius {larger:g} left {found} test samples correct, more than with "
            f"{radius:g}, which left {usual}. {MEANING}"
        )


def beyond_chance(attack: str, radius: float, found: Tally, chance: float) -> Iterator[str]:
    """Within 0.5 of every image lies the same grey: an attack that finds its way leaves about chance, or less."""
    if wilson(found.correct, found.samples)[0] > chance:
        yield (
            f"{attack} with the radius {radius:g}, within which every image can be turned into the same grey, left "
            f"{found} test samples correct, where chance is {100 * chance:.1f} %. {MEANING}"
        )
