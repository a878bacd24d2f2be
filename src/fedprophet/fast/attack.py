"""PGD on stacks of clients: the same steps as `attacks.pgd`, with gradients that are written out."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fedprophet.fast.draws import Draws
from fedprophet.threat import ThreatModel

Gradient = Callable[[Tensor], Tensor]
_TINY = 1e-12


def _norm(x: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(x, dim=(2, 3, 4), keepdim=True)
    return norms


def _start(clean: Tensor, threat: ThreatModel, radius: Tensor, draws: Draws) -> Tensor:
    if threat.norm == "linf":
        return (2 * draws.uniform("start", tuple(clean.shape)) - 1) * radius
    direction = draws.normal("direction", tuple(clean.shape))
    share = draws.uniform("share", (*clean.shape[:2], 1, 1, 1))
    return direction / (_norm(direction) + _TINY) * radius * share


def _moved(delta: Tensor, gradient: Tensor, threat: ThreatModel, radius: Tensor, step: Tensor) -> Tensor:
    if threat.norm == "linf":
        delta = delta + step * gradient.sign()
        return torch.minimum(torch.maximum(delta, -radius), radius)
    delta = delta + step * gradient / (_norm(gradient) + _TINY)
    return delta * (radius / (_norm(delta) + _TINY)).clamp(max=1.0)


def attack(
    gradient: Gradient, clean: Tensor, threat: ThreatModel, radius: Tensor, step: Tensor, draws: Draws
) -> Tensor:
    """Return clean inputs (K×N×H×W×C) perturbed within the threat so that the objective is high.

    Radius and step are tensors: a captured graph reads them anew each time.
    """
    low, high = (None if math.isinf(bound) else bound for bound in threat.bounds)

    def inside(x: Tensor) -> Tensor:
        return x if low is None and high is None else x.clamp(low, high)

    perturbed = inside(clean + _start(clean, threat, radius, draws))
    for _ in range(threat.steps):
        delta = _moved(perturbed - clean, gradient(perturbed), threat, radius, step)
        perturbed = inside(clean + delta)
    return perturbed
