"""Input normalisation as a part of the model: attacks work in [0, 1] pixel space, so it cannot live in the data."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedprophet.errors import ModelError


class Normalize(nn.Module):
    """Subtract a mean and divide by a standard deviation for each channel; nothing to learn, nothing to save."""

    mean: Tensor
    std: Tensor
    numbers: tuple[tuple[float, ...], tuple[float, ...]]
    """Means and deviations as they were given, for people and files."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        if not mean or len(mean) != len(std):
            raise ModelError(
                f"Normalize needs one mean and one standard deviation for each channel, not {len(mean)} and {len(std)}"
            )
        if not all(math.isfinite(value) for value in (*mean, *std)) or min(std) <= 0:
            raise ModelError(f"Normalize needs finite means and positive deviations, not {list(mean)} and {list(std)}")
        self.numbers = tuple(mean), tuple(std)
        self._elsewhere: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self.register_buffer("mean", torch.tensor(list(mean), dtype=torch.float32).view(-1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(list(std), dtype=torch.float32).view(-1, 1, 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        mean, std = self._on(x.device)
        return (x - mean.to(x.dtype)) / std.to(x.dtype)

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return both on a device. It belongs to the chain, not to the model, so it is not moved with the model.

        They are copied there once: a graph that is captured on a GPU cannot copy from the CPU.
        """
        if device == self.mean.device:
            return self.mean, self.std
        if device not in self._elsewhere:
            self._elsewhere[device] = self.mean.to(device), self.std.to(device)
        return self._elsewhere[device]
