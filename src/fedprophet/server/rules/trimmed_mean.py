"""Coordinate-wise trimmed mean (Yin et al., 2018)."""

import math
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import Any

from pydantic import Field
from torch import Tensor

from fedprophet.server.rules.registry import Parameters, Update, rule
from fedprophet.server.rules.robust import join_each, middle, voted_mean
from fedprophet.settings.describe import misfit
from fedprophet.settings.section import Section, section
from fedprophet.settings.toml import shown


@section("trimmed_mean")
class TrimmedMeanSettings(Section):
    """The rule "trimmed-mean": the mean of each coordinate without its smallest and largest values."""

    trim: float = Field(default=0.2, ge=0, lt=0.5, description="Share of the values left out at each end, rounded up.")

    def left_out(self, senders: int) -> int:
        """Return how many of n values are left out at each end: ⌈trim · n⌉, but never all of them."""
        return min(math.ceil(Fraction(repr(self.trim)) * senders), middle(senders))

    def conflicts(self, config: Any) -> Iterator[str]:
        if config.aggregate.rule == "trimmed-mean" and not self.trim:
            yield misfit("trimmed_mean.trim", self.trim, "above 0 with trimmed-mean, or nothing would be left out")

    def idle(self, config: Any) -> Iterator[tuple[str, str]]:
        if config.aggregate.rule != "trimmed-mean":
            yield "trim", f"aggregate.rule = {shown(config.aggregate.rule)}"


@rule(
    "trimmed-mean",
    "each coordinate's mean without its smallest and largest values; all clients count alike",
    averaged="trimmed mean over the clients that have trained",
    settings=TrimmedMeanSettings,
)
def trimmed_mean(current: Parameters, updates: Iterable[Update], settings: TrimmedMeanSettings) -> dict[str, Tensor]:
    """Average each coordinate without the ⌈trim · n⌉ smallest and as many of the largest of its n values.

    All clients count alike, whatever the size of their shard: a client that was left out must not come back in by its
    weight. Values of fewer than three clients, where none can be outvoted, are clipped to the median norm and averaged.
    """
    return join_each(current, updates, lambda base, sent: voted_mean(base, sent, settings.left_out))
