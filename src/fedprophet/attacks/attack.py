"""What an attack is in evaluation: one signature for all of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from fedprophet.threat import ThreatModel

Logits = Callable[[Tensor], Tensor]
"""Images to class scores. The network behind it must be in evaluation mode."""


@dataclass(frozen=True)
class Outcome:
    """Which samples are still classified correctly, and how many samples each of the attack's components newly broke.

    A sample counts for the first component that broke it; an attack without components names none.
    """

    correct: Tensor
    broken: Mapping[str, int] = field(default_factory=dict)


AttackFunction = Callable[[Logits, Tensor, Tensor, ThreatModel, int], Outcome]
"""Scores, images, labels, threat and seed to the outcome; the same arguments always give the same outcome."""
CutAttackFunction = Callable[[Logits, Tensor, Tensor, ThreatModel, int, int], Outcome]
"""The same on so many images at a time: what is drawn is drawn for all of them at once."""


@dataclass(frozen=True)
class AttackEntry:
    """A way to carry out a threat: the function, its name in tables, and what it needs."""

    run: AttackFunction
    label: str
    cut: CutAttackFunction | None = None
    """The same with less memory; None if what it draws depends on how many images it attacks at a time."""
    takes_steps: bool = False
    """Whether its name is followed by a number of steps, as in pgd20."""
    module: str | None = None
    """A package that is not always installed."""
    extra: str | None = None
    """The extra that brings the package."""
