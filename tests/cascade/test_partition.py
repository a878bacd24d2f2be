"""Algorithm 1 on costs made by hand, no model involved."""

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedprophet.cascade.cost import AtomCost, ChainCost
from fedprophet.cascade.heads import head_cost
from fedprophet.cascade.partition import Module, cut_further, partition, smallest_budget
from fedprophet.errors import BudgetError


def chain(atoms, batch=1, classes=1, copies=1):
    """Return a chain's cost from (parameters, activations, output of one sample) of each atom; 7 FLOPs each."""
    costs = (
        AtomCost(f"layers.{i}", (f"Layer {i + 1}",), parameters, activations, 7, (batch, *output))
        for i, (parameters, activations, output) in enumerate(atoms)
    )
    return ChainCost(tuple(costs), (batch, 1), batch, classes, copies)


outputs = st.one_of(
    st.tuples(st.integers(1, 40)),
    st.tuples(st.integers(1, 6), st.integers(1, 8)),
    st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4)),
)
atom_lists = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 60), outputs), min_size=1, max_size=8)


@st.composite
def chains(draw, growing=False):
    """Draw any chain; where it must grow, an atom keeps enough activations to outweigh the head that it displaces."""
    batch, classes, copies = draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.integers(2, 4))
    atoms = draw(atom_lists)
    if growing:
        heads = [head_cost((batch, *output), classes, copies).memory for _, _, output in atoms]
        heads[-1] = 0
        displaced = [0, *(max(0, before - after) for before, after in pairwise(heads))]
        atoms = [(p, a + -(-d // 4), output) for (p, a, output), d in zip(atoms, displaced, strict=True)]
    return chain(atoms, batch, classes, copies)


@given(cost=chains(), spare=st.integers(0, 1000))
def test_any_chain_is_cut_in_order_within_the_budget(cost, spare):
    """Holds for every cost: order kept, each atom once, each module fits and could not take the next atom as well."""
    budget = smallest_budget(cost)[0] + spare
    modules = partition(cost, budget)
    assert [module.index for module in modules] == list(range(len(modules)))
    assert [atom for m in modules for atom in range(m.first, m.last)] == list(range(len(cost.atoms)))
    for module in modules:
        assert module.memory == cost.memory(module.first, module.last) <= budget
        assert module.flops == cost.flops(module.first, module.last)
        assert module.parameters == cost.parameters(module.first, module.last)
    for module in modules[:-1]:
        assert cost.memory(module.first, module.last + 1) > budget


@given(cost=chains(growing=True), spare=st.integers(0, 1000))
def test_no_two_neighbours_of_a_growing_chain_could_be_merged(cost, spare):
    """Where one more atom never makes a module cheaper, two neighbours together are always over the budget."""
    budget = smallest_budget(cost)[0] + spare
    for left, right in pairwise(partition(cost, budget)):
        assert cost.memory(left.first, right.last) > budget


def fewest(cost, budget):
    """Return the least number of modules over every way to cut the chain."""
    atoms = len(cost.atoms)
    for cuts in range(atoms):
        for inner in combinations(range(1, atoms), cuts):
            if all(cost.memory(first, last) <= budget for first, last in pairwise((0, *inner, atoms))):
                return cuts + 1
    raise AssertionError("no partition at all")


@given(cost=chains(growing=True), spare=st.integers(0, 1000))
def test_greedy_is_minimal_on_growing_chains(cost, spare):
    budget = smallest_budget(cost)[0] + spare
    assert len(partition(cost, budget)) == fewest(cost, budget)


@pytest.mark.parametrize(
    ("atoms", "wide", "budget", "cuts", "best"),
    [
        pytest.param(
            [(1, 20, (1,)), (1, 1, (1,)), (1, 1, (10,)), (1, 1, (1,))],
            (1, 3),
            103,
            [(0, 1), (1, 2), (2, 4)],
            2,
            id="headless-last-module",
        ),
        pytest.param(
            [(1, 1, (1,)), (1, 1, (10,)), (1, 1, (1,)), (1, 20, (1,))],
            (0, 2),
            99,
            [(0, 1), (1, 3), (3, 4)],
            2,
            id="shrinking-feature",
        ),
    ],
)
def test_greedy_is_not_minimal_where_cost_shrinks(atoms, wide, budget, cuts, best):
    """Algorithm 1 is minimal only where cost grows with length: here it is not, and neighbours could be merged.

    A head on D features takes 4 · (2D + 2) bytes here, an atom 8 (the large one 84). Two atoms with the head on the
    wide feature behind them take 16 + 88 = 104 bytes, over the budget, so the module is closed. One atom further the
    wide feature is inside the module: 24 bytes where the model ends there (no head), 24 + 16 where the feature has
    shrunk again. The algorithm does not look ahead that far, as in the paper.
    """
    cost = chain(atoms)
    assert cost.memory(*wide) == 104
    assert cost.memory(wide[0], wide[1] + 1) <= budget
    modules = partition(cost, budget)
    assert [(module.first, module.last) for module in modules] == cuts
    assert fewest(cost, budget) == best < len(modules)


def test_a_model_that_fits_as_a_whole_is_one_module_whatever_its_heads_would_need():
    """The wide feature's head alone takes 88 bytes, the whole model, which has none, 24."""
    cost = chain([(1, 1, (1,)), (1, 1, (10,)), (1, 1, (1,))])
    assert cost.total_memory == 24
    assert [(module.first, module.last) for module in partition(cost, 24)] == [(0, 3)]
    with pytest.raises(BudgetError, match="The smallest budget that works is 24 bytes"):
        partition(cost, 23)


def test_modules_by_hand():
    """Heads on 1 feature take 16 bytes and 1 FLOP; atoms 4 · (parameters + activations) bytes: 20, 4, 24 and 4."""
    cost = chain([(2, 3, (1,)), (1, 0, (1,)), (5, 1, (1,)), (0, 1, (1,))])
    assert partition(cost, 44) == (
        Module(index=0, first=0, last=2, memory=20 + 4 + 16, flops=7 + 7 + 1, parameters=3),
        Module(index=1, first=2, last=4, memory=24 + 4, flops=7 + 7, parameters=5),
    )


def test_fits_means_at_most_the_budget():
    """Two atoms of 8 bytes and a head of 16 take 32."""
    cost = chain([(1, 1, (1,))] * 5)
    assert [(m.first, m.last) for m in partition(cost, 32)] == [(0, 2), (2, 5)]
    assert [(m.first, m.last) for m in partition(cost, 31)] == [(0, 1), (1, 2), (2, 3), (3, 5)]


@given(cost=chains())
def test_the_whole_model_in_one_module(cost):
    budget = max(cost.memory(0, last) for last in range(1, len(cost.atoms) + 1))
    (module,) = partition(cost, budget)
    assert (module.memory, module.flops) == (cost.total_memory, cost.total_flops)


def test_too_small_a_budget_names_the_atom_and_both_sizes():
    cost = chain([(1, 1, (1,)), (1, 1, (10,)), *[(1, 1, (1,))] * 11], batch=1)
    assert smallest_budget(cost) == (96, 1)
    assert partition(cost, 96)
    with pytest.raises(BudgetError) as error:
        partition(cost, 95)
    for part in ("Layer 2", "layers.1", "budget of 95 bytes", "needs 96 bytes", "smallest budget that works is 96"):
        assert part in str(error.value)


def test_the_last_atom_needs_no_head():
    assert smallest_budget(chain([(1, 1, (1,)), (1, 4, (50,))])) == (24, 0)


@pytest.mark.parametrize(
    ("third", "fourth", "last", "cuts"),
    [
        pytest.param(1, 1, 1, [(0, 2), (2, 5)], id="24 bytes fit"),
        pytest.param(1, 2, 3, [(0, 2), (2, 3), (3, 5)], id="8 + 12 + 16 do not: 8 and a head, 12 + 16"),
        pytest.param(1, 5, 2, [(0, 2), (2, 3), (3, 4), (4, 5)], id="24 and a head are too much on their own"),
    ],
)
def test_a_module_that_needs_more_than_the_budget_is_cut_further(third, fourth, last, cuts):
    """Atoms of 8 bytes on paper, heads of 16: a budget of 32 makes modules of 2 and 3 atoms: 32 and 24 bytes.

    What they need is the same but for the last three: 4 + 4 times the number that is given. The first two need 32.
    """
    cost = chain([(1, 1, (1,))] * 5)
    needs = chain([(1, activations, (1,)) for activations in (1, 1, third, fourth, last)])
    modules = partition(cost, 32)
    assert [(module.first, module.last) for module in modules] == [(0, 2), (2, 5)]
    found = cut_further(modules, cost, needs, 32)
    assert [(module.first, module.last) for module in found] == cuts
    assert [module.index for module in found] == list(range(len(cuts)))
    for module in found:
        assert module.memory == cost.memory(module.first, module.last)  # on paper, as that of the others
        assert needs.memory(module.first, module.last) <= 32 or module.last - module.first == 1


@given(cost=chains(), needs=chains(), spare=st.integers(0, 1000))
def test_modules_that_fit_stay_as_they_are(cost, needs, spare):
    budget = smallest_budget(cost)[0] + spare
    atoms = min(len(cost.atoms), len(needs.atoms))
    cost, needs = (replace(each, atoms=each.atoms[:atoms]) for each in (cost, needs))
    budget = max(budget, smallest_budget(cost)[0])
    modules = partition(cost, budget)
    found = {(module.first, module.last) for module in cut_further(modules, cost, needs, budget)}
    assert sorted(atom for span in found for atom in range(*span)) == list(range(atoms))
    for module in modules:
        kept = module.last - module.first == 1 or needs.memory(module.first, module.last) <= budget
        assert ((module.first, module.last) in found) == kept
