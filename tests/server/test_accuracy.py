"""Personalised accuracy against hand-computed numbers."""

import pytest

from fedprophet.client.task import ClientUpdate
from fedprophet.server.accuracy import personalised


def _counts(client: int, weight: float, samples: float, clean: float, adversarial: float) -> ClientUpdate:
    metrics = {"samples": samples, "clean": clean, "adversarial": adversarial}
    return ClientUpdate("evaluate", 1, client, weight, metrics)


def test_weighted_by_shard_size_not_by_held_out_samples() -> None:
    accuracy = personalised([_counts(0, 30.0, 4, 4, 2), _counts(1, 10.0, 4, 2, 0)])
    assert accuracy.clean == pytest.approx((30 * 1.0 + 10 * 0.5) / 40)
    assert accuracy.adversarial == pytest.approx(30 * 0.5 / 40)
    assert accuracy.samples == 8


def test_a_client_without_held_out_samples_does_not_count() -> None:
    empty = ClientUpdate("evaluate", 1, 2, 5.0, {"samples": 0.0})
    assert personalised([_counts(0, 30.0, 4, 3, 1), empty]).clean == 0.75
    assert personalised([empty]).samples == 0
