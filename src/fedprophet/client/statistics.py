"""Two sets of norm statistics that share one affine transformation: for clean and for attacked inputs (FedRBN)."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from fedprophet.cascade.atoms import Chain
from fedprophet.cascade.norms import COUNTER, STATISTICS, statistics_names
from fedprophet.client.atomwise import features_in_pieces
from fedprophet.client.memory_plan import MemoryPlan, Step
from fedprophet.client.part import ModelPart
from fedprophet.client.sliced import by_slices

ADVERSARIAL = "adversarial."
"""A client keeps its adversarial statistics beside the others, under names that begin with this."""


def under_attack(own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a client's tensors with its adversarial statistics, where it has any, in the place of the clean ones."""
    second = {name.removeprefix(ADVERSARIAL): v for name, v in own.items() if name.startswith(ADVERSARIAL)}
    return {**{name: v for name, v in own.items() if not name.startswith(ADVERSARIAL)}, **second}


class TwoSets:
    """A chain that holds a client's adversarial statistics, with the clean ones beside it.

    A client that has no adversarial statistics yet begins with its clean ones.
    """

    def __init__(self, chain: Chain, own: Mapping[str, Tensor]) -> None:
        """Take the clean statistics that are loaded into the chain aside, and load the adversarial ones."""
        self._chain = chain
        self._names = statistics_names(chain, (*STATISTICS, COUNTER))
        self._aside = self._live()
        chain.load({name: own[ADVERSARIAL + name] for name in self._names if ADVERSARIAL + name in own})

    @property
    def aside(self) -> Iterable[Tensor]:
        """What is held beside the chain: the clean statistics."""
        return self._aside.values()

    def observe(self, part: ModelPart, x: Tensor, plan: MemoryPlan) -> None:
        """Update the clean statistics on a clean batch, cut up as the plan cuts up the step.

        A single sample has no batch statistics.
        """
        if len(x) < 2:
            return
        with self.clean(), torch.no_grad(), part.mode(training=True), by_slices(plan.sliced):
            if plan.step is Step.PIECES:
                features_in_pieces(part, x, plan.piece)
            else:
                part.features(x)

    @contextmanager
    def clean(self) -> Iterator[None]:
        """Let the chain have its clean statistics within a `with` block."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def both(self) -> dict[str, Tensor]:
        """Return both sets under the names that a client stores them with."""
        return {**self._aside, **{ADVERSARIAL + name: value for name, value in self._live().items()}}

    def _swap(self) -> None:
        """Exchange the two sets in place, so that neither moves to other memory."""
        tensors = self._chain.tensors
        with torch.no_grad():
            for name, aside in self._aside.items():
                live = tensors[name].clone()
                tensors[name].copy_(aside)
                aside.copy_(live)

    def _live(self) -> dict[str, Tensor]:
        tensors = self._chain.tensors
        return {name: tensors[name].detach().clone() for name in self._names}
