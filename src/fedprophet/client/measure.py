"""What a client measures: accuracy on its held-out part, and how far an attack moves its features (Eq. 11)."""

from collections.abc import Iterator

import torch
from torch import Tensor

from fedprophet.attacks import ATTACKS
from fedprophet.attacks.pgd import pgd
from fedprophet.client.segment import Segment
from fedprophet.data.dataset import LocalExamples
from fedprophet.messages.task import ClientTask
from fedprophet.randomness import generator, key


def evaluate(task: ClientTask, segment: Segment, examples: LocalExamples) -> dict[str, float]:
    """Return how many held-out samples the segment gets right, clean and (where there is a threat) attacked.

    An attack of several components also says how many samples each newly broke, as in "broken:square".
    """
    device = segment.chain.device
    counts = {"samples": 0.0, "clean": 0.0}
    if task.threat is not None:
        counts["adversarial"] = 0.0
    with segment.still():
        for number, positions in _micro_batches(task, len(examples)):
            x, labels = segment.take(examples.fetch(positions)), examples.labels[positions].to(device)
            counts["samples"] += len(positions)
            with torch.no_grad():
                counts["clean"] += float((segment.logits(x).argmax(dim=1) == labels).sum())
            if task.threat is not None:
                seed = key(task.seed, "evaluation attack", task.round, task.client, number)
                outcome = ATTACKS[task.attack].run(segment.logits, x, labels, task.threat, seed)
                counts["adversarial"] += float(outcome.correct.sum())
                for component, broken in outcome.broken.items():
                    name = f"broken:{component}"
                    counts[name] = counts.get(name, 0.0) + broken
    return counts


def _micro_batches(task: ClientTask, available: int) -> Iterator[tuple[int, Tensor]]:
    """Yield the positions of the samples to evaluate, a batch at a time, each with its number.

    The numbers name the attacks' draws and count from the first sample, not from the task's part: however the samples
    are dealt to tasks, each meets the same attack. So a part begins where a batch begins.
    """
    chosen = drawn_samples(task, available)
    first, last = task.part or (0, len(chosen))
    assert first % task.batch == 0
    for start in range(first, min(last, len(chosen)), task.batch):
        yield start // task.batch, chosen[start : min(start + task.batch, last)]


def drawn_samples(task: ClientTask, available: int) -> Tensor:
    """Return which samples are evaluated: all, or `task.samples` of them, the same for every attack and round."""
    if task.samples is None or task.samples >= available:
        return torch.arange(available)
    order = torch.randperm(available, generator=generator(task.seed, "evaluation samples", task.client))
    return order[: task.samples].sort().values


def perturbation_magnitude(task: ClientTask, segment: Segment, inputs: Tensor) -> dict[str, float]:
    """Return the mean over samples of max ‖Δz_m‖₂, by an attack that maximises ‖Δz_m‖ itself (for Eq. 11)."""
    assert task.threat is not None
    total = 0.0
    with segment.still():
        for number, x in enumerate(torch.split(inputs, task.batch)):
            with torch.no_grad():
                clean = segment.features(x)
            draw = generator(task.seed, "measuring attack", task.round, task.client, number)
            # The square has the norm's direction and, unlike it, a gradient where nothing has moved yet.
            attacked = pgd(lambda z, c=clean: (segment.features(z) - c).square().sum(), x, task.threat, draw)  # type: ignore[misc]
            with torch.no_grad():
                total += float((segment.features(attacked) - clean).flatten(1).norm(dim=1).sum())
    return {"samples": float(len(inputs)), "magnitude": total / max(len(inputs), 1)}
