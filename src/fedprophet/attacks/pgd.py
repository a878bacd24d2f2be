"""Projected gradient descent (the inner maximisation of Eq. 2 and 9) on any tensor, under any objective.

Images are attacked in an l_inf ball, features in an l2 ball; both stay inside the range that the tensor lives in. The
objective returns one number to be raised; the network behind it must be in evaluation mode.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fedprophet.attacks.attack import Logits, Outcome
from fedprophet.threat import ThreatModel

_TINY = 1e-12
"""Keeps a zero gradient from dividing by zero; it changes no other gradient."""


def _per_sample_norm(x: Tensor) -> Tensor:
    """Return the l2 norm of each sample, shaped to broadcast against the batch."""
    norms: Tensor = torch.linalg.vector_norm(x, dim=tuple(range(1, x.dim())), keepdim=True)
    return norms


def _draw(clean: Tensor, generator: torch.Generator, fill: Callable[[Tensor], Tensor]) -> Tensor:
    """Return random numbers to add to `clean`, the same on any device and in any memory format."""
    drawn = fill(torch.empty_like(clean, device=generator.device, memory_format=torch.contiguous_format))
    return drawn.to(clean.device) if clean.is_contiguous() else torch.empty_like(clean).copy_(drawn)


def _linf_start(clean: Tensor, radius: float, generator: torch.Generator) -> Tensor:
    return _draw(clean, generator, lambda memory: memory.uniform_(-radius, radius, generator=generator))


def _linf_step(delta: Tensor, gradient: Tensor, threat: ThreatModel) -> Tensor:
    return (delta + threat.step * gradient.sign()).clamp(-threat.radius, threat.radius)


def _l2_start(clean: Tensor, radius: float, generator: torch.Generator) -> Tensor:
    direction = _draw(clean, generator, lambda memory: memory.normal_(generator=generator))
    share = torch.rand(len(clean), *[1] * (clean.dim() - 1), generator=generator, device=generator.device)
    return direction.div_(_per_sample_norm(direction) + _TINY).mul_(radius).mul_(share.to(clean.device))


def _l2_step(delta: Tensor, gradient: Tensor, threat: ThreatModel) -> Tensor:
    delta = delta + threat.step * gradient / (_per_sample_norm(gradient) + _TINY)
    return delta * (threat.radius / (_per_sample_norm(delta) + _TINY)).clamp(max=1.0)


STARTS = {"linf": _linf_start, "l2": _l2_start}
"""Random points of the ball, as differences from clean inputs."""
STEPS = {"linf": _linf_step, "l2": _l2_step}
"""Steps up the gradient and back into the ball."""


def pgd(
    objective: Callable[[Tensor], Tensor], clean: Tensor, threat: ThreatModel, generator: torch.Generator
) -> Tensor:
    """Return `clean` perturbed within the threat model so that the objective is high."""
    return climb(objective, clean, random_start(clean, threat, generator), threat)


def random_start(clean: Tensor, threat: ThreatModel, generator: torch.Generator) -> Tensor:
    """Return a random point of each sample's ball."""
    if threat.harmless or clean.numel() == 0:
        return clean.detach().clone()
    start = STARTS[threat.norm](clean.detach(), threat.radius, generator).add_(clean.detach())
    return _into_range(start, threat, out=start)


def climb(objective: Callable[[Tensor], Tensor], clean: Tensor, perturbed: Tensor, threat: ThreatModel) -> Tensor:
    """Return points of the ball around `clean` where the objective is higher than at those that are given."""
    if threat.harmless or clean.numel() == 0:
        return perturbed
    clean, perturbed = clean.detach(), perturbed.detach()
    for _ in range(threat.steps):
        perturbed.requires_grad_()
        (gradient,) = torch.autograd.grad(objective(perturbed), perturbed)
        with torch.no_grad():
            perturbed = _into_range(clean + STEPS[threat.norm](perturbed - clean, gradient, threat), threat)
    return perturbed.detach()


def pgd_attack(
    logits: Logits, images: Tensor, labels: Tensor, threat: ThreatModel, seed: int, size: int = 0
) -> Outcome:
    """Attack the cross-entropy, from one random start; a sample that is wrong already is attacked as well.

    `size` samples are attacked at a time (0: all of them), from the same starts.
    """
    started = random_start(images, threat, torch.Generator().manual_seed(seed))
    parts = [torch.split(tensor, size or max(len(images), 1)) for tensor in (images, started, labels)]
    return Outcome(torch.cat([_withstood(logits, x, start, y, threat) for x, start, y in zip(*parts, strict=True)]))


def _withstood(logits: Logits, images: Tensor, started: Tensor, labels: Tensor, threat: ThreatModel) -> Tensor:
    """Return which samples are right in spite of an attack from the starts that are given."""

    def objective(x: Tensor) -> Tensor:
        return F.cross_entropy(logits(x), labels, reduction="sum")

    attacked = climb(objective, images, started, threat)
    with torch.no_grad():
        return logits(attacked).argmax(dim=1) == labels


def _into_range(x: Tensor, threat: ThreatModel, out: Tensor | None = None) -> Tensor:
    low, high = threat.bounds
    return x if math.isinf(low) and math.isinf(high) else torch.clamp(x, low, high, out=out)
