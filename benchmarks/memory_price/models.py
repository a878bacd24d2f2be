"""The paper's models within a budget: cut into modules that keep to it by plans, and whole with a disk to swap to."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from machine import commit
from torch import Tensor

from fedprophet.cascade.allocator import allocator_limit
from fedprophet.cascade.atoms import Chain, chain_of
from fedprophet.cascade.cost import ChainCost, cost_of
from fedprophet.cascade.measure import bytes_of, measured_peak
from fedprophet.cascade.partition import cut_further, partition
from fedprophet.client.budget import Checked, checked, least
from fedprophet.client.iteration import LocalIteration, iteration_of
from fedprophet.client.limits import ROOM
from fedprophet.client.memory_plan import PLAIN, MemoryPlan
from fedprophet.client.planned_cost import MeasuredCost, TriedCost
from fedprophet.errors import BudgetError
from fedprophet.machine import describe
from fedprophet.messages.values import LocalTraining
from fedprophet.models import build
from memory_price.clock import clock
from memory_price.swapping import Swap, SwapFile
from memory_price.trials import ATTACK_STEPS, TIMED_STEPS, Trial

MB = 10**6
MEASURED = ("plan", "measured_bytes", "limit_bytes", "planned_seconds", "difference")
STEP = (False, True)
"""A pass is one of the attack, or the step."""


@dataclass(frozen=True)
class Setting:
    """A model of the paper, its data and batch, and budgets in MB from the smallest that it can be cut for.

    Those for a GPU are fewer, so that it is done within two minutes.
    """

    shape: tuple[int, ...]
    classes: int
    batch: int
    budgets: dict[str, tuple[int, ...]]


SETTINGS = {
    "vgg16": Setting((3, 32, 32), 10, 64, {"cpu": (39, 60, 91, 151, 302), "cuda": (60, 91)}),
    "resnet34": Setting((3, 224, 224), 256, 32, {"cpu": (149, 224, 566, 1131), "cuda": (224,)}),
}


def chain_in(name: str, device: torch.device, dtype: torch.dtype = torch.float32) -> Chain:
    """Return a model of the paper as a chain: the same numbers in any type that holds them."""
    setting = SETTINGS[name]
    torch.manual_seed(0)
    return chain_of(build(name, setting.shape, setting.classes).to(device, dtype))


class Model:
    """A model of the paper, whose modules are timed once for every plan."""

    def __init__(self, name: str, device: torch.device, repeat: int) -> None:
        setting = SETTINGS[name]
        self._name = name
        self.chain = chain_in(name, device)
        self.cost: ChainCost = cost_of(self.chain, setting.shape, setting.batch, setting.classes)
        self.training = LocalTraining(1, setting.batch, 1e-4, momentum=0.9, weight_decay=1e-4, strong_convexity=1e-5)
        self._repeat = repeat
        self._plain: dict[tuple[int, int], dict[str, Any]] = {}

    def iteration(self, first: int, last: int) -> LocalIteration:
        return iteration_of(self.chain, self.cost, first, last, self.training)

    def _doubled(self, iteration: LocalIteration) -> LocalIteration:
        """Return the same iteration in float64, where what a plan changes by rounding is next to nothing."""
        chain = chain_in(self._name, self.chain.device, torch.float64)
        doubled = iteration_of(chain, self.cost, iteration.part.first, iteration.part.last, self.training)
        if doubled.part.head is not None:
            doubled.part.head.double()
        return doubled

    def plain(self, first: int, last: int) -> dict[str, Any]:
        """Return what some atoms take as a module that is trained plainly; it is measured once."""
        if (first, last) not in self._plain:
            iteration = self.iteration(first, last)
            self._plain[first, last] = {
                "plain_measured_bytes": iteration.measured(PLAIN),
                "plain_seconds": self._trial(iteration, PLAIN).seconds(self._repeat),
            }
        return self._plain[first, last]

    def modules(self, budget: int) -> Iterator[dict[str, Any]]:
        """Yield what each module of a budget takes, plain and planned."""
        kind = TriedCost if self.chain.device.type == "cuda" else MeasuredCost
        needs = kind.of(self.cost, self.chain, self.training)
        for module in cut_further(partition(self.cost, budget), self.cost, needs, budget):
            iteration = self.iteration(module.first, module.last)
            found = {
                "module": module.index + 1,
                "paper_bytes": module.memory,
                **self.plain(module.first, module.last),
            }
            try:
                yield {**found, **self._planned(iteration, checked(iteration, budget, rounded=True))}
            except BudgetError:
                nothing = dict.fromkeys((*MEASURED, "difference_in_float64"))
                yield {**found, **nothing, "predicted_bytes": least(iteration, rounded=True)}

    def _planned(self, iteration: LocalIteration, checked: Checked) -> dict[str, Any]:
        if checked.plan == PLAIN and checked.limit is None:
            seconds = self.plain(iteration.part.first, iteration.part.last)["plain_seconds"]
        else:
            trial = self._trial(iteration, checked.plan)
            with self._limited(trial, None if checked.limit is None else checked.budget):
                seconds = trial.seconds(self._repeat)
        return {
            "plan": str(checked.plan),
            "predicted_bytes": checked.peak,
            "measured_bytes": checked.measured,
            "limit_bytes": checked.limit,
            "planned_seconds": seconds,
            "difference": self._difference(iteration, checked.plan),
            "difference_in_float64": self._difference(self._doubled(iteration), checked.plan),
        }

    def _difference(self, iteration: LocalIteration, plan: MemoryPlan) -> float:
        """Return how far the update by a plan is from the plain one, by the length of that."""
        if plan == PLAIN:
            return 0.0
        plain = self._update(iteration, PLAIN)
        return float((self._update(iteration, plan) - plain).norm() / plain.norm())

    def _update(self, iteration: LocalIteration, plan: MemoryPlan) -> Tensor:
        """Return the update of an iteration by a plan, computed by torch's own convolutions.

        cuDNN has others for other sizes, which round in other ways: those would be compared, and not the plans.
        """
        with torch.backends.cudnn.flags(enabled=False):
            return self._trial(iteration, plan).update()

    def _trial(self, iteration: LocalIteration, plan: MemoryPlan, steps: int | None = None) -> Trial:
        return Trial(iteration, plan, steps or TIMED_STEPS[self.chain.device.type])

    def _limited(self, trial: Trial, budget: int | None) -> AbstractContextManager[None]:
        """Limit a trial as a training is limited: convolutions remember the workspaces of the plan's own limit."""
        return nullcontext() if budget is None else allocator_limit(trial.device, budget + ROOM - trial.held)

    def swapped(self, budget: int, folder: Path) -> dict[str, Any]:
        """Return what an iteration of the whole model takes in a budget, with what does not fit on disk."""
        iteration = self.iteration(0, len(self.chain))
        trial, file = self._trial(iteration, PLAIN, steps=1), SwapFile(folder / "swap")
        trial.step()
        passes = {
            step: self._swap_for(trial, Swap(file, 0, iteration.part.parameters()), step, budget) for step in STEP
        }
        attack, step = (self._swapped_pass(trial, passes[step][0], step) for step in STEP)
        total = {key: ATTACK_STEPS * attack[key] + step[key] for key in attack}
        return {**total, "in_memory_bytes": max(in_memory for _, in_memory in passes.values())}

    def _swap_for(self, trial: Trial, swap: Swap, step: bool, budget: int) -> tuple[Swap, int]:
        """Return the least that must be swapped in a pass of an attack or a step, and the bytes that stay in memory."""
        held, size = trial.held, bytes_of(trial.part.parameters())

        def peak(swap: Swap) -> int:
            return held + measured_peak(lambda: self._swapped_pass(trial, swap, step), trial.device)

        nothing = peak(swap)  # of the activations is kept
        missing = max(nothing - budget, 0)
        momenta = min(missing, size)
        gradients = min(missing - momenta, size) if step else 0
        weights = min(missing - momenta - gradients, size)
        swap = replace(swap, momenta=momenta, gradients=gradients, weights=weights)
        if missing:
            return swap, nothing - momenta - gradients - weights
        swap = replace(swap, allowance=budget)
        while (in_memory := peak(swap)) > budget:  # all of them are kept at first, then as many fewer as are too many
            swap = replace(swap, allowance=max(swap.kept - (in_memory - budget), 0))
        return swap, in_memory

    def _swapped_pass(self, trial: Trial, swap: Swap, step: bool) -> dict[str, float]:
        swap.file.reset()
        started = clock(trial.device)
        with swap.one_pass(step):
            trial.step() if step else trial.attack()
        elapsed = clock(trial.device) - started
        return {
            "computation_seconds": elapsed - swap.file.seconds if trial.device.type == "cuda" else elapsed,
            "swapping_seconds": swap.file.seconds,
            "written_bytes": swap.file.written,
            "read_bytes": swap.file.read_bytes,
        }


def measured(
    name: str, budgets: Sequence[int], device: torch.device, repeat: int, folder: Path | None
) -> Iterator[dict[str, Any]]:
    """Yield everything about one model, again after every budget; without swapping where there is no folder for it."""
    model = Model(name, device, repeat)
    whole = model.plain(0, len(model.chain))
    if device.type == "cuda":
        for module in (module for budget in budgets for module in partition(model.cost, budget * MB)):
            model.plain(module.first, module.last)
    machine = describe()
    occasion = {"date": machine["date"], "commit": commit(), "repeat": repeat, "processor": machine["processor"]}
    found: dict[str, Any] = {
        "paper_bytes": model.cost.total_memory,
        "measured_bytes": whole["plain_measured_bytes"],
        "seconds": whole["plain_seconds"],
        **occasion,
        "budgets": [],
    }
    for budget in budgets:
        print(f"{name}, {budget} MB", flush=True)
        modules = list(model.modules(budget * MB))
        swapped = {**model.swapped(budget * MB, folder), **occasion} if folder is not None else None
        found["budgets"].append({"budget_bytes": budget * MB, "modules": modules, "swapped": swapped, **occasion})
        yield found
