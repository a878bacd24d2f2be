"""What a client measures: accuracy on its held-out part, and how far an attack moves its features (Eq. 11)."""

from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor

from fedprophet.attacks import ATTACKS
from fedprophet.attacks.pgd import climb, random_start
from fedprophet.client.inputs import Inputs
from fedprophet.client.part import ModelPart
from fedprophet.data.examples import Examples
from fedprophet.messages.tasks import Evaluate, Measure
from fedprophet.randomness import generator, key
from fedprophet.threat import ThreatModel


def evaluate(
    task: Evaluate, part: ModelPart, examples: Examples, *, attacked: bool = True
) -> tuple[int, int, dict[str, int]]:
    """Return how many samples are right, how many are under attack, and how many each component of it newly broke."""
    device = part.chain.device
    clean, adversarial, broken = 0, 0, Counter[str]()
    with part.still():
        for seed, batch in attacked_batches(task, evaluated_positions(task, len(examples))):
            x, labels = part.take(examples.fetch(batch)), examples.labels[batch].to(device)
            with torch.no_grad():
                found = [part.logits(some).argmax(dim=1) for some in torch.split(x, task.batch)]
                clean += int((torch.cat(found) == labels).sum())
            if attacked and task.threat is not None:
                attack, given = ATTACKS[task.attack], (part.logits, x, labels, task.threat, seed)
                outcome = attack.cut(*given, task.batch) if attack.cut else attack.run(*given)
                adversarial += int(outcome.correct.sum())
                broken.update(outcome.broken)
    return clean, adversarial, dict(broken)


def attacked_batches(task: Evaluate, positions: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield a task's samples in the batches that are attacked, each with the seed of the attack's draws.

    The numbers of batches name the draws and count from the first sample, not from the task's part: however samples
    are dealt to tasks, each meets the same attack. So a part begins where a batch begins.
    """
    size = drawn_together(task)
    offset, remainder = divmod(task.part[0] if task.part else 0, size)
    assert not remainder
    for number, batch in enumerate(torch.split(positions, size), offset):
        yield key(task.seed, "evaluation attack", task.round, task.client, number), batch


def drawn_together(task: Evaluate) -> int:
    """Return how many samples an attack draws for at a time: as many as it attacks, or more if it can be cut."""
    return max(task.batch, task.drawn) if ATTACKS[task.attack].cut else task.batch


def evaluated_positions(task: Evaluate, available: int) -> Tensor:
    """Return which held-out samples are evaluated: all, or the task's part of `task.samples` that are drawn.

    The draw is the same for every attack and every round.
    """
    chosen = torch.arange(available)
    if task.samples is not None and task.samples < available:
        order = torch.randperm(available, generator=generator(task.seed, "evaluation samples", task.client))
        chosen = order[: task.samples].sort().values
    first, last = task.part or (0, len(chosen))
    return chosen[first:last]


def perturbation_magnitude(task: Measure, part: ModelPart, inputs: Inputs) -> float:
    """Return the mean over samples of max ‖Δz_m‖₂, by an attack that maximises ‖Δz_m‖ itself (for Eq. 11)."""
    total, size = 0.0, max(task.batch, task.drawn)
    with part.still():
        for number, start in enumerate(range(0, len(inputs), size)):
            x = inputs[start : start + size]
            draw = generator(task.seed, "measuring attack", task.round, task.client, number)
            started = random_start(x, task.threat, draw)
            for clean, perturbed in zip(torch.split(x, task.batch), torch.split(started, task.batch), strict=True):
                total += _moved(part, clean, perturbed, task.threat)
    return total / max(len(inputs), 1)


def _moved(part: ModelPart, clean: Tensor, started: Tensor, threat: ThreatModel) -> float:
    """Return the sum over samples of how far an attack from the starts that are given moves their features."""
    with torch.no_grad():
        before = part.features(clean)
    # The square has the norm's direction and, unlike it, a gradient where nothing has moved yet.
    attacked = climb(lambda z: (part.features(z) - before).square().sum(), clean, started, threat)
    with torch.no_grad():
        return float((part.features(attacked) - before).flatten(1).norm(dim=1).sum())
