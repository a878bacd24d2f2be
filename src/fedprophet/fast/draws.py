"""Random numbers for work that is captured and repeated: in memory that stays, drawn anew before each repetition.

A captured graph draws nothing itself. So its numbers come from a generator that is seeded for each of them, and no
global generator is touched. Every client has a seed of its own: what it draws does not depend on who is beside it.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fedprophet.randomness import key

Fill = Callable[[Tensor, torch.Generator], Tensor]


def _uniform(values: Tensor, generator: torch.Generator) -> Tensor:
    return values.uniform_(generator=generator)


def _normal(values: Tensor, generator: torch.Generator) -> Tensor:
    return values.normal_(generator=generator)


class Draws:
    """Named draws of one piece of work: the first dimension is the clients'. The first use of a name makes its memory;
    `renew` draws all of them again.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._generator = torch.Generator(device)
        self._drawn: dict[str, tuple[Tensor, Fill]] = {}
        self._seeds: Sequence[int] | None = None

    def renew(self, seeds: Sequence[int]) -> None:
        """Draw every number again, given one seed for each client."""
        self._seeds = seeds
        for name in self._drawn:
            self._draw(name)

    def uniform(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return numbers from [0, 1)."""
        return self._named(name, shape, _uniform)

    def normal(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return numbers from the standard normal distribution."""
        return self._named(name, shape, _normal)

    def _named(self, name: str, shape: tuple[int, ...], fill: Fill) -> Tensor:
        if name not in self._drawn:
            self._drawn[name] = torch.zeros(shape, device=self._device), fill
            self._draw(name)
        return self._drawn[name][0]

    def _draw(self, name: str) -> None:
        if self._seeds is None:
            return  # the work is only being captured, and what it computes is thrown away
        values, fill = self._drawn[name]
        for row, seed in zip(values, self._seeds, strict=True):
            self._generator.manual_seed(key(seed, name))
            fill(row, self._generator)

    @property
    def nbytes(self) -> int:
        """How much memory the numbers take."""
        return sum(values.nbytes for values, _ in self._drawn.values())
