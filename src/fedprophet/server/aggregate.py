"""Aggregation (Section 6.4): which of a round's updates can be used, and how they become the next model.

`Aggregator.usable` chooses, `Aggregator.join_updates` joins, by a rule: one file each in `server.rules`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from fedprophet.finite import all_finite, all_true
from fedprophet.messages.answers import Answer, Trained
from fedprophet.messages.tasks import Train
from fedprophet.server.coordinator import Record
from fedprophet.server.plausibility import implausible_updates
from fedprophet.server.pooling import pooled
from fedprophet.server.rejections import number_fault, reject, some_names, weight_fault
from fedprophet.server.rules.mean import MEAN_OF_CLIENTS, partial_average
from fedprophet.server.rules.registry import Join, Parameters
from fedprophet.server.weights import Sizes, believed, no_sizes

A = TypeVar("A", bound=Answer)
NEVER_NEGATIVE = ("running_var", "num_batches_tracked")
"""What norm layers keep that cannot be below zero, by the last part of its name."""
ExpectedLayers = Callable[[Train], Parameters]
"""Returns the client's own layers that must come with a task's update: tensors of the expected shapes and types."""
Usable = Sequence[tuple[Train, Trained]]
"""The tasks of a round whose updates can be used, and these updates, in client order."""


@dataclass(frozen=True)
class Aggregator:
    """How a run joins what clients send: by which rule, and from how many usable updates of a round on (`minimum`).

    `averaged` says in words what the rule makes of clients' norm layers; `numbers` is the rule for single numbers;
    `sizes` are those of the shards, as far as the server knows them. `pools`: clients' norm statistics are pooled.
    """

    rule: Join = partial_average
    minimum: int = 1
    averaged: str = MEAN_OF_CLIENTS
    numbers: Join | None = None
    sizes: Sizes = no_sizes
    pools: bool = False

    @property
    def join(self) -> Join:
        """What joins updates: the rule, with norm statistics pooled where they are."""
        return self.pooled if self.pools else self.rule

    @property
    def pooled(self) -> Join:
        """What joins norm layers so that their statistics are those of all clients' samples together."""
        return pooled(self.rule, self.numbers)

    @property
    def is_mean(self) -> bool:
        """Whether the rule is the paper's plain mean."""
        return self.rule is partial_average

    def join_updates(self, current: Parameters, usable: Usable) -> Parameters:
        """Return the parameters after updates that can be used."""
        return self.join(current, [(update.weight, update.parameters) for _, update in usable])

    def join_numbers(self, claims: Sequence[tuple[float, Sequence[float]]]) -> tuple[float, ...]:
        """Join numbers that clients claim, each client's with its weight, as if they were updates of their median."""
        sent = [(weight, {"": torch.tensor(numbers, dtype=torch.float64)}) for weight, numbers in claims]
        median = torch.stack([numbers[""] for _, numbers in sent]).median(dim=0).values
        return tuple((self.numbers or self.rule)({"": median}, sent)[""].tolist())

    def believed(self, answers: Sequence[A], record: Record) -> list[A]:
        """Return answers with weights that can be believed."""
        return list(believed(answers, self.sizes, record))

    def usable(
        self, tasks: Sequence[Train], updates: Sequence[Trained], record: Record, expected: ExpectedLayers
    ) -> Usable:
        """Return the updates that can be joined, none where they are too few; note the others and the mean loss."""
        sound, rejected = split_usable(tasks, updates, expected)
        rejected |= implausible_updates(sound)
        reject(record, rejected)
        sound = [pair for pair in sound if pair[1].client not in rejected]
        weighed = {update.client: update for update in self.believed([update for _, update in sound], record)}
        usable = [(task, weighed[task.client]) for task, _ in sound]
        losses = [(update.weight, (update.loss,)) for _, update in usable]
        record["loss"] = self.join_numbers(losses)[0] if losses else None
        return usable if self.enough(len(usable), record) else []

    def enough(self, usable: int, record: Record) -> bool:
        """Whether so many usable answers may be joined; note it where they are too few."""
        if 1 < self.minimum > usable:
            record["too_few"] = {"usable": usable, "minimum": self.minimum}
        return usable >= self.minimum


def split_usable(
    tasks: Iterable[Train], updates: Iterable[Trained], expected: ExpectedLayers
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
    if reason := number_fault("loss", update.loss):  # a client says with its loss whether its training diverged
        return reason
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
    return tensor_fault({**layers, **task.parameters}, {**update.local, **update.parameters})


def layers_fault(known: Parameters, weight: float, sent: Parameters, complete: bool = False) -> str | None:
    """Return why layers that a client sent cannot be joined: they must be layers of the model, perhaps all `known`."""
    if weight == 0 or weight_fault(weight):
        return f"its weight is {weight}"
    foreign, lacking = sent.keys() - known.keys(), known.keys() - sent.keys() if complete else set()
    if foreign:
        return f"it sent layers that the model does not have: {some_names(foreign)}"
    if lacking:
        return f"it did not send layers that were asked for: {some_names(lacking)}"
    return tensor_fault(known, sent)


def tensor_fault(asked: Parameters, sent: Parameters) -> str | None:
    """Return which tensor has another shape or type than was asked for, is not finite, or is a negative variance."""
    pairs = [(name, value, asked[name]) for name, value in sent.items() if name in asked]
    for name, value, like in pairs:
        if value.shape != like.shape:
            return f"{name} has shape {tuple(value.shape)} instead of {tuple(like.shape)}"
        if value.is_floating_point() != like.is_floating_point():
            return f"{name} has type {value.dtype} instead of {like.dtype}"
    # What is finite in a wider type need not be in the model's, which the average is written in.
    written = {**sent, **{name: value.to(like.dtype) for name, value, like in pairs}}
    if all_finite(written.values()):
        counted = {name: value for name, value in written.items() if name.rpartition(".")[2] in NEVER_NEGATIVE}
        if all_true(value >= 0 for value in counted.values()):
            return None
        return f"{next(name for name, value in counted.items() if not all_true([value >= 0]))} is negative"
    name = next(name for name, value in written.items() if not all_finite([value]))
    too_large = " in the model's type" if all_finite([sent[name]]) else ""
    return f"{name} is not finite{too_large}"
