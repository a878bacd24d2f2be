"""Norm statistics of several clients, pooled: what all their samples together have."""

import pytest
import torch

from fedprophet.messages.answers import Trained
from fedprophet.messages.tasks import Train
from fedprophet.messages.values import LocalTraining
from fedprophet.server.aggregate import Aggregator
from fedprophet.server.pooling import pooled
from fedprophet.server.rules import RULES
from fedprophet.server.rules.mean import partial_average

ROBUST = ("trimmed-mean", "median")
TRAINING = LocalTraining(1, 1, 0.1, 0.9, 0.0, 0.0)


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def rule_of(name: str):
    return RULES[name].configured(lambda kind: kind())


def layer(mean: torch.Tensor, variance: torch.Tensor, prefix: str = "bn.") -> dict[str, torch.Tensor]:
    return {f"{prefix}running_mean": mean, f"{prefix}running_var": variance}


EMPTY = layer(t(0), t(1))


def test_two_clients_by_hand():
    """Client 1 has 1 and 3 (mean 2, variance 1), client 2 has 5, 7, 9, 11 (mean 8, variance 5)."""
    found = pooled(partial_average)(EMPTY, [(2.0, layer(t(2), t(1))), (4.0, layer(t(8), t(5)))])
    assert found["bn.running_mean"].item() == 6
    # (2 · (1 + 4²) + 4 · (5 + 2²)) / 6, which is (25 + 9 + 1 + 1 + 9 + 25) / 6 of the six samples
    assert found["bn.running_var"].item() == pytest.approx(70 / 6, rel=1e-7)


def test_the_pooled_variance_is_that_of_all_samples_together():
    draw = torch.Generator().manual_seed(0)
    samples = [torch.randn(n, 3, generator=draw, dtype=torch.float64) * n + n for n in (2, 5, 11)]
    sent = [(float(len(x)), layer(x.mean(0), x.var(0, correction=0))) for x in samples]
    found, whole = (
        pooled(partial_average)(layer(torch.zeros(3).double(), torch.ones(3).double()), sent),
        torch.cat(samples),
    )
    torch.testing.assert_close(found["bn.running_mean"], whole.mean(0))
    torch.testing.assert_close(found["bn.running_var"], whole.var(0, correction=0))


def test_clients_that_agree_stay_as_they_are_to_the_bit():
    same = layer(t(0.1, 0.7), t(1e-30, 3.3))
    found = pooled(partial_average)(layer(t(0, 0), t(1, 1)), [(3.0, same), (7.0, same), (11.0, same)])
    assert all(torch.equal(found[name], same[name]) for name in same)


@pytest.mark.parametrize("rule", sorted(RULES))
def test_parameters_beside_statistics_are_joined_as_without_pooling(rule):
    """Also whole numbers, which count batches, and a variance that came without a mean."""
    draw = torch.Generator().manual_seed(1)
    names = ("w", "bn.weight", "other.running_var", "lonely.running_mean")
    current = {**{name: torch.zeros(4) for name in names}, "bn.num_batches_tracked": torch.tensor(0)}

    def sent(client):
        values = {name: torch.rand(4, generator=draw) for name in names}
        return {**values, "bn.num_batches_tracked": torch.tensor(10 + client)}

    updates = [(1.0 + client, sent(client)) for client in range(5)]
    plain, found = rule_of(rule)(current, updates), pooled(rule_of(rule))(current, updates)
    assert all(torch.equal(found[name], plain[name]) for name in current)
    assert found["bn.num_batches_tracked"].item() == 12  # the median; the mean, 190 / 15 = 12.7, is cut


@pytest.mark.parametrize("rule", ["mean", *ROBUST])
def test_three_clients_through_each_rule_by_hand(rule):
    """Means 0, 1, 5 and variances 4, 2, 3, of equal weight; the trimmed mean of three is the middle one."""
    sent = [(1.0, layer(t(m), t(v))) for m, v in ((0, 4), (1, 2), (5, 3))]
    found = pooled(rule_of(rule))(EMPTY, sent)
    # Mean 2: variances about it 4 + 4, 2 + 1, 3 + 9. Middle 1: 4 + 1, 2 + 0, 3 + 16.
    mean, variance = (2, 23 / 3) if rule == "mean" else (1, 5)
    assert found["bn.running_mean"].item() == pytest.approx(mean)
    assert found["bn.running_var"].item() == pytest.approx(variance)


def test_clipped_statistics_by_hand():
    """Means join first, clipped to the median norm; then variances, clipped by a norm of their own."""
    sent = [(1.0, layer(t(m), t(1))) for m in (3, 3, 30)]
    found = pooled(rule_of("clip"))(EMPTY, sent)
    # The joined mean is (3 + 3 + 3) / 3 = 3, so variances about it are 1, 1 and 1 + 27²: updates of 0, 0 and 729, of
    # which the last is scaled to their median, 0.
    assert found["bn.running_mean"].item() == pytest.approx(3)
    assert found["bn.running_var"].item() == pytest.approx(1)


def test_weights_are_not_clipped_by_the_size_of_statistics():
    """Weights go 1, 1 and 4 with the norm 1 in the middle; statistics that went far would have let the last pass."""
    sent = [(1.0, {**layer(t(100), t(1)), "w": t(w)}) for w in (1, 1, 4)]
    found = pooled(rule_of("clip"))({**EMPTY, "w": t(0)}, sent)
    assert found["w"].item() == pytest.approx(1)
    assert found["bn.running_mean"].item() == pytest.approx(100)


@pytest.mark.parametrize("rule", ROBUST)
@pytest.mark.parametrize("lie", [layer(t(1e18), t(1)), layer(t(-1e18), t(1)), layer(t(0), t(3e38)), layer(t(0), t(0))])
def test_one_bad_client_moves_statistics_no_further_than_the_others_lie_apart(rule, lie):
    honest = [(1.0, layer(t(m), t(v))) for m, v in ((-1, 1), (0, 2), (0.5, 2), (1, 3))]
    found = pooled(rule_of(rule))(EMPTY, [*honest, (1.0, lie)])
    assert -1 <= found["bn.running_mean"].item() <= 1
    # With a centre within [−1, 1], no honest variance is widened by more than 2².
    assert 1 <= found["bn.running_var"].item() <= 3 + 4


@pytest.mark.parametrize("rule", sorted(RULES))
def test_variances_are_never_negative_or_infinite(rule):
    draw = torch.Generator().manual_seed(3)
    for _ in range(20):
        sent = [
            (1.0, layer(1e9 * torch.randn(8, generator=draw), 10 ** (20 * torch.rand(8, generator=draw) - 10)))
            for _ in range(4)
        ]
        found = pooled(rule_of(rule))(layer(torch.zeros(8), torch.ones(8)), sent)["bn.running_var"]
        assert bool((found >= 0).all())
        assert bool(torch.isfinite(found).all())


def test_a_layer_that_only_some_clients_sent_is_pooled_over_them():
    current = {**EMPTY, **layer(t(7), t(7), "late.")}
    sent = [(1.0, layer(t(0), t(1))), (1.0, {**layer(t(2), t(1)), **layer(t(4), t(9), "late.")})]
    found = pooled(partial_average)(current, sent)
    assert (found["bn.running_mean"].item(), found["bn.running_var"].item()) == (1, 2)
    assert (found["late.running_mean"].item(), found["late.running_var"].item()) == (4, 9)


def test_half_precision_is_pooled_in_full():
    """A quarter of 256² beside 1 is rounded once, at the end."""
    sent = [(1.0, layer(t(m).bfloat16(), t(1).bfloat16())) for m in (256, 512)]
    found = pooled(partial_average)({name: value.bfloat16() for name, value in EMPTY.items()}, sent)
    assert found["bn.running_var"].dtype == torch.bfloat16
    assert found["bn.running_var"].item() == 128**2


@pytest.mark.parametrize("pools", [True, False])
def test_the_aggregator_pools_where_it_is_told_to(pools):
    current = {**EMPTY, "w": t(0)}
    training = {"round": 1, "seed": 0, "training": TRAINING, "parameters": current}
    tasks = [Train(client=client, **training) for client in (1, 2)]
    updates = [
        Trained(round=1, client=client, weight=1.0, loss=1.0, samples=1, parameters={**layer(t(m), t(1)), "w": t(m)})
        for client, m in ((1, 0), (2, 4))
    ]
    aggregator = Aggregator(pools=pools)
    found = aggregator.join_updates(current, aggregator.usable(tasks, updates, {}, lambda task: {}))
    assert (found["bn.running_mean"].item(), found["w"].item()) == (2, 2)
    assert found["bn.running_var"].item() == (5 if pools else 1)
    assert aggregator.is_mean, "the rule is what it was, however statistics are joined"
