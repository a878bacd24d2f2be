"""Eq. 14 and 15 on a chain whose costs are set by hand."""

import pytest

from fedprophet.cascade.cost import AtomCost, ChainCost
from fedprophet.cascade.partition import Module
from fedprophet.messages.values import Resources
from fedprophet.server.assignment import assign, last_module


@pytest.fixture
def cost() -> ChainCost:
    """Three atoms of 100 parameters; activations 10, 20, 30; FLOPs 1000, 2000, 4000; vector features of 4 numbers."""
    atoms = tuple(AtomCost(f"a{i}", (), 100, 10 * (i + 1), 1000 * 2**i, (1, 4), (0.0, float("inf"))) for i in range(3))
    return ChainCost(atoms, (1, 4), batch=1, classes=2, copies=3)


@pytest.fixture
def modules() -> list[Module]:
    return [Module(i, i, i + 1, 0, 0, 100) for i in range(3)]


# A head reads 4 features and gives 2 classes: 10 parameters, 4·4 + 4·3·10 + 4·2 = 144 bytes and 8 FLOPs.
# Memory of modules 1, 1–2, 1–3: 4·(300+10)+144 = 1384; 4·(600+30)+144 = 2664; 4·(900+60) = 3840 (no head).
# FLOPs: 1008, 3008, 7000.
PLENTY = 10**9


@pytest.mark.parametrize(
    ("memory", "performance", "expected"),
    [
        (1384, 100.0, 0),  # room for one module only
        (2663, 100.0, 0),  # one byte short of two
        (2664, 100.0, 1),
        (3839, 100.0, 1),
        (3840, 100.0, 2),
        (PLENTY, 1.0, 0),  # as slow as the slowest: 1008 allowed
        (PLENTY, 2.98, 0),  # 3003.8 < 3008
        (PLENTY, 2.99, 1),  # 3013.9
        (PLENTY, 6.94, 1),  # 6995.5 < 7000
        (PLENTY, 6.95, 2),  # 7005.6
        (10, 1.0, 0),  # module m is always assigned, whatever fits
    ],
)
def test_both_constraints_decide(cost, modules, memory: int, performance: float, expected: int) -> None:
    assert last_module(cost, modules, 0, Resources(memory, performance, 1.0), slowest=1.0) == expected


def test_a_later_stage_counts_from_its_own_module(cost, modules) -> None:
    """Modules 2–3 without a head: 4·(600+50) = 2600 bytes; FLOPs 6000 against 2008 of module 2 with its head."""
    assert last_module(cost, modules, 1, Resources(2600, 3.0, 1.0), slowest=1.0) == 2
    assert last_module(cost, modules, 1, Resources(2599, 3.0, 1.0), slowest=1.0) == 1
    assert last_module(cost, modules, 1, Resources(2600, 2.9, 1.0), slowest=1.0) == 1
    assert last_module(cost, modules, 2, Resources(1, 1.0, 1.0), slowest=1.0) == 2


def test_the_slowest_of_the_round_sets_the_pace(cost, modules) -> None:
    available = {4: Resources(PLENTY, 10.0, 1.0), 7: Resources(PLENTY, 40.0, 1.0), 9: Resources(2664, 80.0, 1.0)}
    assert assign(cost, modules, 0, available) == {4: 0, 7: 1, 9: 1}
    assert assign(cost, modules, 0, {4: available[4]}) == {4: 0}
    assert assign(cost, modules, 0, {}) == {}
