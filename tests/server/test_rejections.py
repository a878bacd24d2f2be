"""Reasons are short and harmless, whatever clients send."""

import pytest

from fedprophet.server.rejections import plain_reason, some_names, weight_fault


@pytest.mark.parametrize("weight", [0, 1, 1.5, 2.0**53])
def test_what_a_shard_can_hold_is_a_weight(weight: float) -> None:
    assert weight_fault(weight) is None


@pytest.mark.parametrize("weight", [-1.0, 0.5, 5e-324, 2.0**53 + 2, 1e308, float("inf"), float("nan")])
def test_anything_else_is_none(weight: float) -> None:
    assert weight_fault(weight) == f"its weight is {weight}"


def test_names_are_in_order_and_few() -> None:
    assert some_names({"b", "a"}) == "['a', 'b']"
    assert some_names("gfedcba") == "['a', 'b', 'c', 'd', 'e'] and 2 more"
    assert some_names(["x" * 61, "y" * 60]) == f"['{'x' * 59}…', '{'y' * 60}']"


def test_reasons_are_cut_and_nothing_in_them_acts() -> None:
    assert plain_reason("its loss is nan") == "its loss is nan"
    assert plain_reason("a\x1b[31m\nb\u202ec\ud800 Δz") == "a?[31m?b?c? Δz"
    assert plain_reason("x" * 500) == "x" * 500
    assert plain_reason("x" * 501) == "x" * 499 + "…"
