"""Partial average (Section 6.4, Eq. 16 and 17), and which updates may enter it."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from fedprophet.client.task import ClientTask, ClientUpdate

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
    return sum(update.weight * update.metrics[metric] for update in updates) / total


Layers = Callable[[ClientTask], Mapping[str, torch.Size]]
"""Says which of its own layers a client has to send with a task's update, and of which shape."""


def fault(task: ClientTask, update: ClientUpdate, layers: Mapping[str, torch.Size] | None = None) -> str | None:
    """Return why an update cannot be averaged, or None where it can; `layers` are those of its own that it must send.

    A client says with its loss whether its training diverged, so that one without a loss cannot be trusted either.
    """
    loss = update.metrics.get("loss")
    if loss is None or not math.isfinite(loss):
        return "it has no loss" if loss is None else f"its loss is {loss}"
    if not (math.isfinite(update.weight) and update.weight > 0):
        return f"its weight is {update.weight}"
    foreign, lacking = set(update.parameters) - set(task.parameters), set(task.parameters) - set(update.parameters)
    if foreign:
        return f"it sent parameters that were not asked for: {sorted(foreign)}"
    if lacking:
        return f"it lacks parameters that were asked for: {sorted(lacking)}"
    missing = set(layers or ()) - set(update.local)
    if missing:
        return f"it lacks layers of its own that were asked for: {sorted(missing)}"
    return _misfit(task, update, layers or {})


def _misfit(task: ClientTask, update: ClientUpdate, layers: Mapping[str, torch.Size]) -> str | None:
    """Return which tensor has another shape or type, or is not finite."""
    shapes = {**layers, **{name: value.shape for name, value in task.parameters.items()}}
    for name, value in (*update.parameters.items(), *update.local.items()):
        if name in shapes and value.shape != shapes[name]:
            return f"{name} has shape {tuple(value.shape)} instead of {tuple(shapes[name])}"
    for name, value in update.parameters.items():
        if value.is_floating_point() != task.parameters[name].is_floating_point():
            return f"{name} has type {value.dtype} instead of {task.parameters[name].dtype}"
    sent = {**update.local, **update.parameters}
    if all_finite(sent.values()):
        return None
    return next(f"{name} is not finite" for name, value in sent.items() if not all_finite([value]))


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
