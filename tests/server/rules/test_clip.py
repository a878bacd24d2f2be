"""Norm clipping against hand-computed numbers."""

import math
import statistics

import pytest
import torch

from fedprophet.server.rules.clip import ClipSettings, clip
from fedprophet.server.rules.mean import partial_average

NAN = math.nan


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def test_clip_by_hand() -> None:
    """Updates (3, 4) and, over two parameters, (0, 6) and 8 have norms 5 and 10; the bound 5 halves the second."""
    current = {"w": t(1, 1), "v": t(2.0), "u": t(9.0)}
    updates = [(1.0, {"w": t(4, 5)}), (3.0, {"w": t(1, 7), "v": t(10.0)})]
    new = clip(current, updates, ClipSettings(norm=5.0))
    assert new["w"].tolist() == [(1 * 4 + 3 * 1) / 4, (1 * 5 + 3 * 4) / 4]
    assert new["v"].tolist() == [6.0]
    assert new["u"].tolist() == [9.0]
    assert current["w"].tolist() == [1, 1], "the old state must not change"


@pytest.mark.parametrize(("sizes", "bound"), [((1, 2, 30), 2), ((1, 2, 30, 40), 2), ((7,), 7), ((3, 50), 3)])
def test_without_a_bound_the_median_norm_is_it_and_the_lower_one_of_two(sizes: tuple[int, ...], bound: int) -> None:
    new = clip({"w": t(0.0)}, [(1.0, {"w": t(size)}) for size in sizes], ClipSettings())
    expected = statistics.fmean(min(size, bound) for size in sizes)
    assert new["w"].item() == pytest.approx(expected, rel=1e-6)


def test_a_bound_that_nobody_reaches_is_the_mean_bit_for_bit() -> None:
    draw = torch.Generator().manual_seed(1)
    current = {"w": torch.randn(50, generator=draw)}
    updates = [(w, {"w": torch.randn(50, generator=draw)}) for w in (1.5, 2.25, 0.1)]
    assert torch.equal(clip(current, updates, ClipSettings(norm=1e9))["w"], partial_average(current, updates)["w"])


def test_that_holds_in_float64_and_for_weights_that_float32_cannot_hold() -> None:
    draw = torch.Generator().manual_seed(3)
    current = {"w": torch.randn(50, generator=draw, dtype=torch.float64)}
    sent = [torch.randn(50, generator=draw, dtype=torch.float64) for _ in range(3)]
    for weights in ((1.5, 2.3, 0.1), (2.0**24 + 1, 1.0, 1.0), (1e39, 3e39, 1e38)):
        updates = [(weight, {"w": value}) for weight, value in zip(weights, sent, strict=True)]
        found = clip(current, updates, ClipSettings(norm=1e9))["w"]
        expected = sum(weight * value for weight, value in zip(weights, sent, strict=True)) / sum(weights)
        assert found.dtype == torch.float64
        assert torch.equal(found, partial_average(current, updates)["w"])
        torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-15)


def test_nobody_moves_a_clipped_model_further_than_the_bound() -> None:
    current = {"w": torch.zeros(100)}
    huge = {"w": torch.full((100,), 1e30)}
    moved = clip(current, [(1.0, huge)], ClipSettings(norm=0.25))["w"]
    assert float(moved.double().norm()) == pytest.approx(0.25, rel=1e-6)


def test_who_sends_the_model_back_unchanged_is_not_divided_by_zero() -> None:
    current = {"w": t(1, 2)}
    assert clip(current, [(1.0, {"w": t(1, 2)})], ClipSettings())["w"].tolist() == [1, 2]
    assert clip(current, [], ClipSettings())["w"].tolist() == [1, 2]


def test_counts_have_no_part_in_the_norm_and_get_their_median() -> None:
    current = {"w": t(0.0), "n": torch.tensor(10)}
    updates = [(1.0, {"w": t(1.0), "n": torch.tensor(n)}) for n in (40, 50, 10**12)]
    new = clip(current, updates, ClipSettings(norm=1.0))
    assert new["w"].tolist() == [1.0]
    assert new["n"].dtype == torch.int64
    assert new["n"].item() == 50


def test_clipping_measures_what_was_sent_and_not_the_holes() -> None:
    new = clip({"w": t(0, 0)}, [(1.0, {"w": t(3, NAN)})], ClipSettings(norm=1.0))
    assert new["w"].tolist() == [1, 0]
