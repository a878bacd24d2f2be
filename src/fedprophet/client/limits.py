"""A limit on the memory that training takes: it ends with an error rather than exceed it.

On a CPU every operation is followed (`cascade.measure.LiveBytes`), and the first whose tensors are too many is the
last. On a GPU what was allocated, workspaces included, is compared with the limit after every iteration; the allocator
is given a limit as well, with room for gaps between tensors; and what of the model is not in training leaves the
device.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedprophet.cascade.allocator import allocator_limit, ran_out
from fedprophet.cascade.measure import LiveBytes, bytes_of, cuda_base
from fedprophet.client.inputs import Inputs
from fedprophet.client.iteration import LocalIteration
from fedprophet.client.memory_plan import PLAIN, MemoryPlan
from fedprophet.client.part import ModelPart
from fedprophet.client.planning import Planner
from fedprophet.errors import BudgetError
from fedprophet.messages.tasks import Train
from fedprophet.sizes import format_size
from fedprophet.threads import one_thread

ROOM = 256 * 2**20
"""Bytes that a GPU's allocator may hold beyond a limit, in gaps between tensors: far more than these should need, since
what is allocated is compared with the limit itself. (Convolutions take no more for it: they remember the workspaces
that they had to do with when the plan was tried.)"""
Exceeded = Callable[[int | None], BudgetError]
"""Returns the error for so many bytes; None where the allocator refused them."""


def unchecked() -> None:
    """Leave it to others to see that a limit is kept."""


@dataclass
class Terms:
    """How training is computed, to keep within its limit, and when it is over the bytes that it took at its peak.

    `check` is called between two iterations, and raises BudgetError if the limit was exceeded since.
    """

    plan: MemoryPlan = PLAIN
    limit: int = 0
    peak: int = 0
    check: Callable[[], None] = unchecked

    def __str__(self) -> str:
        """Return the plan in words; nothing where there is no limit."""
        return str(self.plan) if self.limit else ""


NO_TERMS = Terms()


@contextmanager
def limited(
    task: Train, part: ModelPart, inputs: Inputs, beside: Sequence[Tensor], planner: Planner, classes: int = 0
) -> Iterator[Terms]:
    """Find how a part is trained within a task's limit, and hold a `with` block to it; BudgetError where it cannot.

    `beside` is what is held for the training beside the part. The client's data, labels included, do not count.
    `classes` is how many its exit tells apart. On a CPU the block has one thread: predictions are made for one, and
    oneDNN has buffers for each.
    """
    if not task.memory:
        yield NO_TERMS
        return
    whole = replace(part, prior=None)  # a prediction knows no values
    sizes = tuple(sorted(set(task.training.batch_sizes(len(inputs))), reverse=True))
    shape = tuple(inputs[:1].shape[1:])
    iteration = LocalIteration(whole, shape, task.training, task.threat, sizes=sizes, classes=classes)
    who = f"client {task.client}, {name_of(task, part)}"
    with _alone(part), one_thread(part.chain.device):
        try:
            planned = planner.cheapest(iteration, task.memory - _unpredicted(task, part, len(inputs), beside))
        except BudgetError as error:
            raise BudgetError(f"{who}: {error}") from None
        terms = Terms(planned.plan, task.memory)
        with within(terms, part, beside, f"{who} ({part.layers}), trained by the plan {str(planned.plan)!r}"):
            yield terms


def _unpredicted(task: Train, part: ModelPart, samples: int, beside: Sequence[Tensor]) -> int:
    """Return the bytes that training takes beside those of its prediction: a small part of them."""
    # Samples have an order, and statistics are copied one by one when they are swapped.
    size = samples * torch.int64.itemsize + bytes_of(beside) + max((tensor.nbytes for tensor in beside), default=0)
    if part.prior is not None:
        size += (1 + 2 * task.training.batch) * part.prior.nbytes  # it is added to the scores
    if task.training.summed_heads and part.head is not None:
        size += bytes_of(part.head.parameters())  # gradients, which stay
    return size


def name_of(task: Train, part: ModelPart) -> str:
    """Return how people call what a task trains: by the numbers of modules, those before it being frozen."""
    if part.first == 0 and part.last == len(part.chain):
        return "the model"
    first, last = len(task.frozen) + 1, "the last" if task.head is None else task.head + 1
    return f"module {first}" if first == last else f"modules {first} to {last}"


@contextmanager
def within(terms: Terms, part: ModelPart, beside: Sequence[Tensor], what: str) -> Iterator[None]:
    """Let a `with` block train a part within the limit; BudgetError where it takes more. The terms get its peak.

    Bytes are counted from the part itself and what is held `beside` it on. `what` says who trains what, and how.
    """

    def exceeded(size: int | None) -> BudgetError:
        took = "more than that" if size is None else format_size(size, 2)
        return BudgetError(
            f"{what}: it may take {format_size(terms.limit, 2)}, and took {took}. The plan was predicted to take less, "
            "which is wrong for this model or machine: compare with fedprophet memory. A larger memory.budget or a "
            "smaller train.batch helps"
        )

    device, held = part.chain.device, [*part.tensors, *beside]
    if device.type == "cuda":
        with _on_cuda(terms, device, held, exceeded):
            yield
    else:
        with _Tracker(held, terms.limit, exceeded) as tracker:
            yield
        terms.peak = tracker.peak


class _Tracker(LiveBytes):  # type: ignore[no-untyped-call]
    """Counts the bytes that are alive, and raises an error when there are too many."""

    def __init__(self, held: Iterable[Tensor], limit: int, exceeded: Exceeded) -> None:
        super().__init__(held)
        self._limit, self._exceeded = limit, exceeded

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.peak > self._limit:
            raise self._exceeded(self.peak)
        return result


@contextmanager
def _on_cuda(terms: Terms, device: torch.device, held: Sequence[Tensor], exceeded: Exceeded) -> Iterator[None]:
    """Look what is allocated on a GPU at its peak, and let its allocator hold no more than that may need.

    The allocator counts when work is launched, so that looking there waits for nothing.
    """
    own = bytes_of(tensor for tensor in held if tensor.device == device)
    others = cuda_base(device) - own

    def check() -> None:
        terms.peak = torch.cuda.max_memory_allocated(device) - others
        if terms.peak > terms.limit:
            raise exceeded(terms.peak)

    torch.cuda.reset_peak_memory_stats(device)
    terms.check = check
    try:
        with allocator_limit(device, terms.limit + ROOM - own):
            yield
            torch.cuda.synchronize(device)
    except RuntimeError as error:
        if not ran_out(error):
            raise
        raise exceeded(None) from error
    check()


@contextmanager
def _alone(part: ModelPart) -> Iterator[None]:
    """Leave a part's own tensors alone on a GPU within a `with` block; a chain on a CPU stays as it is."""
    device = part.chain.device
    own = {id(tensor) for tensor in part.tensors}
    others = [tensor for tensor in part.chain.tensors.values() if id(tensor) not in own]
    try:
        _move(others, torch.device("cpu"))
        yield
    finally:
        _move(others, device)


def _move(tensors: Iterable[Tensor], device: torch.device) -> None:
    for tensor in tensors:
        tensor.data = tensor.data.to(device)
