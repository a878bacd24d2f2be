"""The threat model: what an attacker may do to a tensor. It is a value that is passed, not five arguments."""

import math
from dataclasses import dataclass, replace
from typing import Literal

Norm = Literal["linf", "l2"]


@dataclass(frozen=True)
class ThreatModel:
    """A ball around the clean tensor, the range its entries live in, and how hard PGD tries inside both."""

    norm: Norm
    radius: float
    step: float
    steps: int
    bounds: tuple[float, float] = (-math.inf, math.inf)

    @property
    def harmless(self) -> bool:
        """Whether the attacker can change nothing."""
        return self.radius == 0 or self.steps == 0


def input_threat(radius: float, step: float, steps: int) -> ThreatModel:
    """Return the paper's threat on images: an l_inf ball in [0, 1] pixel space."""
    return ThreatModel("linf", radius, step, steps, (0.0, 1.0))


def feature_threat(radius: float, steps: int, bounds: tuple[float, float]) -> ThreatModel:
    """Return the paper's threat on features: an l2 ball, steps of 2.5 · radius / steps, the feature's own range."""
    return ThreatModel("l2", radius, 2.5 * radius / max(steps, 1), steps, bounds)


def scaled(threat: ThreatModel, share: float) -> ThreatModel:
    """Return a threat with a share of the radius, and steps to match."""
    return threat if share == 1 else replace(threat, radius=share * threat.radius, step=share * threat.step)


def with_steps(threat: ThreatModel, steps: int) -> ThreatModel:
    """Return the same threat with another number of steps; in an l2 ball the step follows."""
    if threat.norm == "l2":
        return feature_threat(threat.radius, steps, threat.bounds)
    return replace(threat, steps=steps)
