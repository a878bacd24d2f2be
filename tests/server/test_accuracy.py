"""Personalised accuracy against hand-computed numbers."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from fedprophet.messages.answers import Evaluated
from fedprophet.server.accuracy import (
    Accuracy,
    Estimate,
    evaluation_fault,
    note_accuracy,
    personalised_estimate,
    pooled_estimate,
    wilson,
)
from fedprophet.server.aggregate import Aggregator
from fedprophet.server.rules import RULES

BY_CLAIM = Aggregator(sizes=lambda client: 10**9)
"""Believes every weight."""


def _counts(client: int, weight: float, samples: int, clean: int, adversarial: int) -> Evaluated:
    return Evaluated(round=1, client=client, weight=weight, samples=samples, clean=clean, adversarial=adversarial)


def personalised(answers: Sequence[Evaluated], aggregator: Aggregator = BY_CLAIM) -> Accuracy:
    accuracy = note_accuracy(answers, aggregator, {})
    assert accuracy is not None
    return accuracy


def test_weighted_by_shard_size_not_by_held_out_samples() -> None:
    accuracy = personalised([_counts(0, 30.0, 4, 4, 2), _counts(1, 10.0, 4, 2, 0)])
    assert accuracy.clean == pytest.approx((30 * 1.0 + 10 * 0.5) / 40)
    assert accuracy.adversarial == pytest.approx(30 * 0.5 / 40)
    assert accuracy.samples == 8


def test_a_client_without_held_out_samples_does_not_count() -> None:
    empty = _counts(2, 5.0, 0, 0, 0)
    assert personalised([_counts(0, 30.0, 4, 3, 1), empty]).clean == 0.75


@pytest.mark.parametrize(
    ("right", "samples", "low", "high"),
    # Published values: Wilson (1927) as tabled by Newcombe (1998), examples 81/263, 15/148, 0/20 and 1/29.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_against_published_values(right: int, samples: int, low: float, high: float) -> None:
    assert wilson(right, samples) == pytest.approx((low, high), abs=5e-5)
    assert wilson(samples - right, samples) == pytest.approx((1 - high, 1 - low), abs=5e-5)


def test_wilson_at_the_ends() -> None:
    """All right of one: z² = 3.8415, so the lower end is 1 / (1 + 3.8415)."""
    assert wilson(1, 1) == (pytest.approx(1 / 4.8415, abs=1e-5), 1.0)
    assert wilson(0, 0) == (0.0, 1.0)


def test_the_global_accuracy_pools_the_parts_of_the_test_set() -> None:
    parts = [_counts(-1, 263.0, 200, 150, 61), _counts(-1, 263.0, 63, 33, 20)]
    found = pooled_estimate(parts, "adversarial")
    assert (found.accuracy, found.samples) == (81 / 263, 263)
    assert found.interval == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert pooled_estimate([], "clean") == Estimate(None, 0, (0.0, 1.0))


def test_the_personalised_interval_is_stratified() -> None:
    """By hand, z² = 3.84146: centres (30 + 1.92073) / 43.84146 = 0.72809 and (5 + 1.92073) / 13.84146 = 0.5;

    s² = 0.75² · 0.72809 · 0.27191 / 40 + 0.25² · 0.5 · 0.5 / 10 = 0.0027840 + 0.0015625, 1.96 s = 0.129222.
    """
    found = personalised_estimate([_counts(0, 300.0, 40, 30, 1), _counts(1, 100.0, 10, 5, 1)], "clean")
    assert found.accuracy == pytest.approx(0.75 * 0.75 + 0.25 * 0.5)
    assert found.samples == 50
    assert found.interval == pytest.approx((0.6875 - 0.129222, 0.6875 + 0.129222), abs=1e-5)


def test_clients_that_get_everything_right_still_leave_doubt() -> None:
    few = personalised_estimate([_counts(k, 10.0, 2, 2, 0) for k in range(4)], "clean")
    many = personalised_estimate([_counts(k, 10.0, 200, 200, 0) for k in range(4)], "clean")
    assert few.accuracy == many.accuracy == few.interval[1] == 1.0
    # Four clients of weight 1/4 with centre 3.92073 / 5.84146: s² = 4/16 · 0.67119 · 0.32881 / 2.
    assert 1 - few.interval[0] == pytest.approx(1.95996 * math.sqrt(0.25 * 0.67119 * 0.32881 / 2), abs=1e-4)
    assert 0.99 < many.interval[0] < 1
    assert personalised_estimate([_counts(0, 1.0, 2, 0, 0)], "clean").interval[0] == 0.0


def test_an_estimate_has_the_value_of_the_accuracy_and_leaves_out_the_same_clients() -> None:
    updates = [_counts(0, 3.0, 7, 5, 2), _counts(1, 11.0, 3, 1, 0), _counts(2, 5.0, 0, 0, 0)]
    accuracy = personalised(updates)
    for metric in ("clean", "adversarial"):
        found = personalised_estimate(updates, metric)
        assert (found.accuracy, found.samples) == (pytest.approx(getattr(accuracy, metric)), 10)
    assert personalised_estimate(updates[2:], "clean") == Estimate(None, 0, (0.0, 1.0))


@pytest.mark.parametrize(
    ("update", "reason"),
    [
        (_counts(0, 3.0, 4, 4, 0), None),
        (_counts(0, 0.0, 0, 0, 0), None),
        (_counts(0, 3.0, -4, 0, 0), "it evaluated -4 samples"),
        (_counts(0, math.nan, 4, 1, 1), "its weight is nan"),
        (_counts(0, -1.0, 4, 1, 1), "its weight is -1.0"),
        (_counts(0, 1e308, 4, 1, 1), "its weight is 1e+308"),
        (_counts(0, 2.0**53, 4, 4, 0), None),
        (_counts(0, 3.0, 10**20, 1, 1), "it evaluated 100000000000000000000 samples"),
        (_counts(0, 3.0, 4, 4, 5), "its evaluation has 5 of 4 samples right (adversarial)"),
        (_counts(0, 3.0, 4, -1, 1), "its evaluation has -1 of 4 samples right (clean)"),
        (replace(_counts(0, 3.0, 4, 4, 0), broken={"square": 4}), None),
        (replace(_counts(0, 3.0, 4, 4, 0), broken={"square": 5}), "its attack broke 5 of 4 samples"),
        (replace(_counts(0, 3.0, 4, 4, 0), broken={"square": -1}), "its attack broke -1 of 4 samples"),
    ],
)
def test_an_evaluation_that_cannot_be_is_named_and_does_not_count(update: Evaluated, reason: str | None) -> None:
    assert evaluation_fault(update) == reason
    if reason:
        good = _counts(1, 2.0, 4, 3, 1)
        assert note_accuracy([update, good], BY_CLAIM, {}) == personalised([good])
        assert personalised_estimate([update, good], "clean") == personalised_estimate([good], "clean")


def test_the_accuracy_of_a_round_is_noted_and_impossible_evaluations_are_rejected() -> None:
    record: dict[str, object] = {}
    good, bad = _counts(1, 2.0, 4, 3, 1), _counts(2, 2.0, 4, 5, 1)
    assert note_accuracy([good, bad], BY_CLAIM, record) == Accuracy(0.75, 0.25, 4)
    reason = "its evaluation has 5 of 4 samples right (clean)"
    assert record == {"dropped": {"2": reason}, "clean": 0.75, "adversarial": 0.25, "samples": 4}


def test_without_a_sample_there_is_no_accuracy() -> None:
    """It is as if nobody had evaluated the round, and not an accuracy of zero."""
    empty, record = _counts(1, 2.0, 0, 0, 0), dict[str, object]()
    assert note_accuracy([empty, empty], BY_CLAIM, record) is None
    assert note_accuracy([], BY_CLAIM, record) is None
    assert record == {}


def test_a_client_that_claims_a_huge_shard_counts_like_the_others() -> None:
    """Its size is unknown, and the median of 2, 2 and 2⁵³ is 2; where it is known to be 6, it counts three times."""
    answers = [_counts(0, 2.0, 4, 3, 1), _counts(1, 2.0, 4, 3, 1), _counts(2, 2.0**53, 4, 0, 4)]
    record: dict[str, object] = {}
    assert note_accuracy(answers, Aggregator(), record) == Accuracy(0.5, 0.5, 12)
    assert record["capped"] == {"2": 2.0**53}
    assert personalised(answers, Aggregator(sizes=lambda client: 6)) == Accuracy(0.3, 0.7, 12)


def test_accuracies_are_joined_by_the_rule() -> None:
    """A client that claims that all attacks succeed moves the mean, and not the median."""
    answers = [_counts(client, 2.0, 4, 3, right) for client, right in enumerate((2, 2, 3, 2, 0))]
    assert personalised(answers).adversarial == pytest.approx(0.45)
    assert personalised(answers, Aggregator(RULES["median"].function)).adversarial == 0.5
