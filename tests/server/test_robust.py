"""The rules that join updates: hand-computed numbers, holes, and what a bad client can do under each."""

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedprophet.config.config import AggregateSection
from fedprophet.server.aggregate import partial_average
from fedprophet.server.robust import RULES, Rule, clip, mean, median, trimmed_mean

NAN = math.nan
DEFAULT = AggregateSection()
ROBUST = sorted(set(RULES) - {"mean"})


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def test_the_configuration_names_every_rule_and_no_other() -> None:
    allowed = AggregateSection.model_fields["rule"].annotation
    assert list(RULES) == list(allowed.__args__)


def test_mean_is_the_partial_average_bit_for_bit() -> None:
    draw = torch.Generator().manual_seed(0)
    current = {"w": torch.randn(7, generator=draw), "v": torch.randn(3, generator=draw)}
    updates = [
        (float(k), {"w": torch.randn(7, generator=draw)} | ({"v": t(-0.0, k, 1)} if k > 2 else {})) for k in (1, 3, 7)
    ]
    found, expected = mean(current, updates, DEFAULT), partial_average(current, updates)
    assert all(found[name].numpy().tobytes() == expected[name].numpy().tobytes() for name in current)


# Clipping ------------------------------------------------------------------------------------------------------------


def test_clip_by_hand() -> None:
    """Updates (3, 4) and, over two parameters, (0, 6) and 8 have norms 5 and 10; the bound 5 halves the second."""
    current = {"w": t(1, 1), "v": t(2.0), "u": t(9.0)}
    updates = [(1.0, {"w": t(4, 5)}), (3.0, {"w": t(1, 7), "v": t(10.0)})]
    new = clip(current, updates, AggregateSection(clip=5.0))
    assert new["w"].tolist() == [(1 * 4 + 3 * 1) / 4, (1 * 5 + 3 * 4) / 4]
    assert new["v"].tolist() == [6.0]
    assert new["u"].tolist() == [9.0]
    assert current["w"].tolist() == [1, 1], "the old state must not change"


@pytest.mark.parametrize(("sizes", "bound"), [((1, 2, 30), 2), ((1, 2, 30, 40), 2), ((7,), 7), ((3, 50), 3)])
def test_without_a_bound_the_median_norm_is_it_and_the_lower_one_of_two(sizes: tuple[int, ...], bound: int) -> None:
    new = clip({"w": t(0.0)}, [(1.0, {"w": t(size)}) for size in sizes], DEFAULT)
    expected = statistics.fmean(min(size, bound) for size in sizes)
    assert new["w"].item() == pytest.approx(expected, rel=1e-6)


def test_a_bound_that_nobody_reaches_is_the_mean_bit_for_bit() -> None:
    draw = torch.Generator().manual_seed(1)
    current = {"w": torch.randn(50, generator=draw)}
    updates = [(w, {"w": torch.randn(50, generator=draw)}) for w in (1.5, 2.25, 0.1)]
    assert torch.equal(clip(current, updates, AggregateSection(clip=1e9))["w"], partial_average(current, updates)["w"])


def test_that_holds_in_float64_and_for_weights_that_float32_cannot_hold() -> None:
    draw = torch.Generator().manual_seed(3)
    current = {"w": torch.randn(50, generator=draw, dtype=torch.float64)}
    sent = [torch.randn(50, generator=draw, dtype=torch.float64) for _ in range(3)]
    for weights in ((1.5, 2.3, 0.1), (2.0**24 + 1, 1.0, 1.0), (1e39, 3e39, 1e38)):
        updates = [(weight, {"w": value}) for weight, value in zip(weights, sent, strict=True)]
        found = clip(current, updates, AggregateSection(clip=1e9))["w"]
        expected = sum(weight * value for weight, value in zip(weights, sent, strict=True)) / sum(weights)
        assert found.dtype == torch.float64
        assert torch.equal(found, partial_average(current, updates)["w"])
        torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("rule", ROBUST)
def test_holes_are_counted_in_float64_too(rule: str) -> None:
    """Two who have the coordinate are averaged by weight under every rule; float32 would round 1/10 and 3/10."""
    current = {"w": torch.zeros(2, dtype=torch.float64)}
    sent = [torch.tensor(values, dtype=torch.float64) for values in ((1, NAN), (NAN, 1), (NAN, 2), (1, NAN))]
    updates = [(weight, {"w": value}) for weight, value in zip((0.1, 0.1, 0.3, 0.3), sent, strict=True)]
    found = RULES[rule](current, updates, AggregateSection(clip=100.0))["w"]
    scaled = {"clip": 2.0}.get(rule, 1.0)  # the others clip the third to the median norm, 1
    assert found.tolist() == pytest.approx([1.0, (0.1 * 1 + 0.3 * scaled) / 0.4], rel=1e-15)


def test_nobody_moves_a_clipped_model_further_than_the_bound() -> None:
    current = {"w": torch.zeros(100)}
    huge = {"w": torch.full((100,), 1e30)}
    moved = clip(current, [(1.0, huge)], AggregateSection(clip=0.25))["w"]
    assert float(moved.double().norm()) == pytest.approx(0.25, rel=1e-6)


def test_who_sends_the_model_back_unchanged_is_not_divided_by_zero() -> None:
    current = {"w": t(1, 2)}
    assert clip(current, [(1.0, {"w": t(1, 2)})], DEFAULT)["w"].tolist() == [1, 2]
    assert clip(current, [], DEFAULT)["w"].tolist() == [1, 2]


def test_counts_have_no_part_in_the_norm_and_get_their_median() -> None:
    current = {"w": t(0.0), "n": torch.tensor(10)}
    updates = [(1.0, {"w": t(1.0), "n": torch.tensor(n)}) for n in (40, 50, 10**12)]
    new = clip(current, updates, AggregateSection(clip=1.0))
    assert new["w"].tolist() == [1.0]
    assert new["n"].dtype == torch.int64
    assert new["n"].item() == 50


# Coordinates ---------------------------------------------------------------------------------------------------------


def test_trimmed_mean_by_hand() -> None:
    """Of five values the smallest and the largest are left out, coordinate by coordinate; weights do not count."""
    sent = [t(1, -50), t(2, 1), t(3, 2), t(100, 3), t(4, 4)]
    new = trimmed_mean({"w": t(0, 0)}, [(10.0**k, {"w": value}) for k, value in enumerate(sent)], DEFAULT)
    assert new["w"].tolist() == [3, 2]


def test_trimmed_mean_is_over_those_who_sent_a_parameter() -> None:
    """Of nine who sent w two are left out at each end, of four who sent v one."""
    updates = [(1.0, {"w": t(k)} | ({"v": t(10.0 * k)} if k < 4 else {})) for k in range(9)]
    new = trimmed_mean({"w": t(0.0), "v": t(0.0), "u": t(5.0)}, updates, DEFAULT)
    assert new["w"].item() == 4
    assert new["v"].item() == 15
    assert new["u"].item() == 5


@pytest.mark.parametrize(("values", "expected"), [((5, 1, 100), 5), ((5, 1, 100, 7), 6), ((3,), 3), ((3, -3, 4), 3)])
def test_median_by_hand(values: tuple[float, ...], expected: float) -> None:
    updates = [(10.0**k, {"w": t(value)}) for k, value in enumerate(values)]
    assert median({"w": t(0.0)}, updates, DEFAULT)["w"].item() == expected


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=3, max_size=9))
def test_median_is_that_of_the_library(values: list[float]) -> None:
    found = median({"w": t(0.0)}, [(1.0, {"w": t(value)}) for value in values], DEFAULT)["w"].item()
    assert found == pytest.approx(statistics.median(values), rel=1e-6)


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=3, max_size=12), st.sampled_from([0.0, 0.1, 0.25, 0.4, 0.49]))
def test_trimmed_mean_is_a_mean_of_what_is_left(values: list[float], trim: float) -> None:
    settings = AggregateSection(trim=trim)
    found = trimmed_mean({"w": t(0.0)}, [(1.0, {"w": t(value)}) for value in values], settings)["w"].item()
    cut = min(-(-round(trim * 100) * len(values) // 100), (len(values) - 1) // 2)
    left = sorted(values)[cut : len(values) - cut]
    assert found == pytest.approx(statistics.fmean(left), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("rule", ROBUST)
def test_the_order_of_clients_does_not_matter_to_what_is_sorted(rule: str) -> None:
    draw = torch.Generator().manual_seed(2)
    updates = [(1.0, {"w": torch.randn(200, generator=draw)}) for _ in range(7)]
    one, other = (RULES[rule]({"w": torch.zeros(200)}, given, DEFAULT)["w"] for given in (updates, updates[::-1]))
    if rule == "clip":
        torch.testing.assert_close(one, other)
    else:
        assert torch.equal(one, other)


# What all have in common ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("clip", [6, 5, 9]),  # (1 + 5 + 6 + 12) / 4, (2 + 4 + 9) / 3, nobody
        ("trimmed-mean", [5.5, 4, 9]),
        ("median", [5.5, 4, 9]),
    ],
)
def test_a_coordinate_is_joined_over_those_who_have_it(rule: str, expected: list[float]) -> None:
    current = {"w": t(0, 0, 9)}
    sent = [t(1, 2, NAN), t(5, NAN, NAN), t(12, 9, NAN), t(6, 4, NAN)]
    updates = [(1.0, {"w": value}) for value in sent]
    found = RULES[rule](current, updates, AggregateSection(clip=100.0))["w"]
    assert found.tolist() == expected
    assert found.dtype == torch.float32


def test_clipping_measures_what_was_sent_and_not_the_holes() -> None:
    new = clip({"w": t(0, 0)}, [(1.0, {"w": t(3, NAN)})], AggregateSection(clip=1.0))
    assert new["w"].tolist() == [1, 0]


def test_holes_are_counted_coordinate_by_coordinate() -> None:
    """Five have the first channel and three the second: one is left out at each end of both."""
    sent = [t(1, 20), t(2, NAN), t(3, NAN), t(4, 25), t(500, 30)]
    new = trimmed_mean({"w": t(0, 0)}, [(1.0, {"w": value}) for value in sent], DEFAULT)
    assert new["w"].tolist() == [3, 25]


@pytest.mark.parametrize("rule", [trimmed_mean, median])
def test_what_fewer_than_three_sent_is_clipped_instead(rule: Rule) -> None:
    """Norms are 5, 5, 5 and 1000: the fourth client, alone with v, moves it by 5/1000 of what it sent; u it has with
    the third, of three times its weight, which is not scaled."""
    current = {"w": t(0, 0), "v": t(10.0), "u": t(0.0)}
    updates = [
        (1.0, {"w": t(3, 4)}),
        (1.0, {"w": t(3, 4)}),
        (3.0, {"w": t(0, 3), "u": t(4.0)}),
        (1.0, {"w": t(600, 0), "v": t(10.0), "u": t(800.0)}),
    ]
    new = rule(current, updates, DEFAULT)
    assert new["w"].tolist() == [3, 3.5]
    assert new["v"].tolist() == [10]
    assert new["u"].item() == pytest.approx((3 * 4 + 800 * 5 / 1000) / 4)
    alone = rule({"v": t(10.0)}, [(1.0, {"v": t(13.0)})], DEFAULT)
    assert alone["v"].tolist() == [13], "one update is its own median"


@pytest.mark.parametrize("rule", list(RULES))
def test_types_and_what_nobody_sent_stay(rule: str) -> None:
    current = {"w": torch.ones(2, dtype=torch.float16), "n": torch.tensor(5), "v": t(7.0)}
    updates = [(1.0, {"w": 3 * current["w"], "n": torch.tensor(n), "new": t(1.0)}) for n in (3, 4)]
    new = RULES[rule](current, updates, DEFAULT)
    assert [(name, value.dtype) for name, value in new.items()] == [
        ("w", torch.float16),
        ("n", torch.int64),
        ("v", torch.float32),
        ("new", torch.float32),
    ]
    assert new["w"].tolist() == [3, 3]
    assert new["n"].item() == 3
    assert new["v"] is current["v"]


@pytest.mark.parametrize("factor", [-10.0, 10.0, 100.0, -1e6])
def test_two_of_ten_move_the_mean_anywhere_and_a_robust_rule_hardly(factor: float) -> None:
    """Honest updates lie around 1 in every coordinate; a robust one stays between them, or half a bound away."""
    draw = torch.Generator().manual_seed(3)
    honest = [1 + 0.1 * torch.randn(500, generator=draw) for _ in range(10)]
    sent = [(1.0, {"w": factor * value if k in (2, 7) else value}) for k, value in enumerate(honest)]
    off = {rule: float((RULES[rule]({"w": torch.zeros(500)}, sent, DEFAULT)["w"] - 1).abs().mean()) for rule in RULES}
    assert off["mean"] > 1.5
    assert off["median"] < 0.1
    assert off["trimmed-mean"] < 0.1
    assert off["clip"] < 0.45
