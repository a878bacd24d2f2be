"""What a chain costs with plans: what modules are cut by, and what the server may ask of a client."""

import math
from dataclasses import replace

import pytest
import torch
from iterations import HYPER, SHAPE, network, paper_cost, small_chain

from fedprophet.attacks.pgd import pgd
from fedprophet.cascade.atoms import explicit_chain
from fedprophet.cascade.cost import cost_of
from fedprophet.cascade.measure import measured_peak
from fedprophet.cascade.partition import partition
from fedprophet.client import planned_cost
from fedprophet.client.aims import Labels
from fedprophet.client.budget import Planned, least
from fedprophet.client.iteration import LocalIteration, iteration_of
from fedprophet.client.memory_plan import PLAIN
from fedprophet.client.part import ModelPart
from fedprophet.client.planned_cost import MeasuredCost, PlannedCost, TriedCost
from fedprophet.client.planning import Planner
from fedprophet.errors import BudgetError
from fedprophet.threat import input_threat


def test_the_server_allows_for_what_is_not_predicted() -> None:
    """One hundredth more than the most economical plan takes, rounded up, or 8 KiB where that is more."""
    chain = small_chain()
    measured, planned = (kind.of(paper_cost(chain), chain, HYPER) for kind in (MeasuredCost, PlannedCost))
    assert measured.memory(0, 1) < 819_200 < measured.memory(0, 3)
    assert planned.memory(0, 1) == measured.memory(0, 1) + 8192
    assert planned.memory(0, 3) == measured.memory(0, 3) + math.ceil(measured.memory(0, 3) / 100)
    clean = least(replace(iteration_of(chain, planned, 0, 3, HYPER), threat=None))
    assert planned.clean_memory == clean + math.ceil(clean / 100)
    assert planned.clean_memory <= planned.total_memory
    assert measured.clean_memory == measured.total_memory, "an attack is not told apart where nothing is planned"


def test_all_that_the_server_asks_for_is_predicted_for_one_place(predictions: list[LocalIteration]) -> None:
    chain, place = small_chain(), torch.device("cuda")
    planned = PlannedCost.of(paper_cost(chain), chain, HYPER, place)
    for ask in (lambda: planned.memory(1, 2), lambda: planned.clean_memory, lambda: planned.attack_memory(3, 8)):
        predictions.clear()
        assert ask() > 0
        assert {iteration.place for iteration in predictions} == {place}


@pytest.mark.parametrize("batch", [8, 3])
def test_what_an_evaluation_takes_beside_the_model_is_what_is_measured(batch: int) -> None:
    chain = small_chain()
    part, threat = ModelPart(chain, 0, 3, None), input_threat(0.1, 0.05, 2)
    labels = torch.zeros(batch, dtype=torch.long)

    def attack() -> None:
        x = torch.rand(batch, *SHAPE)
        with part.still(), part.untrained():
            pgd(lambda z: part.exit_losses(part.features(z), Labels(labels), 0.0).sum(), x, threat, torch.Generator())

    attack()  # what is set up once
    predicted = PlannedCost.of(paper_cost(chain), chain, HYPER).attack_memory(3, batch)
    assert predicted == pytest.approx(measured_peak(attack, torch.device("cpu")), rel=0.05)


@pytest.mark.parametrize(
    ("enough", "most", "need", "tried"),
    [
        (990_000, 4, 1_010_000, [1_000_000]),
        (1_040_000, 4, 1_050_804, [1_000_000, 1_020_000, 1_040_400]),
        (10**9, 1.03, 1_050_804, [1_000_000, 1_020_000]),
    ],
)
def test_on_a_gpu_a_client_needs_what_a_trial_passes_with(
    enough: int, most: float, need: int, tried: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,000,000 bytes are predicted, with a hundredth beside them; then each time a fiftieth more, of which a
    hundredth is not for the trial, until it passes or would have too much. What was tried is remembered.
    """
    limits: list[int] = []

    def cheapest(self: Planner, iteration: LocalIteration, limit: int) -> Planned:
        torch.rand(3)  # the inputs of a trial
        limits.append(limit)
        if limit < enough:
            raise BudgetError
        return Planned(PLAIN, 1)

    monkeypatch.setattr(Planner, "cheapest", cheapest)
    monkeypatch.setattr(planned_cost, "MOST", most)
    monkeypatch.setattr(MeasuredCost, "memory", lambda self, first, last: 1_000_000)
    chain = small_chain()
    cost = TriedCost.of(paper_cost(chain), chain, HYPER)
    before = torch.get_rng_state()
    assert cost.memory(0, 2) == cost.memory(0, 2) == need
    assert limits == tried
    assert torch.equal(torch.get_rng_state(), before), "a run's draws must not depend on it"


def test_modules_cut_by_what_they_take_fit_and_the_rest_of_the_cost_is_the_papers() -> None:
    """The paper counts less for the second atom than it takes, and more for the whole network."""
    model = network()
    chain = explicit_chain(model)
    paper = cost_of(chain, (3, 32, 32), 8, 10)
    state, calls = torch.get_rng_state(), []
    measured = MeasuredCost.of(paper, chain, HYPER)
    for first, last in ((0, 1), (1, 2), (1, 4), (0, 5)):
        iteration = iteration_of(chain, paper, first, last, HYPER)
        assert measured.memory(first, last) == least(iteration)
        assert (iteration.part.head is None) == (last == 5)
        assert measured.flops(first, last) == paper.flops(first, last)
    modules = partition(measured, measured.memory(1, 2))
    assert all(module.memory == measured.memory(module.first, module.last) for module in modules)
    assert [module.last for module in modules][-1] == 5
    assert measured.total_memory == measured.memory(0, 5) != paper.total_memory
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planned_cost, "least", calls.append)
        measured.memory(0, 5)
    assert calls == []
