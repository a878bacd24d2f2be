"""The plan that a budget leads to, and the promise that it is kept."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from iterations import HYPER, STEPS, block, iteration_on, network
from torch import nn

from fedprophet.cascade.atoms import Chain, chain_of
from fedprophet.cascade.cost import cost_of
from fedprophet.cascade.heads import build_head
from fedprophet.cascade.partition import partition
from fedprophet.client.budget import attacks, cheapest, checked, least, steps
from fedprophet.client.iteration import LocalIteration
from fedprophet.client.memory_plan import PLAIN, MemoryPlan, Step
from fedprophet.client.part import ModelPart
from fedprophet.client.planning import Planner
from fedprophet.client.trainer import train
from fedprophet.errors import BudgetError
from fedprophet.messages.tasks import Train
from fedprophet.models import build
from fedprophet.threat import ThreatModel, input_threat


@pytest.mark.slow
def test_the_cheapest_plan_that_fits_is_chosen_half_by_half() -> None:
    """The first of each half, in the order of what they cost, whose own prediction is within the budget."""
    iteration = iteration_on()
    still = replace(iteration, threat=None)
    attack_peaks = {size: iteration.predicted(replace(STEPS[-1], attack=size)) for size in (0, 4, 2)}
    step_peaks = {plan: still.predicted(plan) for plan in STEPS}
    assert len(set(attack_peaks.values())) > 1
    assert len(set(step_peaks.values())) == len(step_peaks)
    fewest = least(iteration)
    assert fewest == max(min(attack_peaks.values()), min(step_peaks.values()))
    chosen = set()
    for budget in (iteration.predicted(PLAIN), step_peaks[PLAIN] - 1, step_peaks[STEPS[-2]], fewest):
        attack = next(size for size, peak in attack_peaks.items() if peak <= budget)
        step = next(plan for plan, peak in step_peaks.items() if peak <= budget)
        found = cheapest(iteration, budget)
        assert found.plan == replace(step, attack=attack)
        assert found.peak == iteration.predicted(found.plan) <= budget
        chosen.add(found.plan)
    assert PLAIN in chosen
    assert len(chosen) == 4


@pytest.mark.parametrize(
    ("batch", "sizes"),
    [
        (64, [32, 16, 8, 4, 2]),
        (8, [4, 2]),
        (7, [4, 2]),
        (3, [2]),
        (2, []),
        (1, []),
        (100, [50, 25, 13, 7, 4]),
        (33, [17, 9, 5, 3, 2]),
    ],
)
def test_samples_at_a_time(batch: int, sizes: list[int]) -> None:
    """Halves, rounded up; never one sample, nor less than a thirty-second of the batch."""
    iteration = replace(iteration_on(), training=replace(HYPER, batch=batch))
    assert [plan.piece for plan in steps(iteration, rounded=True) if plan.step is Step.PIECES] == 2 * sizes
    assert [plan.attack for plan in attacks(iteration) if not plan.attack_sliced] == [0, *sizes]


def test_training_without_an_attack_is_planned_for_its_step_alone() -> None:
    iteration = iteration_on(threat=None)
    assert cheapest(iteration, iteration.predicted(STEPS[-1])).plan == STEPS[-1]
    assert replace(iteration, threat=iteration_on().threat).predicted(PLAIN) > iteration.predicted(PLAIN)


def test_samples_that_know_each_other_are_attacked_together() -> None:
    """A norm layer that keeps no statistics uses the batch's in evaluation mode: micro-batches would change it."""
    iteration = iteration_on(network(track_running_stats=False))
    together = iteration.predicted(STEPS[-1])
    assert cheapest(iteration, together).plan.attack == 0
    with pytest.raises(BudgetError):
        cheapest(iteration, together - 1)
    assert cheapest(iteration_on(), together - 1).plan.attack > 0


def test_a_budget_that_no_plan_fits_is_an_error_that_names_layers_and_the_least() -> None:
    iteration = iteration_on()
    fewest = least(iteration, rounded=True)
    assert cheapest(iteration, fewest, rounded=True).peak <= fewest <= least(iteration)
    with pytest.raises(BudgetError, match=r"Conv 1, .*Linear 1 cannot be trained within 100.* batch of 8.*") as error:
        cheapest(iteration, 100_000, rounded=True)
    assert f"{fewest / 1e6:.2f} MB" in str(error.value)


def _deep() -> nn.Sequential:
    """A network whose atoms' inputs are what its step has most of."""
    torch.manual_seed(0)
    blocks = (block(3, 32), *(block(32, 32) for _ in range(5)))
    return nn.Sequential(*blocks, nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 10)))


@pytest.mark.slow
def test_rounded_activations_are_the_last_resort() -> None:
    """On the way back from the last of 6 blocks 4 inputs of 8·32·32·32 floats are kept for the others: half as much
    saves two such inputs, of which the gradient at the last one's input needs half of one, as it cannot overwrite it.
    """
    iteration = iteration_on(_deep())
    exact, all_ = least(iteration), least(iteration, rounded=True)
    assert exact - all_ == pytest.approx(1.5 * 8 * 32 * 32 * 32 * 4, rel=0.1)
    assert not cheapest(iteration, exact, rounded=True).plan.rounded
    assert cheapest(iteration, exact - 1, rounded=True).plan.rounded
    assert not Planner().cheapest(iteration, exact).plan.rounded
    with pytest.raises(BudgetError):  # a run takes none of them
        Planner().cheapest(iteration, exact - 1)
    found = cheapest(iteration, all_, rounded=True).plan
    assert found == MemoryPlan(found.attack, Step.PIECES, 2, rounded=True)
    assert iteration.measured(found) == pytest.approx(iteration.predicted(found), rel=0.05)


@pytest.mark.parametrize("plan", [MemoryPlan(step=Step.ATOMS), MemoryPlan(step=Step.PIECES, piece=4)], ids=str)
def test_what_rounding_changes(plan: MemoryPlan) -> None:
    """The loss is the same; the update is off by some per cent, as 8 bits of an activation are not all of it."""
    changes, losses = [], []
    for rounded in (False, True):
        iteration = iteration_on(_deep(), threat=None)
        start = [parameter.detach().clone() for parameter in iteration.part.parameters()]
        task = Train(round=1, client=0, seed=3, training=HYPER, threat=None)
        x = torch.rand(8, 3, 32, 32, generator=torch.Generator().manual_seed(1))
        losses.append(train(task, iteration.part, x, torch.arange(8), plan=replace(plan, rounded=rounded)))
        ends = iteration.part.parameters()
        changes.append(torch.cat([(end.detach() - begin).flatten() for end, begin in zip(ends, start, strict=True)]))
    assert losses[0] == losses[1]
    assert 1e-3 < float((changes[1] - changes[0]).norm() / changes[0].norm()) < 0.1


@pytest.mark.parametrize(
    ("whole", "sliced", "fewest", "attacked"), [(30, 20, 40, 1), (40, 20, 40, 1), (50, 30, 40, 2), (60, 50, 50, 2)]
)
def test_the_least_needs_no_attack_beside_one_that_takes_no_more_than_the_step(
    whole: int, sliced: int, fewest: int, attacked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The most economical step takes 40 bytes, an attack so many as a whole and by slices of weights."""
    asked: list[MemoryPlan] = []
    peaks = {False: whole, True: sliced}
    monkeypatch.setattr(LocalIteration, "attack_peak", lambda _, plan: asked.append(plan) or peaks[plan.attack_sliced])
    stepped: list[MemoryPlan] = []
    monkeypatch.setattr(
        LocalIteration, "step_peak", lambda _, plan: stepped.append(plan) or (40 if plan.step == Step.PIECES else 70)
    )
    assert least(iteration_on()) == fewest
    sliced_steps = [MemoryPlan(step=step, sliced=True) for step in (Step.FUSED, Step.ATOMS)]
    assert stepped == [MemoryPlan(step=Step.PIECES, piece=2), *sliced_steps]
    assert asked == [MemoryPlan(attack=2), MemoryPlan(attack=2, attack_sliced=True)][:attacked]


def _modules(
    name: str, shape: tuple[int, ...], classes: int, batch: int, budget: int
) -> tuple[Chain, list[Callable[[], LocalIteration]]]:
    """Return the paper's modules for a budget, as iterations."""
    torch.manual_seed(0)
    chain = chain_of(build(name, shape, classes))
    cost = cost_of(chain, shape, batch, classes)
    hyper = replace(HYPER, batch=batch, learning_rate=0.0)

    def iteration(first: int, last: int) -> LocalIteration:
        head = None if last == len(chain) else build_head(cost.atoms[last - 1].output[1:], classes)
        inputs = cost.atoms[first - 1].output[1:] if first else shape
        threat = ThreatModel("l2", 1.0, 0.25, 10, (0.0, float("inf"))) if first else input_threat(8 / 255, 2 / 255, 10)
        return LocalIteration(ModelPart(chain, first, last, head), inputs, hyper, threat)

    modules = partition(cost, budget)
    return chain, [lambda module=module: iteration(module.first, module.last) for module in modules]


@pytest.mark.slow
@pytest.mark.parametrize(("budget", "count"), [(60 * 10**6, 7), (39 * 10**6, 10)])
def test_every_module_of_vgg16_keeps_within_its_budget(budget: int, count: int) -> None:
    _, modules = _modules("vgg16", (3, 32, 32), 10, 64, budget)
    assert len(modules) == count
    for build_module in modules:
        iteration = build_module()
        plan, peak = cheapest(iteration, budget)
        assert iteration.measured(plan) <= budget
        assert iteration.measured(plan) == pytest.approx(peak, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("budget", "number"), [*((60 * 10**6, number) for number in (0, 1, 2, 5)), *((39 * 10**6, n) for n in (1, 5, 9))]
)
def test_planned_modules_of_vgg16_learn_what_plain_ones_learn(budget: int, number: int) -> None:
    """One iteration with an attack, in float32: the updates differ by less than 1e-5 of their length.

    On images the attack steps by the sign of a gradient. Where that is next to nothing, rounding may turn it and move
    a pixel by two steps: 3e-5 was seen.
    """
    bound = 1e-5 if number else 1e-4
    _, modules = _modules("vgg16", (3, 32, 32), 10, 64, budget)
    iteration = modules[number]()
    part = iteration.part
    x = torch.rand(64, *iteration.input_shape, generator=torch.Generator().manual_seed(1))
    task = Train(round=1, client=0, seed=3, training=replace(HYPER, batch=64), threat=iteration.threat)
    tensors = {**part.chain.tensors, **{f"head.{k}": v for k, v in (part.head or nn.Module()).named_parameters()}}
    start = {name: value.detach().clone() for name, value in tensors.items()}
    ends = []
    plan = cheapest(iteration, budget).plan
    assert plan != PLAIN
    for way in (PLAIN, plan):
        with torch.no_grad():
            for name, value in tensors.items():
                value.copy_(start[name])
        train(task, part, x, torch.arange(64) % 10, plan=way)
        ends.append({name: value.detach().clone() for name, value in tensors.items()})
    counters = {name for name, value in start.items() if not value.is_floating_point()}
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in counters)
    moved = {name for name, value in start.items() if not torch.equal(value, ends[0][name])} - counters
    assert {id(p) for p in part.parameters()} <= {id(tensors[name]) for name in moved}
    # All parameters as one vector: the bias of a convolution before a norm layer moves by rounding errors alone.
    trained = {name for name in moved if isinstance(tensors[name], nn.Parameter)}
    for names in (trained, moved - trained):
        update = torch.cat([(ends[0][name] - start[name]).double().flatten() for name in names])
        apart = torch.cat([(ends[1][name] - ends[0][name]).double().flatten() for name in names])
        assert apart.norm() <= bound * update.norm()


@pytest.mark.slow
def test_every_module_of_resnet34_is_predicted_within_its_budget_and_one_is_measured() -> None:
    budget = 224 * 10**6
    _, modules = _modules("resnet34", (3, 224, 224), 256, 32, budget)
    assert len(modules) == 7
    for number, build_module in enumerate(modules):
        iteration = build_module()
        plan, peak = cheapest(iteration, budget)
        assert peak <= budget
        if number == 6:
            assert iteration.measured(plan) <= budget


def test_where_more_is_measured_than_predicted_the_smaller_budget_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured a quarter above every prediction: a plan for 8 MB is one that is predicted to fit 6.4 MB."""
    iteration = iteration_on()
    plain = iteration.predicted(PLAIN)
    factor = [1.25]
    monkeypatch.setattr(LocalIteration, "measured", lambda self, plan: int(self.predicted(plan) * factor[0]))
    found = checked(iteration, plain)
    assert found.plan == cheapest(iteration, int(plain / 1.25)).plan != PLAIN
    assert found.measured <= plain
    assert found.budget == pytest.approx(plain / 1.25, abs=1)
    factor[0] = 1.04
    assert checked(iteration, int(plain * 1.1)).budget == int(plain * 1.1)
    assert checked(iteration, plain).measured <= plain
    factor[0] = 1.10  # within the budget, and still more than 5 % above its prediction
    roomy = 2 * plain
    assert checked(iteration, roomy).budget == pytest.approx(roomy / 1.10, abs=2)
    factor[0] = 0.5
    assert checked(iteration, plain).plan == PLAIN
    factor[0] = 100.0
    with pytest.raises(BudgetError):
        checked(iteration, plain)
