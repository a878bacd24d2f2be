"""Plans of a run with limited memory: predicted once, and what the server may ask for."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from fedprophet.attacks.pgd import pgd
from fedprophet.cascade.atoms import Chain, explicit_chain
from fedprophet.cascade.cost import ChainCost, cost_of
from fedprophet.cascade.measure import measured_peak
from fedprophet.client import planning
from fedprophet.client.budget import Checked, LocalIteration, MeasuredCost, Planned, iteration_of
from fedprophet.client.memory_plan import PLAIN, MemoryPlan, Step
from fedprophet.client.part import ModelPart
from fedprophet.client.planning import PlannedCost, Planner, TriedCost
from fedprophet.errors import BudgetError
from fedprophet.messages.values import LocalTraining
from fedprophet.threat import input_threat

HYPER = LocalTraining(1, 8, learning_rate=0.1, momentum=0.9, weight_decay=1e-4, strong_convexity=1e-5)
SHAPE = (3, 16, 16)


def _chain() -> Chain:
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU()) for i, o in ((3, 16), (16, 16))
    ]
    return explicit_chain(nn.Sequential(*blocks, nn.Sequential(nn.Flatten(), nn.Linear(16 * 256, 10))))


def _cost(chain: Chain) -> ChainCost:
    return cost_of(chain, SHAPE, HYPER.batch, 10)


def _iteration(chain: Chain) -> LocalIteration:
    return iteration_of(chain, _cost(chain), 0, len(chain), HYPER)


@pytest.fixture
def predictions(monkeypatch) -> list[object]:
    """Everything that is predicted from now on."""
    made: list[object] = []
    peak = LocalIteration._peak
    monkeypatch.setattr(LocalIteration, "_peak", lambda self, compute: made.append(self) or peak(self, compute))
    return made


def test_another_limit_needs_no_prediction_that_was_made(predictions) -> None:
    iteration, planner = _iteration(_chain()), Planner()
    plain = iteration.predicted(PLAIN)
    predictions.clear()
    assert planner.cheapest(iteration, plain) == iteration.cheapest(plain)
    assert len(predictions) == 2 + 2, "an attack and a step, here and there"
    predictions.clear()
    assert planner.cheapest(iteration, plain + 1).plan == PLAIN
    assert planner.cheapest(replace(iteration, training=replace(HYPER, learning_rate=0.3, iterations=9)), plain)
    assert predictions == []
    planned = planner.cheapest(iteration, iteration.least())
    assert planned.plan != PLAIN
    predictions.clear()
    assert planner.cheapest(iteration, iteration.least()) == planned
    assert len(predictions) == 4, "those of `least` alone: three steps, and an attack that takes no more"


def test_only_so_many_predictions_are_remembered_the_newest(predictions, monkeypatch) -> None:
    """An attack and a step each: with room for four, the third kind of training lets those of the first go."""
    monkeypatch.setattr(planning, "MOST_KNOWN", 4)
    planner, iteration = Planner(), _iteration(_chain())
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
        {"part": ModelPart(_chain(), 1, 3, None), "input_shape": (16, 16, 16)},
    ],
    ids=["batch", "momentum", "anchors", "no attack", "part"],
)
def test_what_takes_other_memory_is_predicted_anew(change) -> None:
    iteration, planner = _iteration(_chain()), Planner()
    planner.cheapest(iteration, 10**9)
    other = replace(iteration, **change)
    assert planner.cheapest(other, 10**9) == other.cheapest(10**9)
    in_pieces = MemoryPlan(step=Step.PIECES, piece=2)  # the attack takes more than the step
    assert other.predicted(in_pieces) != iteration.predicted(in_pieces)


def test_a_limit_that_no_plan_fits_stays_an_error() -> None:
    iteration, planner = _iteration(_chain()), Planner()
    for _ in range(2):
        with pytest.raises(BudgetError, match="the most economical plan"):
            planner.cheapest(iteration, 1000)


def test_what_it_would_take_is_that_of_a_plan_that_a_run_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded plans are none: here they take 300 bytes, exact ones 400."""
    monkeypatch.setattr(LocalIteration, "_attack_peak", lambda self, plan: 100)
    monkeypatch.setattr(LocalIteration, "_step_peak", lambda self, plan: 300 if plan.rounded else 400)
    assert _iteration(_chain()).cheapest(350).plan.rounded
    with pytest.raises(BudgetError, match=r"within 350 B .* is predicted to take 400 B\. Give more"):
        Planner().cheapest(_iteration(_chain()), 350)


def test_the_server_allows_for_what_is_not_predicted() -> None:
    """One hundredth more than the most economical plan takes, rounded up, or 8 KiB where that is more."""
    chain = _chain()
    measured, planned = (kind.of(_cost(chain), chain, HYPER) for kind in (MeasuredCost, PlannedCost))
    assert measured.memory(0, 1) < 819_200 < measured.memory(0, 3)
    assert planned.memory(0, 1) == measured.memory(0, 1) + 8192
    assert planned.memory(0, 3) == measured.memory(0, 3) + math.ceil(measured.memory(0, 3) / 100)
    clean = replace(iteration_of(chain, planned, 0, 3, HYPER), threat=None).least()
    assert planned.clean_memory == clean + math.ceil(clean / 100)
    assert planned.clean_memory <= planned.total_memory


def test_all_that_the_server_asks_for_is_predicted_for_one_place(predictions: list[LocalIteration]) -> None:
    chain, place = _chain(), torch.device("cuda")
    planned = PlannedCost.of(_cost(chain), chain, HYPER, place)
    for ask in (lambda: planned.memory(1, 2), lambda: planned.clean_memory, lambda: planned.attack_memory(3, 8)):
        predictions.clear()
        assert ask() > 0
        assert {iteration.place for iteration in predictions} == {place}


@pytest.mark.parametrize("batch", [8, 3])
def test_what_an_evaluation_takes_beside_the_model_is_what_is_measured(batch: int) -> None:
    chain = _chain()
    part, threat = ModelPart(chain, 0, 3, None), input_threat(0.1, 0.05, 2)
    labels = torch.zeros(batch, dtype=torch.long)

    def attack() -> None:
        x = torch.rand(batch, *SHAPE)
        with part.still(), part.untrained():
            pgd(lambda z: part.losses(z, labels, 0.0).sum(), x, threat, torch.Generator())

    attack()  # what is set up once
    predicted = PlannedCost.of(_cost(chain), chain, HYPER).attack_memory(3, batch)
    assert predicted == pytest.approx(measured_peak(attack, torch.device("cpu")), rel=0.05)


def test_limits_that_are_much_the_same_are_one() -> None:
    """60,000,000 has 26 binary digits, of which the last 20 are cut off: 57 · 2^20."""
    assert planning._coarse(60_000_000) == 57 * 2**20
    assert planning._coarse(57 * 2**20) == 57 * 2**20
    assert [planning._coarse(size) for size in (0, 1, 63, 64, 65, 127)] == [0, 1, 63, 64, 64, 126]


def test_on_a_gpu_a_plan_is_tried_once_and_the_part_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    iteration, tried = _iteration(_chain()), list[int]()

    def checked(self: LocalIteration, limit: int) -> Checked:
        tried.append(limit)
        with torch.no_grad():
            for tensor in self.part.tensors:
                tensor.add_(1)
        return Checked(MemoryPlan(attack=2), 30, 40, limit, 90)

    monkeypatch.setattr(LocalIteration, "checked", checked)
    monkeypatch.setattr(Chain, "device", torch.device("cuda", 0))
    before = [tensor.clone() for tensor in iteration.part.tensors]
    planner = Planner()
    for limit in (100, 101, 200):
        assert planner.cheapest(iteration, limit) == Planned(MemoryPlan(attack=2), 40)
    assert tried == [100, 200]
    assert all(torch.equal(a, b) for a, b in zip(before, iteration.part.tensors, strict=True))


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
    monkeypatch.setattr(planning, "MOST", most)
    monkeypatch.setattr(MeasuredCost, "memory", lambda self, first, last: 1_000_000)
    chain = _chain()
    cost = TriedCost.of(_cost(chain), chain, HYPER)
    before = torch.get_rng_state()
    assert cost.memory(0, 2) == cost.memory(0, 2) == need
    assert limits == tried
    assert torch.equal(torch.get_rng_state(), before), "a run's draws must not depend on it"
