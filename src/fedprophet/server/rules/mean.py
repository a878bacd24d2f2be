"""Partial average (Section 6.4, Eq. 16 and 17), of whole tensors and of sub-networks."""

from collections.abc import Iterable

import torch
from torch import Tensor

from fedprophet.cascade.channels import Channels, Kept
from fedprophet.cascade.narrow import full_tensor, kept_index
from fedprophet.server.rules.registry import Parameters, Update, rule

MEAN_OF_CLIENTS = "mean over the clients that have trained, weighted by shard size"


@rule("mean", "weighted by shard size, as in the paper", averaged=MEAN_OF_CLIENTS)
def partial_average(current: Parameters, updates: Iterable[Update]) -> dict[str, Tensor]:
    """Average each parameter over the clients that sent it: w_n ← Σ_{k∈S_n} q_k w_{n,k} / Σ_{k∈S_n} q_k.

    A client sends the modules m … M_k and the head of M_k alone, so the clients that sent a module's parameter are S_n
    (Eq. 16) and those that sent a head's are K_n (Eq. 17). A single client can move the mean anywhere.
    """
    sums: dict[str, Tensor] = {}
    weights: dict[str, float] = {}
    types: dict[str, torch.dtype] = {}
    for weight, parameters in updates:
        for name, value in parameters.items():
            term = value.detach().to(torch.float64) * weight
            # A client may have sent what the server gave it, from elsewhere than what others trained.
            sums[name] = sums[name] + term.to(sums[name].device) if name in sums else term
            weights[name] = weights.get(name, 0.0) + weight
            # What the server does not have yet (statistics that only some clients keep) comes in as it was sent.
            types.setdefault(name, current.get(name, value).dtype)
    averaged = {name: (total / weights[name]).to(types[name]) for name, total in sums.items()}
    return {**current, **averaged}


def scatter_average(
    channels: Channels, current: Parameters, updates: Iterable[tuple[float, Kept, Parameters]]
) -> dict[str, Tensor]:
    """Average each coordinate over the sub-networks that have it; what none of them has stays.

    An update is a client's weight, its kept channels and its tensors. The result is the mean rule's, without a full
    tensor for each client.
    """
    sums: dict[str, Tensor] = {}
    weights: dict[str, Tensor] = {}
    for weight, kept, tensors in updates:
        for name, value in tensors.items():
            full = full_tensor(current, name)
            if name not in sums:
                # Where the updates are: on a GPU they would take longer to fetch than to add up.
                sums[name] = torch.zeros_like(full, dtype=torch.float64, device=value.device)
                weights[name] = torch.zeros(
                    _weight_shape(channels, name, full), dtype=torch.float64, device=value.device
                )
            index = kept_index(channels, kept, name, sums[name], value)
            sums[name][index] += value.detach().to(sums[name]) * weight
            weights[name][index] += weight
    averaged = {}
    for name, total in sums.items():
        mean = (total / weights[name]).to(current[name].dtype)
        averaged[name] = torch.where(weights[name] > 0, mean, current[name].detach().to(mean.device))
    return {**current, **averaged}


def _weight_shape(channels: Channels, name: str, full: Tensor) -> list[int]:
    """Return the shape of a tensor's weights: coordinates differ in who trained them by their channels alone."""
    cut = {axis.axis for axis in channels.axes.get(name, ())}
    return [size if axis in cut else 1 for axis, size in enumerate(full.shape)]
