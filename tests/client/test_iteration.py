"""What a local iteration takes: predicted without allocating, and measured by the allocator."""

from dataclasses import replace

import pytest
import torch
from iterations import HYPER, STEPS, THREAT, iteration_on, network
from torch import nn

from fedprophet.cascade.atoms import explicit_chain
from fedprophet.cascade.channel_flow import channels_of
from fedprophet.cascade.heads import build_head
from fedprophet.cascade.narrow import narrow_chain
from fedprophet.client.budget import cheapest, least
from fedprophet.client.iteration import LocalIteration
from fedprophet.client.memory_plan import PLAIN, MemoryPlan, Step
from fedprophet.client.part import ModelPart
from fedprophet.threads import torch_threads
from fedprophet.threat import ThreatModel


@pytest.mark.parametrize("plan", [*STEPS, *(replace(STEPS[-1], attack=size) for size in (0, 4))], ids=str)
def test_what_is_predicted_is_what_is_measured(plan: MemoryPlan) -> None:
    iteration = iteration_on()
    plan = replace(plan, attack=plan.attack or 2) if plan is not STEPS[0] else plan
    iteration.measured(plan)  # what is set up once is not part of an iteration
    assert iteration.measured(plan) == pytest.approx(iteration.predicted(plan), rel=0.05)


@pytest.mark.parametrize("plan", [PLAIN, MemoryPlan(4, Step.PIECES, 4)], ids=str)
def test_sub_networks_whose_widths_fill_no_block_are_predicted_too(plan: MemoryPlan) -> None:
    """Of 32 and 64 channels 17 and 34 are kept. oneDNN computes with 32 and 48."""
    chain = explicit_chain(network())
    channels = channels_of(chain.model, (3, 32, 32))
    kept = {group: torch.arange(int(0.54 * width)) for group, width in channels.groups.items()}
    iteration = iteration_on(narrow_chain(chain, channels, kept).model)
    iteration.measured(plan)
    assert iteration.measured(plan) == pytest.approx(iteration.predicted(plan), rel=0.02)


def test_a_measurement_has_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    step = LocalIteration.step
    monkeypatch.setattr(LocalIteration, "step", lambda *call: threads.append(torch.get_num_threads()) or step(*call))
    with torch_threads(3):
        iteration_on().measured(PLAIN)
        assert (threads, torch.get_num_threads()) == ([1], 3)


def test_inner_modules_with_a_head_are_predicted_too() -> None:
    chain = explicit_chain(network())
    part = ModelPart(chain, 1, 4, build_head((64, 16, 16), 10))
    iteration = LocalIteration(part, (32, 32, 32), HYPER, ThreatModel("l2", 1.0, 0.25, 2, (0.0, float("inf"))))
    for plan in (PLAIN, MemoryPlan(4, Step.PIECES, 4)):
        assert iteration.measured(plan) == pytest.approx(iteration.predicted(plan), rel=0.05)


def test_a_prediction_leaves_the_part_and_the_generator_as_they_were() -> None:
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    iteration = iteration_on(model)
    iteration.predicted(MemoryPlan(4, Step.PIECES, 4))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_gpu_is_predicted_without_workspaces_and_in_its_own_units() -> None:
    """A linear layer has no workspace anywhere: weight 40 → 512 bytes, momentum 512, labels 8 · 8 → 512, a batch of
    8 · 10 · 4 → 512. Attacked 4 at a time, a graph has two micro-batches of 160 → 512.
    """
    chain = explicit_chain(nn.Sequential(nn.Linear(10, 1, bias=False)))
    there = LocalIteration(ModelPart(chain, 0, 1, None), (10,), HYPER, None, torch.device("cuda"))
    held, batch, hand = 3 * 512, 512, 512
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalIteration, "step", lambda *call: None)
        assert there.predicted(PLAIN) == held + batch
        patch.setattr(LocalIteration, "attack", lambda self, plan, x, labels, ascend: x)
        attacked = replace(there, threat=THREAT)
        assert attacked.predicted(PLAIN) == held + batch
        assert attacked.predicted(MemoryPlan(attack=4)) == held + batch + 2 * hand
        patch.setattr(LocalIteration, "step", lambda *call: torch.zeros(1000))  # 4000 → 4096: more than the attack
        assert attacked.predicted(PLAIN) == held + batch + 4096
        assert attacked.predicted(MemoryPlan(attack=4)) == held + batch + 4096 + 2 * hand
        assert there.predicted(MemoryPlan(attack=4)) == held + batch + 4096
        patch.setattr(LocalIteration, "attack_peak", lambda self, plan: 9000 if plan.attack == 0 else 10)
        plan, peak = cheapest(attacked, 8000)
        assert (plan.attack, peak) == (4, held + batch + 4096 + 2 * hand)
        assert least(attacked) == held + batch + 4096 + 2 * hand, "two at a time are 80 bytes, 512 as well"
    convolution = explicit_chain(nn.Sequential(nn.Sequential(nn.Conv2d(64, 64, 3), nn.Flatten())))
    on_cpu = LocalIteration(ModelPart(convolution, 0, 1, None), (64, 8, 8), HYPER, None)
    assert replace(on_cpu, place=torch.device("cuda")).predicted(PLAIN) < on_cpu.predicted(PLAIN)
