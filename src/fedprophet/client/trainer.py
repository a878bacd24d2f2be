"""Adversarial cascade learning on one client (Section 5.1): attack the batch, then step on what the attack found."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor

from fedprophet.attacks.pgd import random_start
from fedprophet.client.aims import Aim
from fedprophet.client.atomwise import AtomwiseStep, pieces
from fedprophet.client.boundary import aim_of, counter, server_probabilities
from fedprophet.client.captured import Ascent, ascent_of
from fedprophet.client.descent import Descent, Loss, descend, fused_loss, whole_loss
from fedprophet.client.inputs import Inputs
from fedprophet.client.memory_plan import PLAIN, MemoryPlan, Step
from fedprophet.client.part import ModelPart
from fedprophet.client.sliced import SlicedWeights
from fedprophet.client.statistics import TwoSets
from fedprophet.messages.tasks import Train
from fedprophet.messages.values import LocalTraining
from fedprophet.randomness import generator, key, seed_global
from fedprophet.threat import ThreatModel


def train(
    task: Train,
    part: ModelPart,
    inputs: Inputs,
    labels: Tensor,
    sets: TwoSets | None = None,
    plan: MemoryPlan = PLAIN,
    check: Callable[[], None] = lambda: None,
) -> float:
    """Train the part in place on its inputs (images, or cached z_{m−1}); return the mean loss of the iterations.

    The clean one of two `sets` of norm statistics, if there are two, is shown every clean batch before it is attacked,
    unless statistics are fixed. `check` is called before every iteration. Dropout draws from torch's global generator,
    which the caller puts back.
    """
    with sets.clean() if sets else nullcontext():
        server = server_probabilities(task, part, inputs, plan)
    ascend = ascent_of(part, task.threat, task.training.strong_convexity, plan.attack, plan.attack_sliced)

    def loss_of(iteration: int, batch: Tensor) -> Loss:
        check()
        if sets is not None and not task.training.fixed_statistics:
            ascend.before(partial(sets.observe, part, inputs[batch], plan))
        right = labels[batch]
        withstood = counter(task.training, task.threat, right)
        x = perturb(task, part, inputs[batch], right, iteration, plan, ascend, withstood)
        rows = None if server is None else server[batch].to(x.device)
        aim = aim_of(task.training, task.threat, right, withstood, rows)
        seed_global(key(task.seed, "dropout", task.round, task.client, iteration))
        return ascend.step(lambda: training_loss(task.training, part, x, aim, plan))

    return descend(task, part, len(labels), loss_of)


def training_loss(training: LocalTraining, part: ModelPart, x: Tensor, aim: Aim, plan: MemoryPlan) -> Loss:
    """Return the mean loss of an attacked batch, and the way back from it, as the plan says."""

    @contextmanager
    def mode() -> Iterator[None]:
        # A batch of one sample has no batch statistics: its norm layers stay in evaluation mode.
        with part.mode(training=len(x) > 1), part.fixed_statistics(training.fixed_statistics):
            yield

    slices = SlicedWeights() if plan.sliced else None
    if plan.step in (Step.WHOLE, Step.FUSED):
        with mode(), slices or nullcontext():
            value = part.exit_losses(part.features(x), aim, training.strong_convexity).mean()
        loss = (whole_loss if plan.step is Step.WHOLE else fused_loss)(value, part)
    else:
        step = AtomwiseStep(part, plan.piece or len(x), plan.rounded)
        with mode(), slices or nullcontext():
            loss = Loss(step.forward(x, aim, training.strong_convexity), step.backward)

    def backward(descent: Descent) -> None:
        with mode(), slices.stepped_by(descent) if slices else nullcontext():
            loss.backward(descent)

    return Loss(loss.value, backward)


def perturb(
    task: Train,
    part: ModelPart,
    x: Tensor,
    labels: Tensor,
    iteration: int,
    plan: MemoryPlan,
    ascend: Ascent,
    withstood: Tensor | None = None,
) -> Tensor:
    """Attack the part's own loss at its input, norm layers and dropout in evaluation mode.

    There the samples of a batch do not know each other: some at a time give what all at once would. `ascend` is what
    attacks of one training share; `withstood` gets the steps before which each sample was still right (κ).
    """
    if task.threat is None:
        return x
    draw = generator(task.seed, "attack", task.round, task.client, iteration)
    return attacked(part, x, labels, task.threat, draw, plan.attack, ascend, withstood)


def attacked(
    part: ModelPart,
    x: Tensor,
    labels: Tensor,
    threat: ThreatModel,
    draw: torch.Generator,
    size: int,
    ascend: Ascent,
    withstood: Tensor | None = None,
) -> Tensor:
    """Attack a batch, `size` samples at a time (0: all of them)."""
    with part.still(), part.untrained():
        perturbed = random_start(x, threat, draw)
        for piece in pieces(len(x), size or len(x)):
            counts = () if withstood is None else (withstood[piece],)
            found = ascend(x[piece], perturbed[piece], labels[piece], *counts)
            if len(found) == len(x):
                return found
            perturbed[piece] = found
    return perturbed
