"""Norm clipping (Sun et al., 2019): no client moves the model further than c."""

from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import Field
from torch import Tensor

from fedprophet.server.rules.mean import MEAN_OF_CLIENTS
from fedprophet.server.rules.registry import Parameters, Update, rule
from fedprophet.server.rules.robust import clipped_mean, join_each
from fedprophet.settings.section import Section, section
from fedprophet.settings.toml import shown


@section("clip")
class ClipSettings(Section):
    """The rule "clip": the mean of updates that are cut to a largest l2 norm."""

    norm: float = Field(
        default=0.0, ge=0, description="Largest l2 norm of an update; 0: the median norm of the round's updates."
    )

    def idle(self, config: Any) -> Iterator[tuple[str, str]]:
        if config.aggregate.rule != "clip":
            yield "norm", f"aggregate.rule = {shown(config.aggregate.rule)}"


def clip_numbers(current: Parameters, updates: Iterable[Update]) -> dict[str, Tensor]:
    """Let no number count as further from the current one than their median distance: `clip.norm` is for updates."""
    return join_each(current, updates, clipped_mean)


@rule(
    "clip",
    "the mean of updates that are cut to a largest l2 norm",
    averaged=f"{MEAN_OF_CLIENTS}, of layers clipped to the median distance from their start",
    settings=ClipSettings,
    numbers=clip_numbers,
)
def clip(current: Parameters, updates: Iterable[Update], settings: ClipSettings) -> dict[str, Tensor]:
    """Scale each update to a norm of at most c, then average.

    A client's update Δ_k is the difference between all that it sent and what the server has:

        w_n ← w_n + Σ_k q_k min(1, c / ‖Δ_k‖₂) Δ_{n,k} / Σ_k q_k

    Directions and weights stay as they were sent. What the server does not have yet counts from zero.
    """
    return join_each(current, updates, clipped_mean, largest=settings.norm)
