"""Plans of a run with limited memory: predicted once, and what the server may ask for."""

from dataclasses import replace

import pytest
import torch
from iterations import HYPER, planned_iteration, small_chain

from fedprophet.cascade.atoms import Chain
from fedprophet.client import planning
from fedprophet.client.budget import Checked, Planned, cheapest, least
from fedprophet.client.iteration import LocalIteration
from fedprophet.client.memory_plan import PLAIN, MemoryPlan, Step
from fedprophet.client.part import ModelPart
from fedprophet.client.planning import Planner
from fedprophet.errors import BudgetError


def test_another_limit_needs_no_prediction_that_was_made(predictions) -> None:
    iteration, planner = planned_iteration(small_chain()), Planner()
    plain = iteration.predicted(PLAIN)
    predictions.clear()
    assert planner.cheapest(iteration, plain) == cheapest(iteration, plain)
    assert len(predictions) == 2 + 2, "an attack and a step, here and there"
    predictions.clear()
    assert planner.cheapest(iteration, plain + 1).plan == PLAIN
    assert planner.cheapest(replace(iteration, training=replace(HYPER, learning_rate=0.3, iterations=9)), plain)
    assert predictions == []
    planned = planner.cheapest(iteration, least(iteration))
    assert planned.plan != PLAIN
    predictions.clear()
    assert planner.cheapest(iteration, least(iteration)) == planned
    assert len(predictions) == 4, "those of `least` alone: three steps, and an attack that takes no more"


def test_only_so_many_predictions_are_remembered_the_newest(predictions, monkeypatch) -> None:
    """An attack and a step each: with room for four, the third kind of training lets those of the first go."""
    monkeypatch.setattr(planning, "MOST_KNOWN", 4)
    planner, iteration = Planner(), planned_iteration(small_chain())
    kinds = [replace(iteration, training=replace(HYPER, batch=batch)) for batch in (2, 4, 6)]
    made = []
    for kind in (*kinds, *reversed(kinds)):
        predictions.clear()
        planner.cheapest(kind, 10**9)
        made.append(len(predictions))
    assert made == [2, 2, 2, 0, 0, 2]
    assert len(planner._known) == 4


@pytest.mark.parametrize(
    "change",
    [
        {"training": replace(HYPER, batch=4)},
        {"training": replace(HYPER, momentum=0.0)},
        {"training": replace(HYPER, proximal=0.1)},
        {"threat": None},
        {"part": ModelPart(small_chain(), 1, 3, None), "input_shape": (16, 16, 16)},
    ],
    ids=["batch", "momentum", "anchors", "no attack", "part"],
)
def test_what_takes_other_memory_is_predicted_anew(change) -> None:
    iteration, planner = planned_iteration(small_chain()), Planner()
    planner.cheapest(iteration, 10**9)
    other = replace(iteration, **change)
    assert planner.cheapest(other, 10**9) == cheapest(other, 10**9)
    in_pieces = MemoryPlan(step=Step.PIECES, piece=2)  # the attack takes more than the step
    assert other.predicted(in_pieces) != iteration.predicted(in_pieces)


def test_a_limit_that_no_plan_fits_stays_an_error() -> None:
    iteration, planner = planned_iteration(small_chain()), Planner()
    for _ in range(2):
        with pytest.raises(BudgetError, match="the most economical plan"):
            planner.cheapest(iteration, 1000)


def test_what_it_would_take_is_that_of_a_plan_that_a_run_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded plans are none: here they take 300 bytes, exact ones 400."""
    monkeypatch.setattr(LocalIteration, "attack_peak", lambda self, plan: 100)
    monkeypatch.setattr(LocalIteration, "step_peak", lambda self, plan: 300 if plan.rounded else 400)
    assert cheapest(planned_iteration(small_chain()), 350, rounded=True).plan.rounded
    with pytest.raises(BudgetError, match=r"within 350 B .* is predicted to take 400 B\. Give more"):
        Planner().cheapest(planned_iteration(small_chain()), 350)


def test_limits_that_are_much_the_same_are_one() -> None:
    """60,000,000 has 26 binary digits, of which the last 20 are cut off: 57 · 2^20."""
    assert planning._coarse(60_000_000) == 57 * 2**20
    assert planning._coarse(57 * 2**20) == 57 * 2**20
    assert [planning._coarse(size) for size in (0, 1, 63, 64, 65, 127)] == [0, 1, 63, 64, 64, 126]


def test_on_a_gpu_a_plan_is_tried_once_and_the_part_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    iteration, tried = planned_iteration(small_chain()), list[int]()

    def checked(iteration: LocalIteration, limit: int) -> Checked:
        tried.append(limit)
        with torch.no_grad():
            for tensor in iteration.part.tensors:
                tensor.add_(1)
        return Checked(MemoryPlan(attack=2), 30, 40, limit, 90)

    monkeypatch.setattr(planning, "checked", checked)
    monkeypatch.setattr(Chain, "device", torch.device("cuda", 0))
    before = [tensor.clone() for tensor in iteration.part.tensors]
    planner = Planner()
    for limit in (100, 101, 200):
        assert planner.cheapest(iteration, limit) == Planned(MemoryPlan(attack=2), 40)
    assert tried == [100, 200]
    assert all(torch.equal(a, b) for a, b in zip(before, iteration.part.tensors, strict=True))
