"""Random numbers for work that is captured and repeated: in memory that stays, drawn anew before each repetition.

A captured graph draws nothing itself. So its numbers come from a generator that is seeded for each of them, and no
global generator is touched. Every client has a seed of its own: what it draws does not depend on the clients beside it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedprophet.randomness import key

Fill = Callable[..., Tensor]


@dataclass(frozen=True)
class _Drawn:
    """Numbers of the clients from `first` on, and how they are drawn."""

    values: Tensor
    fill: Fill
    first: int


class Draws:
    """Named draws of one piece of work: the first dimension is the clients'. The first use of a name makes its memory;
    `renew` draws all of them again.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._generator = torch.Generator(device)
        self._drawn: dict[str, _Drawn] = {}
        self._seeds: Sequence[int] | None = None

    def renew(self, seeds: Sequence[int]) -> None:
        """Draw every number again, given one seed for each client."""
        self._seeds = seeds
        for name in self._drawn:
            self._draw(name)

    def uniform(self, name: str, shape: tuple[int, ...], first: int = 0) -> Tensor:
        """Return numbers from [0, 1)."""
        return self._named(name, shape, Tensor.uniform_, first)

    def normal(self, name: str, shape: tuple[int, ...], first: int = 0) -> Tensor:
        """Return numbers from the standard normal distribution."""
        return self._named(name, shape, Tensor.normal_, first)

    def _named(self, name: str, shape: tuple[int, ...], fill: Fill, first: int) -> Tensor:
        if name not in self._drawn:
            self._drawn[name] = _Drawn(torch.zeros(shape, device=self._device), fill, first)
            self._draw(name)
        return self._drawn[name].values

    def _draw(self, name: str) -> None:
        if self._seeds is None:
            return  # nothing has been drawn yet
        drawn = self._drawn[name]
        for number, row in enumerate(drawn.values, start=drawn.first):
            self._generator.manual_seed(key(self._seeds[number], name))
            drawn.fill(row, generator=self._generator)

    @property
    def nbytes(self) -> int:
        """How much memory the numbers take."""
        return sum(drawn.values.nbytes for drawn in self._drawn.values())
