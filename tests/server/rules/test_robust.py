"""What all rules have in common, and what a bad client can do under each."""

import math

import pytest
import torch

from fedprophet.server.rules import RULES

NAN = math.nan
ROBUST = sorted(set(RULES) - {"mean"})


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def joined(rule: str, current, updates, **settings: float):
    """Join by a rule with its default settings, or with those of the ones given that it knows."""

    def read(kind):
        return kind(**{name: value for name, value in settings.items() if name in kind.model_fields})

    return RULES[rule].configured(read)(current, updates)


def test_the_table_has_every_rule_with_its_help() -> None:
    assert set(RULES) == {"clip", "mean", "median", "trimmed-mean"}
    assert all(entry.help and entry.averaged for entry in RULES.values())


@pytest.mark.parametrize("rule", ROBUST)
def test_the_order_of_clients_does_not_matter_to_what_is_sorted(rule: str) -> None:
    draw = torch.Generator().manual_seed(2)
    updates = [(1.0, {"w": torch.randn(200, generator=draw)}) for _ in range(7)]
    one, other = (joined(rule, {"w": torch.zeros(200)}, given)["w"] for given in (updates, updates[::-1]))
    if rule == "clip":
        torch.testing.assert_close(one, other)
    else:
        assert torch.equal(one, other)


@pytest.mark.parametrize("rule", ROBUST)
def test_holes_are_counted_in_float64_too(rule: str) -> None:
    """Two who have the coordinate are averaged by weight under every rule; float32 would round 1/10 and 3/10."""
    current = {"w": torch.zeros(2, dtype=torch.float64)}
    sent = [torch.tensor(values, dtype=torch.float64) for values in ((1, NAN), (NAN, 1), (NAN, 2), (1, NAN))]
    updates = [(weight, {"w": value}) for weight, value in zip((0.1, 0.1, 0.3, 0.3), sent, strict=True)]
    found = joined(rule, current, updates, norm=100.0)["w"]
    scaled = {"clip": 2.0}.get(rule, 1.0)  # the others clip the third to the median norm, 1
    assert found.tolist() == pytest.approx([1.0, (0.1 * 1 + 0.3 * scaled) / 0.4], rel=1e-15)


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
    found = joined(rule, current, updates, norm=100.0)["w"]
    assert found.tolist() == expected
    assert found.dtype == torch.float32


@pytest.mark.parametrize("rule", ["trimmed-mean", "median"])
def test_what_fewer_than_three_sent_is_clipped_instead(rule: str) -> None:
    """Norms are 5, 5, 5 and 1000: the fourth client, alone with v, moves it by 5/1000 of what it sent; u it has with
    the third, of three times its weight, which is not scaled."""
    current = {"w": t(0, 0), "v": t(10.0), "u": t(0.0)}
    updates = [
        (1.0, {"w": t(3, 4)}),
        (1.0, {"w": t(3, 4)}),
        (3.0, {"w": t(0, 3), "u": t(4.0)}),
        (1.0, {"w": t(600, 0), "v": t(10.0), "u": t(800.0)}),
    ]
    new = joined(rule, current, updates)
    assert new["w"].tolist() == [3, 3.5]
    assert new["v"].tolist() == [10]
    assert new["u"].item() == pytest.approx((3 * 4 + 800 * 5 / 1000) / 4)
    alone = joined(rule, {"v": t(10.0)}, [(1.0, {"v": t(13.0)})])
    assert alone["v"].tolist() == [13], "one update is its own median"


@pytest.mark.parametrize("rule", list(RULES))
def test_types_and_what_nobody_sent_stay(rule: str) -> None:
    current = {"w": torch.ones(2, dtype=torch.float16), "n": torch.tensor(5), "v": t(7.0)}
    updates = [(1.0, {"w": 3 * current["w"], "n": torch.tensor(n), "new": t(1.0)}) for n in (3, 4)]
    new = joined(rule, current, updates)
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
    off = {rule: float((joined(rule, {"w": torch.zeros(500)}, sent)["w"] - 1).abs().mean()) for rule in RULES}
    assert off["mean"] > 1.5
    assert off["median"] < 0.1
    assert off["trimmed-mean"] < 0.1
    assert off["clip"] < 0.45
