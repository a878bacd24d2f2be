"""AutoAttack (Croce & Hein, 2020), on samples that may each have a network of their own.

pyautoattack's runs of APGD and FAB are called one by one here, behind a model that shields the real one; on ten classes
or more the outcome is that of its standard version, bit for bit. What lies around the runs is ours, for two reasons:

- Rows of many clients are attacked as one batch, each by its client's network. Within one run of APGD or FAB the rows
  stay the same, so that the model knows whose they are; pyautoattack drops rows between runs without saying which.
  Square, which drops them within a run, is in `attacks.square`.
- pyautoattack seeds the global generators for a batch as a whole. Here a group of rows has a seed of its own, and meets
  the draws that it would meet alone: with whom it is attacked makes no difference.

It also has backward() write into the gradients of the model's parameters, changes logits in place, wants 32-bit images
of three axes and nine classes to aim at, prints warnings, and stops a debugger's or a coverage tool's tracing.
"""

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedprophet.attacks.attack import Logits, Outcome
from fedprophet.attacks.draws import GroupDraws
from fedprophet.attacks.square import square
from fedprophet.precision import exact_products
from fedprophet.randomness import global_rng
from fedprophet.threat import ThreatModel

STANDARD = ("apgd-ce", "apgd-t", "fab-t", "square")
FAST = ("apgd-ce", "apgd-t")
SUITES: Mapping[str, tuple[str, ...]] = {"autoattack": STANDARD, "aa-fast": FAST}
"""The components of each suite: `autoattack` is the standard one, each on what the ones before it left standing.
`aa-fast` is nearly as strong, at a fraction of the time, and without a black-box attack.
"""
MOST_TARGETS = 9
LEAST_CLASSES_TO_AIM = 4
"""The targeted DLR loss compares four logits."""
TINY = 1e-12
_QUIET = logging.Logger("pyautoattack", logging.CRITICAL + 1)

RowLogits = Callable[[Tensor, Tensor], Tensor]
"""Images, and the numbers of their rows, to class scores. The networks behind it must be in evaluation mode."""


@dataclass(frozen=True)
class Samples:
    """Rows that are attacked together. `groups` says which group each is of, in ascending order; a group has a seed."""

    images: Tensor
    labels: Tensor
    groups: Tensor
    seeds: Sequence[int]


@dataclass(frozen=True)
class RowOutcome:
    """Which rows are right, which of them under attack too, and for each component which ones it newly broke."""

    clean: Tensor
    correct: Tensor
    broken: Mapping[str, Tensor]


def attack_rows(components: tuple[str, ...], logits: RowLogits, samples: Samples, threat: ThreatModel) -> RowOutcome:
    """Attack rows with some components, each on what the ones before it left standing."""
    if threat.norm != "linf" or threat.bounds != (0.0, 1.0):
        raise ValueError(f"AutoAttack is for an l_inf ball in [0, 1], not for {threat}")
    everyone = torch.arange(len(samples.labels), device=samples.labels.device)
    # APGD draws where it starts from, even if it is told.
    with torch.no_grad(), exact_products(), global_rng(0, "autoattack"):
        scores = logits(samples.images, everyone)
        clean, classes = scores.argmax(dim=1) == samples.labels, scores.shape[1]
        correct, names = clean.clone(), _for_classes(components, classes)
        broken = {name: torch.zeros_like(clean) for name in names}
        model = _ShieldedModel(logits, samples, classes)
        suite = _suite(model, threat.radius, classes, samples.images.device)
        for name in names if threat.radius > 0 else ():
            standing = correct.nonzero().flatten()
            if not len(standing):
                break
            found = _COMPONENTS[name](suite, model, standing)
            broken[name][standing] = ~model.right(found, standing)
            correct &= ~broken[name]
    return RowOutcome(clean, correct, broken)


def _attack(
    components: tuple[str, ...], logits: Logits, images: Tensor, labels: Tensor, threat: ThreatModel, seed: int
) -> Outcome:
    samples = Samples(images, labels, torch.zeros_like(labels), [seed])
    found = attack_rows(components, lambda x, _: logits(x), samples, threat)
    return Outcome(found.correct, {name: int(rows.sum()) for name, rows in found.broken.items()})


autoattack, aa_fast = (partial(_attack, SUITES[name]) for name in ("autoattack", "aa-fast"))


def _for_classes(components: tuple[str, ...], classes: int) -> tuple[str, ...]:
    """Leave out what aims at a class where there are too few to aim at; FAB also works without an aim."""
    if classes >= LEAST_CLASSES_TO_AIM:
        return components
    untargeted = {"apgd-t": None, "fab-t": "fab"}
    return tuple(name for name in (untargeted.get(part, part) for part in components) if name is not None)


def _suite(model: Logits, radius: float, classes: int, device: torch.device) -> Any:
    """Return pyautoattack's object, which holds the four attacks with the settings of its standard version."""
    from pyautoattack import AutoAttack  # an extra: asked for by name before any work starts (attacks.names)

    suite = AutoAttack(model, norm="Linf", eps=radius, version="standard", seed=0, device=device)
    suite.apgd_targeted.n_target_classes = suite.fab.n_target_classes = min(MOST_TARGETS, classes - 1)
    suite.apgd.logger = suite.apgd_targeted.logger = _QUIET
    return suite


class _ShieldedModel:
    """The model as pyautoattack may call it: on 32-bit pictures of three axes, with scores that it may change.

    A call is about `rows`, which have to be set before.
    """

    def __init__(self, logits: RowLogits, samples: Samples, classes: int) -> None:
        self.pictures = _pictures(samples.images)
        self.labels = samples.labels
        self.groups = samples.groups
        self.rows = torch.arange(len(self.labels), device=self.labels.device)
        self._logits = logits
        self._samples = samples
        self._classes = classes

    def __call__(self, x: Tensor) -> Tensor:
        assert len(x) == len(self.rows)
        x = x.reshape(len(x), *self._samples.images.shape[1:]).to(self._samples.images.dtype)
        rows = self.rows

        def logits(images: Tensor) -> Tensor:
            return self._logits(images, rows)

        if torch.is_grad_enabled() and x.requires_grad:
            scores: Tensor = _InputGradient.apply(x, logits)  # type: ignore[no-untyped-call]
        else:
            with torch.no_grad():
                scores = logits(x).clone()
        return scores.float()

    def scores(self, x: Tensor, rows: Tensor) -> Tensor:
        """Return the scores of images in the place of some rows, which later calls are about."""
        self.rows = rows
        return self(x)

    def right(self, x: Tensor, rows: Tensor) -> Tensor:
        """Whether the images in the place of some rows are classified as these are labelled."""
        return self.scores(x, rows).argmax(dim=1) == self.labels[rows]

    def margin(self, x: Tensor, rows: Tensor) -> Tensor:
        """Return by how much the label's score is above all others."""
        scores, label = self.scores(x, rows), self.labels[rows].unsqueeze(1)
        others = scores.scatter(1, label, -math.inf).amax(dim=1)
        return scores.gather(1, label).squeeze(1) - others

    def draws(self) -> GroupDraws:
        """Return the draws of all groups, from their beginning: every component begins there."""
        return GroupDraws(self._samples.seeds)


def _pictures(images: Tensor) -> Tensor:
    """Return the images as 32-bit floats of channels, rows and columns, in this order, which is taken for granted."""
    shape = tuple(images.shape[1:])
    three = (1,) * (3 - len(shape)) + shape if len(shape) < 3 else (*shape[:2], math.prod(shape[2:]))
    return images.detach().float().reshape(len(images), *three).contiguous()


# The components: pyautoattack's object, the model and the rows that stand to images in their place, changed or not.

Aim = int | None
"""The rank of the class to aim at, 2 for the most likely wrong one; None without an aim."""
Run = Callable[[Tensor, Aim], tuple[Tensor, Tensor]]
"""Some rows and an aim to images in their place, and which of these count."""


def _in_turn(model: _ShieldedModel, rows: Tensor, aims: Iterable[Aim], run: Run) -> Tensor:
    """Run with one aim after the other, each on the rows that stand."""
    found = model.pictures[rows].clone()
    stands = model.right(found, rows)
    for aim in aims:
        at = stands.nonzero().flatten()
        if not len(at):
            break
        adversarial, fell = run(rows[at], aim)
        found[at[fell]] = adversarial[fell]
        stands[at[fell]] = False
    return found


def _apgd(attack: Any, model: _ShieldedModel, rows: Tensor, aims: Iterable[Aim]) -> Tensor:
    """Run APGD from a random point of the ball that touches its border."""
    draws = model.draws()
    attack.init_hyperparam(model.pictures)

    def run(rows: Tensor, aim: Aim) -> tuple[Tensor, Tensor]:
        x = model.pictures[rows]
        scores = model.scores(x, rows)
        attack.y_target = None if aim is None else scores.sort(dim=1)[1][:, -aim]
        drawn = 2 * draws.of_rows(model.groups[rows], tuple(x.shape[1:])) - 1
        start = x + attack.eps * (drawn / (drawn.abs().flatten(1).amax(dim=1).view(-1, 1, 1, 1) + TINY))
        _, stands, _, adversarial = attack.attack_single_run(x, model.labels[rows], x_init=start)
        return adversarial, ~stands

    return _in_turn(model, rows, aims, run)


def _fab(attack: Any, model: _ShieldedModel, rows: Tensor, aims: Iterable[Aim]) -> Tensor:
    """Run FAB from the image itself; what it finds outside the ball does not count."""

    def run(rows: Tensor, aim: Aim) -> tuple[Tensor, Tensor]:
        x = model.pictures[rows]
        at = torch.arange(len(rows), device=rows.device)
        # FAB leaves out what is wrong already, which rounding alone can make of a row that was right among others.
        while not bool((stands := model.right(x[at], rows[at])).all()):
            at = at[stands]
        adversarial = x.clone()
        if len(at):
            attack.target_class = aim
            labels = model.labels[rows[at]]
            adversarial[at] = attack.attack_single_run(x[at], labels, is_targeted=aim is not None)
        inside = (adversarial - x).abs().flatten(1).amax(dim=1) <= attack.eps
        return adversarial, inside & ~model.right(adversarial, rows)

    return _in_turn(model, rows, aims, run)


def _square(attack: Any, model: _ShieldedModel, rows: Tensor) -> Tensor:
    def run(rows: Tensor, _: Aim) -> tuple[Tensor, Tensor]:
        x = model.pictures[rows]

        def margin(images: Tensor, at: Tensor) -> Tensor:
            return model.margin(images, rows[at])

        groups, draws = model.groups[rows], model.draws()
        found = square(margin, x, groups, draws, attack.eps, attack.n_queries, attack.p_selection)
        return found, ~model.right(found, rows)

    return _in_turn(model, rows, (None,), run)


def _ranks(attack: Any) -> range:
    """Return the ranks of the classes that an attack aims at."""
    return range(2, attack.n_target_classes + 2)


_COMPONENTS: Mapping[str, Callable[[Any, _ShieldedModel, Tensor], Tensor]] = {
    "apgd-ce": lambda suite, model, rows: _apgd(suite.apgd, model, rows, (None,)),
    "apgd-t": lambda suite, model, rows: _apgd(suite.apgd_targeted, model, rows, _ranks(suite.apgd_targeted)),
    "fab": lambda suite, model, rows: _fab(suite.fab, model, rows, (None,)),
    "fab-t": lambda suite, model, rows: _fab(suite.fab, model, rows, _ranks(suite.fab)),
    "square": lambda suite, model, rows: _square(suite.square, model, rows),
}


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
