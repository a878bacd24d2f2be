"""What a part reads for each sample of a client."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Inputs(Protocol):
    """What a part reads for each sample: a tensor of them all, or what fetches those that are asked for."""

    def __len__(self) -> int: ...
    def __getitem__(self, positions: Tensor | slice, /) -> Tensor: ...


@dataclass(frozen=True)
class FetchedInputs:
    """Inputs that are fetched when they are asked for, by their positions."""

    samples: int
    fetch: Callable[[Tensor], Tensor]

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, positions: Tensor | slice, /) -> Tensor:
        return self.fetch(torch.arange(self.samples)[positions])
