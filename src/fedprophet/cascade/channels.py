"""Channels of a model that belong together, and which of them a narrow sub-network keeps."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedprophet.errors import ConfigError

Kept = Mapping[str, Tensor]
"""For each group the channels that a sub-network keeps: sorted indices into the full ones."""
ChannelChoice = Callable[[int, int], Tensor]
"""Chooses `count` of `width` channels."""


class ChannelAxis(NamedTuple):
    """An axis of a tensor that holds a group's channels, each as `repeat` neighbours in a row."""

    axis: int
    group: str
    repeat: int = 1


@dataclass(frozen=True)
class Channels:
    """The channels of a model that can be cut.

    `groups` has the number of channels of each group, which is named after the first layer that makes it. `axes` says
    where they lie in the tensors of the model, by state-dict name; a tensor that is not there is never cut.
    """

    groups: Mapping[str, int]
    axes: Mapping[str, tuple[ChannelAxis, ...]]


def first_channels(width: int, count: int) -> Tensor:
    """Return the first channels (HeteroFL)."""
    return torch.arange(width)[:count]


def random_channels(width: int, count: int, generator: torch.Generator) -> Tensor:
    """Return a random set of channels (FedDrop)."""
    return torch.randperm(width, generator=generator)[:count].sort().values


def rolling_channels(width: int, count: int, start: int) -> Tensor:
    """Return a window that starts at `start` mod `width` and wraps around (FedRolex, where the round is the start).

    The indices are sorted: the order of a group's channels changes nothing, as long as all its tensors share it.
    """
    return ((start + torch.arange(width)[:count]) % width).sort().values


def kept_count(r: float, width: int) -> int:
    """Return how many of `width` channels a sub-network of width fraction `r` keeps: ⌊r · width⌋, at least one."""
    if not 0 < r <= 1:
        raise ConfigError(f"a width fraction must be above 0 and at most 1, not {r}")
    return max(1, math.floor(r * width))


def kept_channels(channels: Channels, r: float, choose: ChannelChoice) -> dict[str, Tensor]:
    """Choose the channels of a sub-network of width fraction `r`; `choose` is called for each group in turn.

    A choice with a setting is bound first: `partial(rolling_channels, start=round)`.
    """
    return {group: choose(width, kept_count(r, width)) for group, width in channels.groups.items()}
