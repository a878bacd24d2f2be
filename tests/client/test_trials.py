"""Plans that are tried under limits of a GPU's allocator, with a stand-in for the GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from iterations import HYPER, THREAT, iteration_on
from torch import Tensor, nn

from fedprophet.cascade.atoms import explicit_chain
from fedprophet.client import trials
from fedprophet.client.budget import checked
from fedprophet.client.captured import Ascent
from fedprophet.client.iteration import LocalIteration
from fedprophet.client.memory_plan import PLAIN, MemoryPlan, Step
from fedprophet.client.part import ModelPart
from fedprophet.client.trials import OUT, Trial
from fedprophet.errors import BudgetError

MIB = 2**20


class _Gpu:
    """What a limit of the allocator does to a plan, in MiB: attack and step take so much, the step's workspaces what is
    left of the limit up to what they want; `lost` is what the allocator has in pieces that are too small.
    """

    def __init__(self, **plans: tuple[int, int, int, int]) -> None:
        self.plans, self.tried = plans, list[tuple[str, int]]()

    def tried_within(self, iteration: LocalIteration, plan: MemoryPlan, limit: int, size: int) -> Trial:
        name = f"{plan.step}_{plan.attack}" + (f"_of_{size}" if iteration.sizes else "")
        attack, step, wanted, lost = self.plans[name]
        self.tried.append((name, limit // MIB))
        left = limit // MIB - lost
        peak = step + min(wanted, left - step)
        return Trial(OUT if attack > left else attack * MIB, OUT if step > left else peak * MIB, limit)


def test_on_a_gpu_the_limit_is_lowered_until_a_plan_fits_and_other_plans_come_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Budget 60 MiB; 70 are predicted for a whole attack. A step of 50 that wants 40 more, where 8 are lost, gets all
    of them under limits of 124 and 108, 34 under 92, 18 under 76 and 2 under 60, which does. Where 80 are lost, 124
    are too little.
    """
    iteration = replace(iteration_on(), place=torch.device("cuda"))
    monkeypatch.setattr(LocalIteration, "attack_peak", lambda self, plan: {0: 70, 4: 30, 2: 20}[plan.attack] * MIB)
    monkeypatch.setattr(LocalIteration, "step_peak", lambda self, plan: 50 * MIB)
    gpu = _Gpu(whole_4=(30, 50, 40, 8))
    monkeypatch.setattr(trials, "tried_within", lambda *call: gpu.tried_within(*call))
    graph = 2 * 4 * 3 * 32 * 32 * 4  # keeps what it reads and writes
    assert checked(iteration, 60 * MIB) == (MemoryPlan(attack=4), 50 * MIB + graph, 52 * MIB, 60 * MIB, 60 * MIB)
    assert gpu.tried == [("whole_4", limit) for limit in (124, 108, 92, 76, 60)]

    gpu = _Gpu(whole_4=(30, 50, 40, 80), fused_4=(200, 30, 10, 8), fused_2=(20, 30, 10, 8))
    assert checked(iteration, 60 * MIB).plan == MemoryPlan(attack=2, step=Step.FUSED)
    assert gpu.tried == [("whole_4", 124), ("fused_4", 124), ("fused_2", 124)]

    # A step of 60, where 5 are lost, takes 100, 100, 87, 71, and has too little under 60. Others have room to spare.
    gpu = _Gpu(whole_4=(30, 60, 40, 5), fused_4=(30, 50, 0, 0))
    assert checked(iteration, 60 * MIB) == (MemoryPlan(4, Step.FUSED), 50 * MIB + graph, 50 * MIB, 60 * MIB, 124 * MIB)
    assert [limit for name, limit in gpu.tried if name == "whole_4"] == [124, 108, 92, 76, 60]

    gpu = _Gpu(whole_4=(200, 50, 0, 0), whole_2=(200, 50, 0, 0))
    tried = r"predicted to take 52\.48 MB, but no plan kept within the limit when it was tried, workspaces included\. G"
    with pytest.raises(BudgetError, match=rf"cannot be trained within 62\.9 MB .*{tried}"):
        checked(iteration, 60 * MIB)


def test_on_a_gpu_every_size_of_batch_has_a_limit_under_which_a_plan_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions remember what each size had to do with. A batch of 3 takes 20 MiB and wants 60 more, all of which it
    has under limits of 124 to 92; under 76 it has 56, which are too many still, and 40 under 60. The limit of the whole
    batch is named. Where the step on the smaller one has too little under the highest, the next plan is tried.
    """
    iteration = replace(iteration_on(), place=torch.device("cuda"), sizes=(8, 3))
    monkeypatch.setattr(LocalIteration, "attack_peak", lambda self, plan: 10 * MIB)
    monkeypatch.setattr(LocalIteration, "step_peak", lambda self, plan: 50 * MIB)
    gpu = _Gpu(whole_0_of_8=(10, 50, 0, 8), whole_0_of_3=(10, 20, 60, 0))
    monkeypatch.setattr(trials, "tried_within", lambda *call: gpu.tried_within(*call))
    assert checked(iteration, 60 * MIB) == (PLAIN, 50 * MIB, 60 * MIB, 60 * MIB, 124 * MIB)
    assert gpu.tried == [
        ("whole_0_of_8", 124),
        *(("whole_0_of_3", limit) for limit in (124, 108, 92, 76, 60)),
    ]
    gpu = _Gpu(
        whole_0_of_8=(10, 50, 0, 8),
        whole_0_of_3=(10, 50, 60, 80),
        fused_0_of_8=(10, 30, 0, 0),
        fused_0_of_3=(10, 20, 0, 0),
    )
    assert checked(iteration, 60 * MIB).plan == MemoryPlan(step=Step.FUSED)


@pytest.mark.parametrize("size", [8, 3])
def test_a_trial_meets_what_a_training_meets_within_the_limit(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Momenta first, then three batches. Beside 1000 bytes of others, the part's linear layer has 40: under a limit of
    640 it may have 600 more. Each attack allocates 100 bytes more than the one before, each step 7 more than it.
    """
    told, batches, peaks = list[object](), list[int](), [1000]

    @contextmanager
    def limited(device: torch.device, size: int) -> Iterator[None]:
        told.append(size)
        yield
        told.append("end")

    def attack(self: LocalIteration, plan: MemoryPlan, x: Tensor, labels: Tensor, ascend: Ascent) -> Tensor:
        assert len(labels) == len(x)
        batches.append(len(x))
        peaks[0] += 100
        return x

    def step(self: LocalIteration, plan: MemoryPlan, x: Tensor, labels: Tensor, *_: object) -> None:
        assert len(labels) == len(x) == batches[-1]
        peaks[0] += 7

    begin = LocalIteration.begin
    monkeypatch.setattr(LocalIteration, "begin", lambda self: told.append("momenta") or begin(self))
    monkeypatch.setattr(LocalIteration, "attack", attack)
    monkeypatch.setattr(LocalIteration, "step", step)
    monkeypatch.setattr(trials, "allocator_limit", limited)
    monkeypatch.setattr(trials, "cuda_base", lambda device: 1000)
    for name in ("reset_peak_memory_stats", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peaks[0])
    chain = explicit_chain(nn.Sequential(nn.Linear(10, 1, bias=False)))
    part = ModelPart(chain, 0, 1, None)
    iteration = LocalIteration(part, (10,), HYPER, THREAT, torch.device("cuda"))
    assert trials.tried_within(iteration, PLAIN, 640, size) == (40 + 314, 40 + 321, 640)
    assert batches == [size] * 3
    assert told == [600, "momenta", "end"]
