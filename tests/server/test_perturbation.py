"""Eq. 11 and 12 against hand-computed numbers."""

import math

import pytest

from fedprophet.messages.answers import Measured
from fedprophet.server.aggregate import Aggregator
from fedprophet.server.coordinator import Record
from fedprophet.server.perturbation import Perturbation, PerturbationSettings, accuracy_ratio, note_magnitude
from fedprophet.server.rules import RULES
from fedprophet.threat import feature_threat

THREAT = feature_threat(0.5, 10, (0.0, math.inf))
BY_CLAIM = Aggregator(sizes=lambda client: 10**9)
"""Believes every weight."""


def _perturbation(alpha: float = 0.3) -> Perturbation:
    return Perturbation(magnitude=2.0, reference=0.8 / 0.5, alpha=alpha)


def _measured(client: int, weight: float, magnitude: float) -> Measured:
    return Measured(round=1, client=client, weight=weight, samples=int(weight), magnitude=magnitude)


def test_the_magnitude_is_the_mean_over_training_samples_of_clients_that_have_some() -> None:
    record: Record = {}
    answers = [_measured(0, 30.0, 1.0), _measured(1, 10.0, 2.0), _measured(2, 0.0, 0.0)]
    assert note_magnitude(answers, THREAT, BY_CLAIM, record) == pytest.approx((30 * 1.0 + 10 * 2.0) / 40)
    assert record == {}
    median = Aggregator(rule=RULES["median"].function, sizes=BY_CLAIM.sizes)
    three = [_measured(0, 30.0, 1.0), _measured(1, 10.0, 2.0), _measured(2, 10.0, 7.0)]
    assert note_magnitude(three, THREAT, median, record) == 2.0


def test_magnitudes_that_no_attack_finds_are_noted_and_not_counted() -> None:
    record: Record = {}
    numbers = [1.0, 1.0, 3.0, 300.0, math.nan, 0.0, -1.0]
    answers = [_measured(client, 10.0, number) for client, number in enumerate(numbers)]
    assert note_magnitude(answers, THREAT, BY_CLAIM, record) == pytest.approx(5 / 3)
    assert record["dropped"] == {
        "3": "its measured perturbation is 150 times the median of all clients'",
        "4": "its measured perturbation is nan",
        "5": "its measured perturbation is 0.0",
        "6": "its measured perturbation is -1.0",
    }
    assert note_magnitude(answers[4:], THREAT, BY_CLAIM, {}) is None
    assert note_magnitude([_measured(0, 10.0, 0.0)], feature_threat(0.0, 10, (0.0, 1.0)), BY_CLAIM, {}) == 0.0


def test_radius_is_alpha_times_the_measured_magnitude() -> None:
    assert _perturbation().radius == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("clean", "adversarial", "alpha"),
    [
        (0.85, 0.50, 0.4),  # 1.700 > 1.05 · 1.6 = 1.680: too little robustness
        (0.83, 0.50, 0.3),  # 1.660 lies between 1.520 and 1.680
        (0.77, 0.50, 0.3),  # 1.540, still between
        (0.75, 0.50, 0.2),  # 1.500 < 1.520: too much
        (0.10, 0.00, 0.4),  # no adversarial accuracy: an infinite ratio raises alpha
    ],
)
def test_alpha_follows_the_accuracy_ratio(clean: float, adversarial: float, alpha: float) -> None:
    assert _perturbation().observe(clean, adversarial, PerturbationSettings()).alpha == pytest.approx(alpha)


def test_switched_off_it_stays() -> None:
    assert _perturbation().observe(0.9, 0.1, PerturbationSettings(enabled=False)).alpha == 0.3


def test_alpha_never_falls_below_its_floor() -> None:
    settings = PerturbationSettings(floor=0.3)
    assert _perturbation().observe(0.5, 0.5, settings).alpha == 0.3
    assert _perturbation(0.05).observe(0.5, 0.5, PerturbationSettings()).alpha == 0.0


def test_cadence_and_window() -> None:
    """Every second observation is compared, on the mean of the last three ratios."""
    settings = PerturbationSettings(every=2, window=3)
    first = _perturbation().observe(0.8, 0.4, settings)  # ratio 2.0, not yet compared
    assert first.alpha == 0.3
    second = first.observe(0.6, 0.5, settings)  # mean of 2.0 and 1.2 is 1.6: inside the band
    assert second.alpha == 0.3
    fourth = second.observe(0.8, 0.4, settings).observe(0.8, 0.4, settings)  # mean of 1.2, 2.0, 2.0 is 1.733
    assert fourth.ratios == (1.2, 2.0, 2.0)
    assert fourth.alpha == pytest.approx(0.4)


@pytest.mark.parametrize(("every", "adjusted_at"), [(1, 1), (5, 1), (6, 2), (10, 2), (11, 3)])
def test_the_cadence_is_in_rounds_and_rounded_up_to_evaluations(every: int, adjusted_at: int) -> None:
    settings, perturbation, observed = PerturbationSettings(every=every), _perturbation(), 0
    while perturbation.alpha == 0.3:
        perturbation = perturbation.observe(0.9, 0.1, settings, evaluated_every=5)
        observed += 1
    assert observed == adjusted_at


@pytest.mark.parametrize(
    ("counted_from", "evaluated_every", "adjusted"),
    [
        ("gate", 1, [175, 225, 275]),
        ("warmup", 1, [151, 201, 251]),
        # Rounds 130, 140, …: the evaluation behind each of those rounds.
        ("warmup", 10, [160, 210, 260]),
    ],
)
def test_where_the_cadence_is_counted_from(counted_from: str, evaluated_every: int, adjusted: list[int]) -> None:
    """As in the paper: 100 rounds of warm-up, the gate 25 rounds later, an adjustment every 50 rounds."""
    settings = PerturbationSettings(every=50, counted_from=counted_from)
    perturbation, found = _perturbation(), []
    for stage_round in (r for r in range(126, 290) if r % evaluated_every == 0):
        new = perturbation.observe(0.9, 0.1, settings, evaluated_every, since_warmup=stage_round - 100)
        found += [stage_round] if new.alpha != perturbation.alpha else []
        perturbation = new
    assert found == adjusted


def test_a_stage_begins_with_the_start_value_or_with_the_last_alpha_if_that_is_higher() -> None:
    start, last = (PerturbationSettings(start=0.3, restart=restart) for restart in ("start", "last"))
    befores = (None, _perturbation(0.2), _perturbation(0.7))
    assert [start.starting(before) for before in befores] == [0.3, 0.3, 0.3]
    assert [last.starting(before) for before in befores] == [0.3, 0.3, 0.7]
    assert PerturbationSettings().starting(_perturbation(0.7)) == 0.3


def test_it_knows_when_alpha_last_changed() -> None:
    """The reference is 1.6, alpha has a floor of 0.3, and every second round is compared."""
    settings, perturbation, changed = PerturbationSettings(floor=0.3, every=2), _perturbation(), []
    accuracies = [(0.5, 0.5)] * 2  # less than 1.52, but alpha is at its floor
    accuracies += [(0.8, 0.4)] * 2  # 2.0: raised in the fourth round
    accuracies += [(0.8, 0.5)] * 2  # in the band
    accuracies += [(0.5, 0.5)] * 2  # lowered in the eighth
    for number, (clean, adversarial) in enumerate(accuracies, start=1):
        perturbation = perturbation.observe(clean, adversarial, settings, since_warmup=number)
        changed.append(perturbation.changed)
    assert changed == [0, 0, 0, 4, 4, 4, 4, 8]


def test_ratio_without_adversarial_accuracy_is_infinite() -> None:
    assert accuracy_ratio(0.5, 0.25) == 2.0
    assert accuracy_ratio(0.5, 0.0) == math.inf
