"""Draws for rows that are attacked together, but meet what they would meet among the rows of their own group alone."""

from collections.abc import Sequence

import torch
from torch import Tensor


class GroupDraws:
    """A generator for each group of rows. Numbers are drawn on the CPU: the same ones whatever the device."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def of_rows(self, groups: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return numbers from [0, 1) for rows that are in the order of their groups, where the rows are."""
        counts = torch.bincount(groups, minlength=len(self._generators)).tolist()
        pairs = zip(counts, self._generators, strict=True)
        return torch.cat([torch.rand((n, *shape), generator=own) for n, own in pairs if n]).to(groups.device)

    def of_groups(self, shape: tuple[int, ...]) -> Tensor:
        """Return numbers from [0, 1) for every group."""
        return torch.stack([torch.rand(shape, generator=own) for own in self._generators])
