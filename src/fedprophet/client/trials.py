"""Trials on a GPU, whose workspaces nothing predicts: a plan is tried under a limit of the allocator.

The lower the limit, the smaller the workspaces that convolutions take, and the likelier it is that tensors themselves
find no room between others.
"""

import gc
import sys
from collections.abc import Iterator
from typing import NamedTuple

import torch

from fedprophet.cascade.allocator import allocator_limit, ran_out
from fedprophet.cascade.measure import bytes_of, cuda_base
from fedprophet.client.iteration import LocalIteration
from fedprophet.client.memory_plan import MemoryPlan

RUNS = 3
"""The first sets up what is set up once, the second captures what is captured, the third is like all further ones."""
SLACKS = tuple(mib * 2**20 for mib in (64, 48, 32, 16, 0))
"""Bytes that the allocator may hold beyond a budget, as it takes memory in steps of 20 MiB and keeps some for later.
What is allocated has to keep within the budget all the same."""
OUT = sys.maxsize
"""The bytes of what the allocator refused."""


class Trial(NamedTuple):
    """The most bytes that the attack and the step of some iterations took, or OUT; and the allocator's limit."""

    attack: int
    step: int
    limit: int

    @property
    def peak(self) -> int:
        return max(self.attack, self.step)


def tried(iteration: LocalIteration, plan: MemoryPlan, budget: int) -> Trial:
    """Try a plan on batches of each size, until one exceeds the budget; the limit is that of the largest."""
    trials: list[Trial] = []
    for size in iteration.sizes or (iteration.training.batch,):
        trials.append(tried_below(iteration, plan, budget, size))
        if trials[-1].peak > budget:
            break
    return Trial(max(trial.attack for trial in trials), max(trial.step for trial in trials), trials[0].limit)


def tried_below(iteration: LocalIteration, plan: MemoryPlan, budget: int, size: int) -> Trial:
    """Try a plan under the highest limit of the allocator with which it keeps within the budget."""
    trial = tried_within(iteration, plan, budget + SLACKS[0], size)
    for slack in SLACKS[1:]:
        if trial.peak <= budget or trial.peak == OUT:
            break
        lower = tried_within(iteration, plan, budget + slack, size)
        if lower.peak == OUT:
            break
        trial = lower
    return trial


def tried_within(iteration: LocalIteration, plan: MemoryPlan, limit: int, size: int) -> Trial:
    """Try a plan on batches of a size under a limit, as a training would do it that begins within the limit."""
    part, device = iteration.part, iteration.device
    held, before = bytes_of(part.tensors), cuda_base(device)
    worst, half = [0, 0], 0
    try:
        with allocator_limit(device, limit - held):
            for peak in _halves_of_iterations(iteration, plan, size):
                worst[half], half = max(worst[half], peak - before + held), 1 - half
    except RuntimeError as error:
        if not ran_out(error):
            raise
        worst[half] = OUT
    for parameter in part.parameters():
        parameter.grad = None
    gc.collect()  # tensors that the error's frames hold, and graphs
    return Trial(worst[0], worst[1], limit)


def _halves_of_iterations(iteration: LocalIteration, plan: MemoryPlan, size: int) -> Iterator[int]:
    """Attack and step in turn, yield the most bytes that were allocated in each half."""
    labels, descent = iteration.begin()
    ascend = iteration.ascent(plan)
    for _ in range(RUNS):
        torch.cuda.reset_peak_memory_stats(iteration.device)
        x = iteration.attack(plan, iteration.inputs(size), labels[:size], ascend)
        torch.cuda.synchronize(iteration.device)
        yield torch.cuda.max_memory_allocated(iteration.device)
        torch.cuda.reset_peak_memory_stats(iteration.device)
        iteration.step(plan, x, labels[:size], descent, ascend)
        del x  # a training has none of it either when the next batch comes
        torch.cuda.synchronize(iteration.device)
        yield torch.cuda.max_memory_allocated(iteration.device)
