"""What stacks made, on its way from the device to the host."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from fedprophet.engines.stack_job import StackJob
from fedprophet.fast.layout import transferred
from fedprophet.messages.answers import Answer
from fedprophet.messages.tasks import ModelTask

T = TypeVar("T", bound=ModelTask)


def to_host(tables: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Return tensors in the host's memory, all of them in one transfer."""
    values = iter(transferred([value for table in tables for value in table.values()], torch.device("cpu")))
    return [{name: next(values) for name in table} for table in tables]


def later(
    jobs: Sequence[StackJob[T]], values: Tensor, finish: Callable[[StackJob[T], Tensor], Answer]
) -> Iterator[Answer]:
    """Send each job's row of numbers to the host now; return an iterator that waits for them and finishes the jobs."""
    arrived = None
    if values.is_cuda:
        values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()

    def answers() -> Iterator[Answer]:
        if arrived is not None:
            arrived.synchronize()  # not for what the device was asked for later
        for job, row in zip(jobs, values, strict=True):
            yield finish(job, row)

    return answers()
