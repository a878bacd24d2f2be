"""AutoAttack (Croce & Hein, 2020) through pyautoattack, with workarounds for its side effects.

pyautoattack seeds the global generators, has backward() write into the gradients of the model's parameters, changes
logits in place, wants 32-bit images of three axes and nine classes to aim at, and prints warnings. Its own run adds
checks that stop a debugger's or a coverage tool's tracing. So its four attacks are called one by one here, behind a
model that shields the real one; on ten classes or more the outcome is that of its standard version, bit for bit.
"""

import logging
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedprophet.attacks.attack import Logits, Outcome
from fedprophet.randomness import global_rng
from fedprophet.threat import ThreatModel

STANDARD = ("apgd-ce", "apgd-t", "fab-t", "square")
FAST = ("apgd-ce", "apgd-t")
MOST_TARGETS = 9
LEAST_CLASSES_TO_AIM = 4
"""The targeted DLR loss compares four logits."""
_QUIET = logging.Logger("pyautoattack", logging.CRITICAL + 1)
_COMPONENTS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "apgd-ce": ("apgd", {"loss": "ce"}),
    "apgd-t": ("apgd_targeted", {}),
    "fab": ("fab", {"targeted": False}),
    "fab-t": ("fab", {"targeted": True}),
    "square": ("square", {}),
}
"""For each component the member of pyautoattack's object that runs it, and the member's settings."""


def _attack(
    components: tuple[str, ...], logits: Logits, images: Tensor, labels: Tensor, threat: ThreatModel, seed: int
) -> Outcome:
    if threat.norm != "linf" or threat.bounds != (0.0, 1.0):
        raise ValueError(f"AutoAttack is for an l_inf ball in [0, 1], not for {threat}")
    with torch.no_grad():
        scores = logits(images)
    correct, classes = scores.argmax(dim=1) == labels, scores.shape[1]
    names = _for_classes(components, classes)
    broken = dict.fromkeys(names, 0)
    if threat.radius == 0:
        return Outcome(correct, broken)
    model, pictures = _shielded(logits, images, classes), _pictures(images)
    with global_rng(seed, "autoattack"):
        suite = _suite(model, threat.radius, seed, classes, images.device)
        for name in names:
            standing = correct.nonzero().flatten()
            if not len(standing):
                break
            member, settings = _COMPONENTS[name]
            attack = getattr(suite, member)
            vars(attack).update(settings)
            found = attack.perturb(pictures[standing], labels[standing])
            fell = standing[model(found).argmax(dim=1) != labels[standing]]
            correct[fell] = False
            broken[name] = len(fell)
    return Outcome(correct, broken)


autoattack = partial(_attack, STANDARD)
"""The standard AutoAttack: APGD-CE, APGD-T, FAB-T and Square, each on what the ones before it left standing."""
aa_fast = partial(_attack, FAST)
"""APGD-CE and APGD-T alone: nearly as strong, at a fraction of the time, and without a black-box attack."""


def _for_classes(components: tuple[str, ...], classes: int) -> tuple[str, ...]:
    """Leave out what aims at a class where there are too few to aim at; FAB also works without an aim."""
    if classes >= LEAST_CLASSES_TO_AIM:
        return components
    untargeted = {"apgd-t": None, "fab-t": "fab"}
    return tuple(name for name in (untargeted.get(part, part) for part in components) if name is not None)


def _suite(model: Logits, radius: float, seed: int, classes: int, device: torch.device) -> Any:
    """Return pyautoattack's object, which holds the four attacks with the settings of its standard version."""
    from pyautoattack import AutoAttack  # an extra: asked for by name before any work starts (attacks.names)

    suite = AutoAttack(model, norm="Linf", eps=radius, version="standard", seed=seed, device=device)
    suite.apgd_targeted.n_target_classes = suite.fab.n_target_classes = min(MOST_TARGETS, classes - 1)
    suite.apgd.logger = suite.apgd_targeted.logger = _QUIET
    return suite


def _pictures(images: Tensor) -> Tensor:
    """Return the images as 32-bit floats of channels, rows and columns, in this order, which is taken for granted."""
    shape = tuple(images.shape[1:])
    three = (1,) * (3 - len(shape)) + shape if len(shape) < 3 else (*shape[:2], math.prod(shape[2:]))
    return images.detach().float().reshape(len(images), *three).contiguous()


def _shielded(logits: Logits, images: Tensor, classes: int) -> Logits:
    """Return the model as pyautoattack may call it: on such pictures, with logits that it may change."""

    def model(x: Tensor) -> Tensor:
        if not len(x):  # Square asks about the samples left, even where none is
            return x.new_zeros((0, classes))
        x = x.reshape(len(x), *images.shape[1:]).to(images.dtype)
        if torch.is_grad_enabled() and x.requires_grad:
            scores: Tensor = _InputGradient.apply(x, logits)  # type: ignore[no-untyped-call]
        else:
            with torch.no_grad():
                scores = logits(x).clone()
        return scores.float()

    return model


class _InputGradient(torch.autograd.Function):
    """The model with a gradient for its input alone: backward() reaches no parameter.

    A model that cuts the gradient off, as a hard threshold does, has a zero one.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, logits: Logits) -> Tensor:
        with torch.enable_grad():
            ctx.input = x.detach().requires_grad_()
            ctx.scores = logits(ctx.input)
        return ctx.scores.detach().clone()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if not ctx.scores.requires_grad:
            return torch.zeros_like(ctx.input), None
        # FAB asks several times for one pass, so the graph stays until the scores go.
        (found,) = torch.autograd.grad(ctx.scores, ctx.input, gradient, retain_graph=True, allow_unused=True)
        return (torch.zeros_like(ctx.input) if found is None else found.contiguous()), None
