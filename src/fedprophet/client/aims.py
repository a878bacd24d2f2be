"""What a batch of samples is trained towards: each sample's loss, given the class scores of its exit.

An aim may wrap another one: what is added to a loss is a class here, and nothing that computes steps has to know it.
It can be cut like its batch, since some steps see a few samples at a time.
"""

from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor


def divergences(probabilities: Tensor, log_predicted: Tensor) -> Tensor:
    """Return KL(p ‖ q) of each row, given p and the logarithm of q."""
    return F.kl_div(log_predicted, probabilities, reduction="none").sum(dim=1)


class Aim(Protocol):
    """Returns each sample's loss for a batch's class scores; a slice of it is the aim of those samples."""

    def __call__(self, scores: Tensor, /) -> Tensor: ...
    def __getitem__(self, samples: slice, /) -> "Aim": ...


@dataclass(frozen=True)
class Labels:
    """The cross-entropy at the labels."""

    labels: Tensor

    def __call__(self, scores: Tensor) -> Tensor:
        return F.cross_entropy(scores, self.labels, reduction="none")

    def __getitem__(self, samples: slice) -> "Labels":
        return Labels(self.labels[samples])


@dataclass(frozen=True)
class Weighted:
    """Another aim, of which some samples' losses count for more than those of others."""

    aim: Aim
    weights: Tensor

    def __call__(self, scores: Tensor) -> Tensor:
        return self.weights * self.aim(scores)

    def __getitem__(self, samples: slice) -> "Weighted":
        return Weighted(self.aim[samples], self.weights[samples])


@dataclass(frozen=True)
class Drawn:
    """Another aim, and strength · KL(p ‖ softmax(scores)): a draw to the probabilities p, a row for each sample."""

    aim: Aim
    probabilities: Tensor
    strength: float

    def __call__(self, scores: Tensor) -> Tensor:
        return self.aim(scores) + self.strength * divergences(self.probabilities, F.log_softmax(scores, dim=1))

    def __getitem__(self, samples: slice) -> "Drawn":
        return Drawn(self.aim[samples], self.probabilities[samples], self.strength)
