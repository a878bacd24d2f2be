"""Knowledge distillation on public samples: learning what other models predict there."""

import torch.nn.functional as F
from torch import Tensor

from fedprophet.client.aims import divergences
from fedprophet.client.descent import Loss, descend, whole_loss
from fedprophet.client.part import ModelPart
from fedprophet.data.examples import Examples
from fedprophet.messages.tasks import Distill
from fedprophet.randomness import key, seed_global


def distill(task: Distill, part: ModelPart, examples: Examples) -> float:
    """Train the part in place on the task's targets; return the mean loss of the iterations."""
    device = part.chain.device

    def loss_of(iteration: int, batch: Tensor) -> Loss:
        seed_global(key(task.seed, "dropout", task.round, task.client, task.number, iteration))
        with part.mode(training=len(batch) > 1):
            logits = part.logits(part.take(examples.fetch(batch)))
        targets = {name: value[batch.to(value.device)].to(device) for name, value in task.targets.items()}
        return whole_loss(distillation_losses(logits, targets).mean(), part)

    return descend(task, part, len(examples), loss_of)


def distillation_losses(logits: Tensor, targets: dict[str, Tensor]) -> Tensor:
    """Return each loss: weight · KL(probabilities ‖ softmax(logits)), plus CE(label) where labels are given."""
    log_softmax = F.log_softmax(logits, dim=1)
    losses = targets["weights"] * divergences(targets["probabilities"], log_softmax)
    if "labels" in targets:
        losses = losses + F.nll_loss(log_softmax, targets["labels"], reduction="none")
    return losses
