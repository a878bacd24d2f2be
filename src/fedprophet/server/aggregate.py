"""Partial average (Section 6.4, Eq. 16 and 17), and which updates may enter it."""

import math
from collections.abc import Iterable, Mapping, Sequence

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


def fault(task: ClientTask, update: ClientUpdate) -> str | None:
    """Return why an update cannot be averaged, or None where it can."""
    loss = update.metrics.get("loss", 0.0)
    if not math.isfinite(loss):
        return f"its loss is {loss}"
    if not (math.isfinite(update.weight) and update.weight > 0):
        return f"its weight is {update.weight}"
    if set(update.parameters) - set(task.parameters):
        return f"it sent parameters that were not asked for: {sorted(set(update.parameters) - set(task.parameters))}"
    for name, value in update.parameters.items():
        if value.shape != task.parameters[name].shape:
            return f"{name} has shape {tuple(value.shape)} instead of {tuple(task.parameters[name].shape)}"
    for name, value in (*update.parameters.items(), *update.local.items()):
        if not bool(torch.isfinite(value).all()):
            return f"{name} is not finite"
    return None


def sift(tasks: Iterable[ClientTask], updates: Iterable[ClientUpdate]) -> tuple[list[ClientUpdate], dict[int, str]]:
    """Split what came back into the updates that can be averaged, in client order, and the reasons of the others."""
    asked = {task.client: task for task in tasks}
    usable: list[ClientUpdate] = []
    dropped: dict[int, str] = {}
    for update in sorted(updates, key=lambda update: update.client):
        reason = fault(asked[update.client], update)
        if reason is None:
            usable.append(update)
        else:
            dropped[update.client] = reason
    return usable, dropped
