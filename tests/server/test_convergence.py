"""The gate, the patience and the score of a stage."""

import math
from dataclasses import replace

from fedprophet.server.convergence import Best, StageRule, better, score

RULE = StageRule(rounds=500, warmup=100, gate=25, patience=50)


def test_warm_up_trains_without_attack_and_the_gate_opens_later() -> None:
    assert [RULE.adversarial(t) for t in (1, 100, 101)] == [False, False, True]
    assert [RULE.counts(t) for t in (101, 125, 126)] == [False, False, True]


def test_the_attack_on_images_grows_after_the_warm_up() -> None:
    growing = replace(RULE, ramp=50)
    assert [growing.strength(t) for t in (1, 100, 101, 125, 149, 150, 151)] == [0, 0, 0.02, 0.5, 0.98, 1, 1]
    assert [RULE.strength(t) for t in (100, 101)] == [0, 1], "without a ramp it is whole at once"
    assert [growing.counts(t) for t in (126, 150, 151)] == [False, False, True], "a weaker attack flatters a round"
    assert [replace(RULE, ramp=10).counts(t) for t in (125, 126)] == [False, True], "the gate opens later"


def test_evaluations_are_rare_as_set_and_the_last_round_has_one() -> None:
    rule = StageRule(rounds=11, warmup=4, gate=2, patience=3, every=2, before_gate=3)
    # The gate opens after round 6: 3 and 6 before it, 8 and 10 behind it, 11 in any case.
    assert [t for t in range(1, 12) if rule.evaluates(t)] == [3, 6, 8, 10, 11]
    assert [t for t in range(1, 12) if rule.evaluates(t, failures=1)] == [11], "nothing new to evaluate"
    assert [t for t in range(1, 12) if rule.ungated.evaluates(t)] == [2, 4, 6, 8, 10, 11]


def test_a_stage_ends_with_its_rounds_or_when_its_best_is_old() -> None:
    assert RULE.overdue(499, since_best=None) == -1
    assert RULE.overdue(500, since_best=0) == 0
    assert RULE.overdue(502, since_best=None) == 2
    assert [RULE.overdue(300, since_best=age) for age in (49, 50, 52)] == [-1, 0, 2]
    assert RULE.overdue(501, since_best=53) == 3


def test_patience_may_wait_for_alpha() -> None:
    waiting = replace(RULE, waits_for_alpha=True)
    # The best is 60 rounds old, but alpha changed 10, 50 or 55 rounds ago; in the first stage there is no alpha.
    ages = (10, 50, 55, None)
    assert [waiting.overdue(300, since_best=60, since_alpha=age) for age in ages] == [-40, 0, 5, 10]
    assert [RULE.overdue(300, since_best=60, since_alpha=age) for age in ages] == [10, 10, 10, 10]
    assert waiting.overdue(300, since_best=20, since_alpha=60) == -30, "a fresh best is waited for as ever"
    assert waiting.overdue(300, since_best=None, since_alpha=60) == -200, "without a best, nothing but the rounds ends"
    assert waiting.overdue(500, since_best=60, since_alpha=0) == 0, "all rounds are used"


def test_score_weighs_robustness_by_the_ratio_of_the_stage_before() -> None:
    assert score(0.8, 0.5, 1.0) == 1.3
    assert score(0.8, 0.5, 1.6) == 1.6
    assert math.isfinite(score(0.8, 0.0, math.inf))
    assert score(0.1, 0.2, math.inf) > score(0.9, 0.1, math.inf)
    assert RULE.score(0.8, 0.5, reference=1.6) == 1.6


def test_the_weight_of_robustness_may_be_a_number() -> None:
    """Then it does not depend on what the stages before gave away: 3 points of robustness are worth 6 of accuracy."""
    fixed = replace(RULE, weight=2.0)
    assert fixed.score(0.75, 0.5, reference=1.0) == fixed.score(0.75, 0.5, reference=math.inf) == 1.75
    for reference in (1.0, 1.6):
        assert fixed.score(0.70, 0.53, reference) > fixed.score(0.755, 0.50, reference)
        assert RULE.score(0.70, 0.53, reference) < RULE.score(0.755, 0.50, reference)
    assert replace(RULE, weight=0.0).score(0.75, 0.5, reference=1.0) == 0.75


def test_a_tie_keeps_the_earlier_round() -> None:
    first, same, higher = (Best(r, s, 0.5, 0.5, 0.3) for r, s in ((1, 1.0), (2, 1.0), (3, 1.1)))
    assert better(None, first) is first
    assert better(first, same) is first
    assert better(first, higher) is higher
