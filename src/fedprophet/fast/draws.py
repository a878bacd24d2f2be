"""Random numbers for work that is captured and repeated: in memory that stays, drawn anew before each repetition.

A captured graph draws nothing itself. So its numbers come from a generator that the plan seeds, and no global generator
is touched.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Fill = Callable[[Tensor, torch.Generator], Tensor]


def _uniform(values: Tensor, generator: torch.Generator) -> Tensor:
    return values.uniform_(generator=generator)


def _normal(values: Tensor, generator: torch.Generator) -> Tensor:
    return values.normal_(generator=generator)


class Draws:
    """Named draws of one piece of work. The first use of a name makes its memory; `renew` draws all of them again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._generator = torch.Generator(device)
        self._drawn: dict[str, tuple[Tensor, Fill]] = {}

    def seed(self, seed: int) -> None:
        """Begin a stream of draws."""
        self._generator.manual_seed(seed)

    def renew(self) -> None:
        """Draw every number again."""
        for values, fill in self._drawn.values():
            fill(values, self._generator)

    def uniform(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return numbers from [0, 1)."""
        return self._named(name, shape, _uniform)

    def normal(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return numbers from the standard normal distribution."""
        return self._named(name, shape, _normal)

    def _named(self, name: str, shape: tuple[int, ...], fill: Fill) -> Tensor:
        if name not in self._drawn:
            self._drawn[name] = fill(torch.empty(shape, device=self._device), self._generator), fill
        return self._drawn[name][0]
