"""Partial average (Section 6.4, Eq. 16 and 17), and which updates may enter it."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from fedprophet.messages.task import ClientTask, ClientUpdate
from fedprophet.server.rejections import some_names, weight_fault

Parameters = Mapping[str, Tensor]


def partial_average(current: Parameters, updates: Iterable[tuple[float, Parameters]]) -> dict[str, Tensor]:
    """Average each parameter over those who sent it; what nobody sent stays.

    w_n ← Σ_{k∈S_n} q_k w_{n,k} / Σ_{k∈S_n} q_k. A client sends the modules m … M_k and the head of M_k alone, so the
    clients that sent a module's parameter are S_n (Eq. 16) and those that sent a head's are K_n (Eq. 17). The sum is
    taken in the order given, in float64, so that the result depends on nothing but its inputs.
    """
    sums: dict[str, Tensor] = {}
    weights: dict[str, float] = {}
    types: dict[str, torch.dtype] = {}
    for weight, parameters in updates:
        for name, value in parameters.items():
            term = value.detach().to(torch.float64) * weight
            sums[name] = sums[name] + term if name in sums else term
            weights[name] = weights.get(name, 0.0) + weight
            types.setdefault(name, current.get(name, value).dtype)
    # What nobody has yet (statistics that only some clients keep) comes in as it was sent.
    averaged = {name: (total / weights[name]).to(types[name]) for name, total in sums.items()}
    return {**current, **averaged}


def mean_metric(updates: Sequence[ClientUpdate], metric: str) -> float:
    """Return a metric's mean over clients, weighted by q_k."""
    total = sum(update.weight for update in updates)
    mean = sum(update.weight * update.metrics[metric] for update in updates) / total
    if math.isfinite(mean):
        return mean
    # The mean of finite numbers is finite, though their sum may not be.
    return sum(update.weight / total * update.metrics[metric] for update in updates)


Layers = Callable[[ClientTask], Parameters]
"""Says which of its own layers a client has to send with a task's update: tensors of their shapes and types."""


def fault(task: ClientTask, update: ClientUpdate, layers: Parameters | None = None) -> str | None:
    """Return why an update cannot be averaged, or None where it can; `layers` are those of its own that it must send.

    A client says with its loss whether its training diverged, so that one without a loss cannot be trusted either.
    """
    loss = update.metrics.get("loss")
    if loss is None or not math.isfinite(loss):
        return "it has no loss" if loss is None else f"its loss is {loss}"
    if update.weight == 0 or weight_fault(update.weight):
        return f"its weight is {update.weight}"
    foreign, lacking = set(update.parameters) - set(task.parameters), set(task.parameters) - set(update.parameters)
    if foreign:
        return f"it sent parameters that were not asked for: {some_names(foreign)}"
    if lacking:
        return f"it lacks parameters that were asked for: {some_names(lacking)}"
    missing = set(layers or ()) - set(update.local)
    if missing:
        return f"it lacks layers of its own that were asked for: {some_names(missing)}"
    return _misfit({**(layers or {}), **task.parameters}, {**update.local, **update.parameters})


def _misfit(asked: Parameters, sent: Parameters) -> str | None:
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
    return next(f"{name} is not finite{_wider(sent[name])}" for name, v in written.items() if not all_finite([v]))


def _wider(value: Tensor) -> str:
    """Say where a tensor is finite as it was sent, and only too large for the model's type."""
    return " in the model's type" if all_finite([value]) else ""


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether no number is infinite or NaN. A GPU is asked once for all tensors that it has: each answer is a wait."""
    flags: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        flags.setdefault(tensor.device, []).append(torch.isfinite(tensor).all())
    return all(bool(torch.stack(found).all()) for found in flags.values())


def sift(
    tasks: Iterable[ClientTask], updates: Iterable[ClientUpdate], layers: Layers | None = None
) -> tuple[list[ClientUpdate], dict[int, str]]:
    """Split what came back into the updates that can be averaged, in client order, and the reasons of the others."""
    asked = {task.client: task for task in tasks}
    usable: list[ClientUpdate] = []
    dropped: dict[int, str] = {}
    for update in sorted(updates, key=lambda update: update.client):
        task = asked.get(update.client)
        reason = "it was not asked" if task is None else fault(task, update, layers(task) if layers else None)
        if reason is None:
            usable.append(update)
        else:
            dropped[update.client] = reason
    return usable, dropped
