"""What batches of stacks are trained towards: labels and the probabilities of a teacher, and the loss that they make.

The loss of a sample with the scores f, and q = softmax(f), is that of `client.aims` and of `client.distill`:

    −Σ y log q + w Σ p (log p − log q)

y is its one-hot label, all zeros where it has none, p what its teacher says of it, and w that teacher's weight. With
t = y + w p it is −Σ t log q but for a constant, and its gradient at the scores (Σ t) q − t. These t need not sum to 1.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

UNLABELLED = -1
"""The label of a sample that has none."""


@dataclass(frozen=True)
class Teacher:
    """What training is drawn to: probabilities (… × classes) and the weight of each sample (…) in the loss."""

    probabilities: Tensor
    weights: Tensor

    @classmethod
    def empty(cls, samples: tuple[int, ...], classes: int, device: torch.device) -> "Teacher":
        """Return memory for so many samples of so many clients."""
        return cls(torch.zeros((*samples, classes), device=device), torch.zeros(samples, device=device))

    def __getitem__(self, chosen: int | slice | tuple[Tensor, Tensor]) -> "Teacher":
        """Return what is said of some clients or samples."""
        return Teacher(self.probabilities[chosen], self.weights[chosen])

    def take(self, other: "Teacher") -> None:
        """Take over what another teacher says, in the memory that is there."""
        self.probabilities.copy_(other.probabilities)
        self.weights.copy_(other.weights)

    @property
    def nbytes(self) -> int:
        """How much memory it takes."""
        return self.probabilities.nbytes + self.weights.nbytes


def one_hot(labels: Tensor, classes: int) -> Tensor:
    """Return labels as float32 targets; torch's own would look at the labels from the host, and refuse no label."""
    return (labels.unsqueeze(-1) == torch.arange(classes, device=labels.device)).float()


def aimed(scores: Tensor, labels: Tensor, teacher: Teacher | None) -> tuple[Tensor, Tensor]:
    """Return each client's mean loss, and its gradient at the class scores (K×N×classes); labels are one-hot."""
    samples, log_q, q = scores.shape[1], scores.log_softmax(dim=2), scores.softmax(dim=2)
    if teacher is None:
        return -(log_q * labels).sum(dim=(1, 2)) / samples, (q - labels) / samples
    p, weights = teacher.probabilities, teacher.weights.unsqueeze(2)
    aims = labels + weights * p
    # Where p is near q, what nearly cancels is subtracted before it is summed.
    loss = weights * (torch.xlogy(p, p) - p * log_q) - labels * log_q
    return loss.sum(dim=(1, 2)) / samples, (aims.sum(dim=2, keepdim=True) * q - aims) / samples
