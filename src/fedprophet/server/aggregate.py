"""Aggregation (Section 6.4): which of a round's updates can be used, and how they become the next model.

`Aggregator.aggregate` is all of it, top to bottom. The average itself is a rule, one file each in `server.rules`.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedprophet.messages.answers import Trained
from fedprophet.messages.tasks import Train
from fedprophet.server.coordinator import Record
from fedprophet.server.rejections import reject, some_names, weight_fault
from fedprophet.server.rules.mean import MEAN_OF_CLIENTS, partial_average
from fedprophet.server.rules.registry import Join, Parameters

ExpectedLayers = Callable[[Train], Parameters]
"""Returns the client's own layers that must come with a task's update: tensors of the expected shapes and types."""
Usable = Sequence[tuple[Train, Trained]]
"""The tasks of a round whose updates can be used, and these updates, in client order."""


@dataclass(frozen=True)
class Aggregator:
    """How a run joins updates: by which rule, and only where at least `minimum` of a round can be used.

    `averaged` says in words what the rule makes of clients' norm layers.
    """

    join: Join = partial_average
    minimum: int = 1
    averaged: str = MEAN_OF_CLIENTS

    @property
    def is_mean(self) -> bool:
        """Whether the rule is the paper's plain mean."""
        return self.join is partial_average

    def aggregate(
        self, current: Parameters, tasks: Sequence[Train], updates: Sequence[Trained], record: Record
    ) -> Parameters | None:
        """Return the parameters after a round; None where too few updates can be used."""
        usable = self.usable(tasks, updates, record)
        return self.join_updates(current, usable) if usable else None

    def join_updates(self, current: Parameters, usable: Usable) -> Parameters:
        """Return the parameters after updates that can be used."""
        return self.join(current, [(update.weight, update.parameters) for _, update in usable])

    def usable(
        self,
        tasks: Sequence[Train],
        updates: Sequence[Trained],
        record: Record,
        expected: ExpectedLayers = lambda task: {},
    ) -> Usable:
        """Return the updates that can be joined, none where they are too few; note the others and the mean loss."""
        usable, rejected = split_usable(tasks, updates, expected)
        reject(record, rejected)
        record["loss"] = weighted_mean([(update.weight, update.loss) for _, update in usable]) if usable else None
        if len(usable) >= self.minimum:
            return usable
        if self.minimum > 1:
            record["too_few"] = {"usable": len(usable), "minimum": self.minimum}
        return []


def split_usable(
    tasks: Iterable[Train], updates: Iterable[Trained], expected: ExpectedLayers = lambda task: {}
) -> tuple[Usable, dict[int, str]]:
    """Split updates into those that can be joined, in client order, and the reasons against the others, by client."""
    asked = {task.client: task for task in tasks}
    usable: list[tuple[Train, Trained]] = []
    rejected: dict[int, str] = {}
    for update in sorted(updates, key=lambda update: update.client):
        task = asked.get(update.client)
        if task is None:
            rejected[update.client] = "it was not asked"
        elif reason := update_fault(task, update, expected(task)):
            rejected[update.client] = reason
        else:
            usable.append((task, update))
    return usable, rejected


def update_fault(task: Train, update: Trained, layers: Parameters) -> str | None:
    """Return why an update cannot be joined, or None where it can; `layers` are the client's own that it must send."""
    if not math.isfinite(update.loss):  # a client says with its loss whether its training diverged
        return f"its loss is {update.loss}"
    if update.weight == 0 or weight_fault(update.weight):
        return f"its weight is {update.weight}"
    foreign, lacking = set(update.parameters) - set(task.parameters), set(task.parameters) - set(update.parameters)
    if foreign:
        return f"it sent parameters that were not asked for: {some_names(foreign)}"
    if lacking:
        return f"it did not send parameters that were asked for: {some_names(lacking)}"
    missing = set(layers) - set(update.local)
    if missing:
        return f"it did not send layers of its own that were asked for: {some_names(missing)}"
    return _tensor_fault({**layers, **task.parameters}, {**update.local, **update.parameters})


def _tensor_fault(asked: Parameters, sent: Parameters) -> str | None:
    """Return which tensor has another shape or type than was asked for, or is not finite."""
    pairs = [(name, value, asked[name]) for name, value in sent.items() if name in asked]
    for name, value, like in pairs:
        if value.shape != like.shape:
            return f"{name} has shape {tuple(value.shape)} instead of {tuple(like.shape)}"
        if value.is_floating_point() != like.is_floating_point():
            return f"{name} has type {value.dtype} instead of {like.dtype}"
    # What is finite in a wider type need not be in the model's, which the average is written in.
    written = {**sent, **{name: value.to(like.dtype) for name, value, like in pairs}}
    if all_finite(written.values()):
        return None
    name = next(name for name, value in written.items() if not all_finite([value]))
    too_large = " in the model's type" if all_finite([sent[name]]) else ""
    return f"{name} is not finite{too_large}"


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether no number is infinite or NaN. A GPU is asked once for all tensors that it has: each answer is a wait."""
    flags: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        flags.setdefault(tensor.device, []).append(torch.isfinite(tensor).all())
    return all(bool(torch.stack(found).all()) for found in flags.values())


def weighted_mean(values: Sequence[tuple[float, float]]) -> float:
    """Return the mean of numbers, each given with its weight."""
    total = sum(weight for weight, _ in values)
    mean = sum(weight * value for weight, value in values) / total
    if math.isfinite(mean):
        return mean
    # The mean of finite numbers is finite, though their sum may not be.
    return sum(weight / total * value for weight, value in values)
