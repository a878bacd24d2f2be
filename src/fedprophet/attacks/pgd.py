"""Projected gradient descent (the inner maximisation of Eq. 2 and 9) on any tensor, under any objective.

Images are attacked in an l_inf ball, features in an l2 ball; both stay inside the range that the tensor lives in. The
objective returns one number to be raised; the network behind it must be in evaluation mode.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedprophet.attacks.attack import Logits, Outcome
from fedprophet.threat import Norm, ThreatModel

Objective = Callable[[Tensor], Tensor]

_TINY = 1e-12
"""Keeps a zero gradient from dividing by zero; it changes no other one."""


def _per_sample_norm(x: Tensor) -> Tensor:
    """Return the l2 norm of each sample, shaped to broadcast against the batch."""
    norms: Tensor = torch.linalg.vector_norm(x, dim=tuple(range(1, x.dim())), keepdim=True)
    return norms


def _like(clean: Tensor, generator: torch.Generator) -> Tensor:
    """Return memory for a draw, where the generator is: a draw is the same wherever, and in what layout, it is used."""
    return torch.empty_like(clean, device=generator.device, memory_format=torch.contiguous_format)


def _beside(clean: Tensor, draw: Tensor) -> Tensor:
    """Return a draw on the device and in the layout of what it is added to."""
    return draw.to(clean.device) if clean.is_contiguous() else torch.empty_like(clean).copy_(draw)


def _linf_start(clean: Tensor, radius: float, generator: torch.Generator) -> Tensor:
    return _beside(clean, _like(clean, generator).uniform_(-radius, radius, generator=generator))


def _linf_ascend(delta: Tensor, gradient: Tensor, step: float) -> Tensor:
    return delta + step * gradient.sign()


def _linf_project(delta: Tensor, radius: float) -> Tensor:
    return delta.clamp(-radius, radius)


def _l2_start(clean: Tensor, radius: float, generator: torch.Generator) -> Tensor:
    direction = _beside(clean, _like(clean, generator).normal_(generator=generator))
    share = torch.rand(len(clean), *[1] * (clean.dim() - 1), generator=generator, device=generator.device)
    share = share.to(clean.device)
    return direction / (_per_sample_norm(direction) + _TINY) * radius * share


def _l2_ascend(delta: Tensor, gradient: Tensor, step: float) -> Tensor:
    return delta + step * gradient / (_per_sample_norm(gradient) + _TINY)


def _l2_project(delta: Tensor, radius: float) -> Tensor:
    return delta * (radius / (_per_sample_norm(delta) + _TINY)).clamp(max=1.0)


@dataclass(frozen=True)
class Ball:
    """How one norm starts at random, climbs a gradient, and projects back."""

    start: Callable[[Tensor, float, torch.Generator], Tensor]
    ascend: Callable[[Tensor, Tensor, float], Tensor]
    project: Callable[[Tensor, float], Tensor]


BALLS: dict[Norm, Ball] = {
    "linf": Ball(_linf_start, _linf_ascend, _linf_project),
    "l2": Ball(_l2_start, _l2_ascend, _l2_project),
}


def pgd(objective: Objective, clean: Tensor, threat: ThreatModel, generator: torch.Generator) -> Tensor:
    """Return `clean` perturbed within the threat model so that the objective is high."""
    clean = clean.detach()
    if threat.harmless or clean.numel() == 0:
        return clean.clone()
    ball = BALLS[threat.norm]
    perturbed = _into_range(clean + ball.start(clean, threat.radius, generator), threat)
    for _ in range(threat.steps):
        perturbed.requires_grad_()
        (gradient,) = torch.autograd.grad(objective(perturbed), perturbed)
        with torch.no_grad():
            delta = ball.project(ball.ascend(perturbed - clean, gradient, threat.step), threat.radius)
            perturbed = _into_range(clean + delta, threat)
    return perturbed.detach()


def pgd_attack(logits: Logits, images: Tensor, labels: Tensor, threat: ThreatModel, seed: int) -> Outcome:
    """Attack the cross-entropy, from one random start; a sample that is wrong already is attacked as well."""
    generator = torch.Generator().manual_seed(seed)

    def objective(x: Tensor) -> Tensor:
        return F.cross_entropy(logits(x), labels, reduction="sum")

    attacked = pgd(objective, images, threat, generator)
    with torch.no_grad():
        return Outcome(logits(attacked).argmax(dim=1) == labels)


def _into_range(x: Tensor, threat: ThreatModel) -> Tensor:
    low, high = threat.bounds
    if math.isinf(low) and math.isinf(high):
        return x
    return x.clamp(None if math.isinf(low) else low, None if math.isinf(high) else high)
