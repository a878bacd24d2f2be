"""The part of a chain that one task is about: some atoms in a row and the exit behind them."""

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedprophet.cascade.atoms import Chain
from fedprophet.cascade.heads import Head
from fedprophet.data.dataset import LocalExamples


@dataclass(frozen=True)
class ModelPart:
    """Atoms `first` … `last` − 1 and an exit: an auxiliary head, or None for the backbone's own classifier."""

    chain: Chain
    first: int
    last: int
    head: Head | None

    def features(self, x: Tensor) -> Tensor:
        """Return z_m, what the last atom outputs."""
        return self.chain.run(x, self.first, self.last)

    def logits(self, x: Tensor) -> Tensor:
        """Return the exit's class scores."""
        features = self.features(x)
        return features if self.head is None else self.head(features)

    def losses(self, x: Tensor, labels: Tensor, strong_convexity: float) -> Tensor:
        """Return each sample's regularised early-exit loss (Eq. 9; Eq. 13 when several modules are assigned).

        l = CE(W z + b, y) + mu/2 · ‖z‖². The backbone's own classifier ends the last module, which has no mu term.
        """
        features = self.features(x)
        if self.head is None:
            return F.cross_entropy(features, labels, reduction="none")
        task_loss = F.cross_entropy(self.head(features), labels, reduction="none")
        return task_loss + 0.5 * strong_convexity * features.flatten(1).square().sum(dim=1)

    def run_over(self, examples: LocalExamples, batch: int) -> Tensor:
        """Return z_m of every sample, in evaluation mode, `batch` samples at a time."""
        with torch.no_grad(), self.still():
            batches = torch.split(torch.arange(len(examples)), batch)
            return torch.cat([self.features(self.take(examples.fetch(positions))) for positions in batches])

    def parameters(self) -> list[nn.Parameter]:
        """Return what training changes: the atoms' parameters, norm layers included, and the head's."""
        names = (*self.chain.shared(self.first, self.last), *self.chain.local(self.first, self.last))
        tensors = self.chain.tensors
        own = [parameter for name in names if isinstance(parameter := tensors[name], nn.Parameter)]
        return own if self.head is None else [*own, *self.head.parameters()]

    def mode(self, training: bool) -> AbstractContextManager[None]:
        """Set the atoms to training or evaluation mode within a `with` block; the flags found come back after it."""
        return self.chain.mode(self.first, self.last, training)

    def still(self) -> AbstractContextManager[None]:
        """Set evaluation mode within a `with` block in which nothing is trained: for attacks and evaluation."""
        return self.chain.still(self.first, self.last)

    def take(self, x: Tensor) -> Tensor:
        """Return a batch as the chain reads it."""
        return self.chain.take(x)
