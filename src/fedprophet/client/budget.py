"""Which plan a local iteration needs to stay within a memory budget: the cheapest whose predicted peak fits.

The attack and the step have a plan each. On a GPU, where workspaces are not predicted, the cheapest is taken that keeps
within the budget when it is tried. Plans are exact, but for those that are asked for with `rounded`.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from fedprophet.client.iteration import LocalIteration
from fedprophet.client.memory_plan import MemoryPlan, Step
from fedprophet.client.trials import tried
from fedprophet.errors import BudgetError
from fedprophet.sizes import format_size

TOLERANCE = 0.05
"""How far a measurement may exceed its prediction before a smaller budget is planned for."""
PARTS = 32
"""Fewer samples at a time than a batch has by this save next to nothing, and take long to predict."""


class Planned(NamedTuple):
    """A plan, and the bytes that an iteration by it is predicted to take, or took when it was tried."""

    plan: MemoryPlan
    peak: int


class Checked(NamedTuple):
    """A plan, the bytes that an iteration by it was predicted and measured to take, and the budget it was made for.

    On a GPU `limit` are the bytes that the allocator may hold for it: workspaces were measured under that limit.
    """

    plan: MemoryPlan
    peak: int
    measured: int
    budget: int
    limit: int | None = None


# Choosing ------------------------------------------------------------------------------------------------------------


def cheapest(iteration: LocalIteration, budget: int, *, rounded: bool = False) -> Planned:
    """Return the cheapest plan that is predicted to fit; BudgetError if none does."""
    step_peak = cache(iteration.step_peak)
    for attack in attacks(iteration):
        if (attack_peak := iteration.attack_peak(attack)) > budget:
            continue
        kept = iteration.kept(attack)
        for step in steps(iteration, rounded):
            if (peak := step_peak(step) + kept) <= budget:
                return Planned(_joined(attack, step), max(attack_peak, peak))
        if not kept:  # else there may be room beside an attack in fewer samples, which keeps less
            break
    raise _nothing_fits(iteration, budget, rounded)


def checked(iteration: LocalIteration, budget: int, *, rounded: bool = False) -> Checked:
    """Return the cheapest plan that fits when it is measured; BudgetError if none does.

    Where more is measured than predicted, the plan is made for a budget that is smaller by the same factor. On a
    GPU, where workspaces are not predicted, plans are tried one after the other.
    """
    if iteration.device.type == "cuda":
        return _first_that_passes(iteration, budget, rounded)
    aimed = budget
    while True:
        plan, peak = cheapest(iteration, aimed, rounded=rounded)
        measured = iteration.measured(plan)
        if measured <= budget and (aimed < budget or measured <= peak * (1 + TOLERANCE)):
            return Checked(plan, peak, measured, aimed)
        aimed = aimed * peak // measured


def _first_that_passes(iteration: LocalIteration, budget: int, rounded: bool) -> Checked:
    """Return the first plan, in the order of what they cost, that keeps within the budget when it is tried.

    Where no step does, the last attack is tried with all of them: its graph keeps least beside them.
    """
    first = [plan for plan in attacks(iteration) if iteration.attack_peak(plan) <= budget]
    second = [plan for plan in steps(iteration, rounded) if iteration.step_peak(plan) <= budget]
    left, more = list(first), list(second)
    while left and more:
        plan = _joined(left[0], more[0])
        trial = tried(iteration, plan, budget)
        if trial.peak <= budget:
            return Checked(plan, iteration.predicted(plan), trial.peak, budget, trial.limit)
        if trial.attack > trial.step:
            left.pop(0)
        else:
            more.pop(0)
        if left and not more and iteration.kept(left[0]) > iteration.kept(first[-1]):
            left, more = first[-1:], list(second)
    raise _nothing_fits(iteration, budget, rounded, tried=bool(first and second))


def least(iteration: LocalIteration, *, rounded: bool = False) -> int:
    """Return the bytes that the most economical plan is predicted to take.

    Plans that take no less than another are not predicted: larger pieces, and what could be sliced as well.
    """
    *_, pieces = (plan for plan in steps(iteration) if not plan.sliced)
    whole = [plan for plan in steps(iteration) if plan.sliced] or [MemoryPlan(step=Step.FUSED)]
    smallest = [replace(pieces, rounded=rounding) for rounding in ((False, True) if rounded else (False,))]
    last = {plan.attack_sliced: plan for plan in attacks(iteration)}  # of either kind
    step = min(map(iteration.step_peak, [*smallest, *whole])) + iteration.kept(last[False])
    attack = sys.maxsize
    for plan in last.values():
        if attack > step:  # one that takes no more than the step does not count, whatever another takes
            attack = min(attack, iteration.attack_peak(plan))
    return max(attack, step)


def _nothing_fits(iteration: LocalIteration, budget: int, rounded: bool, *, tried: bool = False) -> BudgetError:
    but = ", but no plan kept within the limit when it was tried, workspaces included" if tried else ""
    return BudgetError(
        f"{iteration.part.layers} cannot be trained within {format_size(budget)} with a batch of "
        f"{iteration.training.batch}: the most economical plan is predicted to take "
        f"{format_size(least(iteration, rounded=rounded), 2)}{but}. "
        "Give more memory, a smaller train.batch, or modules of fewer atoms (a lower memory.budget)"
    )


# Plans, in the order of what they cost -------------------------------------------------------------------------------


def attacks(iteration: LocalIteration) -> Iterator[MemoryPlan]:
    """Yield the plans of an attack: in fewer and fewer samples at a time, then by slices of weights as well.

    Norm layers that keep no statistics use the batch's in evaluation mode too: their samples know each other.
    """
    for sliced in _slicing(iteration):
        for size in (0, *(() if iteration.part.mixes_samples else _halves(iteration.training.batch))):
            yield MemoryPlan(attack=size, attack_sliced=sliced)


def steps(iteration: LocalIteration, rounded: bool = False) -> Iterator[MemoryPlan]:
    """Yield the plans of a step: the exact ones, then the rounded ones if these are asked for."""
    yield MemoryPlan(step=Step.WHOLE)
    for sliced in _slicing(iteration):
        yield MemoryPlan(step=Step.FUSED, sliced=sliced)
    for rounding in (False, True) if rounded else (False,):
        for sliced in (False,) if rounding else _slicing(iteration):
            yield MemoryPlan(step=Step.ATOMS, sliced=sliced, rounded=rounding)
        for size in _halves(iteration.training.batch):
            yield MemoryPlan(step=Step.PIECES, piece=size, rounded=rounding)


def _slicing(iteration: LocalIteration) -> tuple[bool, ...]:
    """Return whether plans are by slices of weights: some are on a CPU, whose convolutions copy weights."""
    return (False,) if iteration.device.type == "cuda" else (False, True)


def _halves(batch: int) -> Iterator[int]:
    """Yield half of a batch, a quarter of it, …, but not single samples: torch convolves them in ways of their own."""
    fewest = max(2, -(-batch // PARTS))
    while (batch := -(-batch // 2)) >= fewest:
        yield batch
        if batch == fewest:
            return


def _joined(attack: MemoryPlan, step: MemoryPlan) -> MemoryPlan:
    return replace(step, attack=attack.attack, attack_sliced=attack.attack_sliced)
