"""The gate, the patience and the score of a stage."""

import math

from fedprophet.server.convergence import Best, StageRule, better, score

RULE = StageRule(rounds=500, warmup=100, gate=25, patience=50)


def test_warm_up_trains_without_attack_and_the_gate_opens_later() -> None:
    assert [RULE.adversarial(t) for t in (1, 100, 101)] == [False, False, True]
    assert [RULE.counts(t) for t in (101, 125, 126)] == [False, False, True]


def test_evaluations_are_rare_as_set_and_the_last_round_has_one() -> None:
    rule = StageRule(rounds=11, warmup=4, gate=2, patience=3, every=2, before_gate=3)
    # The gate opens after round 6: 3 and 6 before it, 8 and 10 behind it, 11 in any case.
    assert [t for t in range(1, 12) if rule.evaluates(t)] == [3, 6, 8, 10, 11]
    assert [t for t in range(1, 12) if rule.evaluates(t, failures=1)] == [11], "nothing new to evaluate"
    assert [t for t in range(1, 12) if rule.ungated.evaluates(t)] == [2, 4, 6, 8, 10, 11]


def test_a_stage_ends_with_its_rounds_or_when_its_best_is_old() -> None:
    assert not RULE.ends(499, None)
    assert RULE.ends(500, 0)
    assert not RULE.ends(300, 49)
    assert RULE.ends(300, 50)


def test_score_weighs_robustness_by_the_ratio_of_the_stage_before() -> None:
    assert score(0.8, 0.5, 1.0) == 1.3
    assert score(0.8, 0.5, 1.6) == 1.6
    assert math.isfinite(score(0.8, 0.0, math.inf))
    assert score(0.1, 0.2, math.inf) > score(0.9, 0.1, math.inf)


def test_a_tie_keeps_the_earlier_round() -> None:
    first, same, higher = (Best(r, s, 0.5, 0.5, 0.3) for r, s in ((1, 1.0), (2, 1.0), (3, 1.1)))
    assert better(None, first) is first
    assert better(first, same) is first
    assert better(first, higher) is higher
