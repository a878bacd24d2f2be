"""What a client measures: accuracy on its held-out part, and how far an attack moves its features (Eq. 11)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fedprophet.attacks.pgd import pgd
from fedprophet.client.segment import Segment
from fedprophet.client.task import ClientTask
from fedprophet.data.dataset import LocalExamples
from fedprophet.randomness import generator


def evaluate(task: ClientTask, segment: Segment, examples: LocalExamples) -> dict[str, float]:
    """Return how many held-out samples the segment gets right, clean and (where there is a threat) attacked."""
    counts = {"samples": float(len(examples)), "clean": 0.0}
    if task.threat is not None:
        counts["adversarial"] = 0.0
    with segment.mode(training=False):
        for number, positions in enumerate(torch.split(torch.arange(len(examples)), task.batch)):
            x, labels = examples.fetch(positions), examples.labels[positions]
            counts["clean"] += _correct(segment, x, labels)
            if task.threat is not None:
                draw = generator(task.seed, "evaluation attack", task.round, task.client, number)
                attacked = pgd(lambda z, y=labels: _task_loss(segment, z, y), x, task.threat, draw)  # type: ignore[misc]
                counts["adversarial"] += _correct(segment, attacked, labels)
    return counts


def _task_loss(segment: Segment, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(segment.logits(x), labels, reduction="sum")


def _correct(segment: Segment, x: Tensor, labels: Tensor) -> float:
    with torch.no_grad():
        return float((segment.logits(x).argmax(dim=1) == labels).sum())


def perturbation_magnitude(task: ClientTask, segment: Segment, inputs: Tensor) -> dict[str, float]:
    """Return the mean over samples of max ‖Δz_m‖₂, by an attack that maximises ‖Δz_m‖ itself (for Eq. 11)."""
    assert task.threat is not None
    total = 0.0
    with segment.mode(training=False):
        for number, x in enumerate(torch.split(inputs, task.batch)):
            with torch.no_grad():
                clean = segment.features(x)
            draw = generator(task.seed, "measuring attack", task.round, task.client, number)
            # The square has the norm's direction and, unlike it, a gradient where nothing has moved yet.
            attacked = pgd(lambda z, c=clean: (segment.features(z) - c).square().sum(), x, task.threat, draw)  # type: ignore[misc]
            with torch.no_grad():
                total += float((segment.features(attacked) - clean).flatten(1).norm(dim=1).sum())
    return {"samples": float(len(inputs)), "magnitude": total / max(len(inputs), 1)}
