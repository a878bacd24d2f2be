"""The part of a chain that one task is about: some atoms in a row and the exit behind them."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedprophet.cascade.atoms import Chain
from fedprophet.cascade.heads import Head
from fedprophet.cascade.norms import norm_modules
from fedprophet.cascade.trace import flags
from fedprophet.data.examples import Examples
from fedprophet.storage.mapped import empty_in_file


@dataclass(frozen=True)
class ModelPart:
    """Atoms `first` … `last` − 1 and an exit: an auxiliary head, or None for the backbone's own classifier.

    `prior` is what a client adds to class scores: the logarithm of its label frequencies, where they are calibrated.
    """

    chain: Chain
    first: int
    last: int
    head: Head | None
    prior: Tensor | None = None

    def features(self, x: Tensor) -> Tensor:
        """Return z_m, what the last atom outputs."""
        return self.chain.run(x, self.first, self.last)

    def logits(self, x: Tensor) -> Tensor:
        """Return the exit's class scores."""
        return self._scores(self.features(x))

    def exit_losses(self, features: Tensor, aim: Callable[[Tensor], Tensor], strong_convexity: float) -> Tensor:
        """Return each sample's regularised early-exit loss, given z_m (Eq. 9; for several modules Eq. 13).

        l = CE(W z + b, y) + mu/2 · ‖z‖². The backbone's own classifier ends the last module, which has no mu term.
        With a prior π it is CE(W z + b + log π, y): the scores are then those of balanced labels (Menon et al., 2021;
        Chen et al., CalFAT, 2022). The cross-entropy is what the aim says of the scores, and may be another one. It has
        no say in the mu term, which is there for every sample alike: it keeps the loss strongly convex.
        """
        task_loss = aim(self._scores(features))
        if self.head is None:
            return task_loss
        return task_loss + 0.5 * strong_convexity * features.flatten(1).square().sum(dim=1)

    def _scores(self, features: Tensor) -> Tensor:
        scores: Tensor = features if self.head is None else self.head(features)
        return scores if self.prior is None else scores + self.prior

    def run_over(self, examples: Examples, batch: int) -> Tensor:
        """Return z_m of every sample, in evaluation mode, `batch` samples at a time."""
        with torch.no_grad(), self.still():
            batches = torch.split(torch.arange(len(examples)), batch)
            return torch.cat([self.features(self.take(examples.fetch(positions))) for positions in batches])

    @property
    def mixes_samples(self) -> bool:
        """Whether samples of a batch know each other in evaluation mode too: by norm layers without statistics."""
        layers = self.chain.modules(self.first, self.last)
        return any(isinstance(layer, _BatchNorm) and layer.running_mean is None for layer in layers)

    @property
    def layers(self) -> str:
        """The layers of its atoms, as people call them."""
        return ", ".join(layer for atom in self.chain.atoms[self.first : self.last] for layer in atom.layers)

    @property
    def tensors(self) -> list[Tensor]:
        """What it consists of: parameters and statistics of its atoms, and the head's parameters."""
        tensors, span = self.chain.tensors, (self.first, self.last)
        own = [tensors[name] for name in (*self.chain.shared(*span), *self.chain.local(*span))]
        return own if self.head is None else [*own, *self.head.parameters()]

    def run_into_file(self, examples: Examples, batch: int) -> Tensor:
        """Return z_m of every sample as `run_over` does, in a file instead of in memory, on the CPU."""
        samples = len(examples)
        with torch.no_grad(), self.still():
            found = self.features(self.take(examples.fetch(torch.arange(min(batch, samples)))))
            kept = empty_in_file((samples, *found.shape[1:]), found.dtype)
            kept[:batch] = found
            for start in range(batch, samples, batch):
                some = torch.arange(start, min(start + batch, samples))
                kept[start : start + batch] = self.features(self.take(examples.fetch(some)))
        return kept

    def parameters(self) -> list[nn.Parameter]:
        """Return what training changes: the atoms' parameters, norm layers included, and the head's."""
        own = self._parameters((*self.chain.shared(self.first, self.last), *self.chain.local(self.first, self.last)))
        return own if self.head is None else [*own, *self.head.parameters()]

    def shared_parameters(self) -> list[nn.Parameter]:
        """Return what of it goes back to the server."""
        own = self._parameters(self.chain.shared(self.first, self.last))
        return own if self.head is None else [*own, *self.head.parameters()]

    def _parameters(self, names: Iterable[str]) -> list[nn.Parameter]:
        tensors = self.chain.tensors
        return [parameter for name in names if isinstance(parameter := tensors[name], nn.Parameter)]

    def mode(self, training: bool) -> AbstractContextManager[None]:
        """Set the atoms to training or evaluation mode within a `with` block; the flags found come back after it."""
        return self.chain.mode(self.first, self.last, training)

    @contextmanager
    def fixed_statistics(self, fixed: bool = True) -> Iterator[None]:
        """Let norm layers normalise with the statistics they have, within a `with` block and a mode."""
        with flags(norm_modules(self.chain, self.first, self.last).values() if fixed else (), training=False):
            yield

    @contextmanager
    def untrained(self) -> Iterator[None]:
        """Let no parameter want a gradient within a `with` block, so that nothing is kept for one."""
        wanting = [parameter for parameter in self.parameters() if parameter.requires_grad]
        try:
            for parameter in wanting:
                parameter.requires_grad_(False)
            yield
        finally:
            for parameter in wanting:
                parameter.requires_grad_()

    def still(self) -> AbstractContextManager[None]:
        """Set evaluation mode within a `with` block in which nothing is trained: for attacks and evaluation."""
        return self.chain.still(self.first, self.last)

    def take(self, x: Tensor) -> Tensor:
        """Return a batch as the chain reads it."""
        return self.chain.take(x)
