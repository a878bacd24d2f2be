"""How one local iteration is computed in less memory: every way gives what the plain one gives, but a rounded one."""

from dataclasses import dataclass
from enum import StrEnum


class Step(StrEnum):
    """How the step on the loss is cut up, in the order of what it costs."""

    WHOLE = "whole"
    FUSED = "fused"
    """A gradient is stepped along and forgotten as soon as it is complete."""
    ATOMS = "atoms"
    """Also, only the inputs of atoms are kept, and an atom runs once more on the way back."""
    PIECES = "pieces"
    """Also, an atom runs on some samples at a time, with norm statistics of the whole batch."""


@dataclass(frozen=True)
class MemoryPlan:
    """How many samples are attacked at a time, how the step is cut up, and into pieces of how many samples.

    0 stands for the whole batch. Attack and step may be `sliced`: layers of large weights are computed by slices of
    these, and the step goes along the gradient of a slice before it makes the next. `rounded` keeps the inputs of atoms
    in bfloat16 until the way back: the forward pass and the loss are exact, gradients are those at inputs that are
    rounded to 8 bits.
    """

    attack: int = 0
    step: Step = Step.WHOLE
    piece: int = 0
    rounded: bool = False
    sliced: bool = False
    attack_sliced: bool = False

    def __str__(self) -> str:
        """Return it in words."""
        attack = f"attack {self.attack} at a time" if self.attack else "attack" * self.attack_sliced
        step = {
            Step.WHOLE: "",
            Step.FUSED: "step fused into backward",
            Step.ATOMS: "step atom by atom",
            Step.PIECES: f"step atom by atom in pieces of {self.piece}",
        }[self.step]
        kept = "activations kept in bfloat16 (rounded)" if self.rounded else ""
        halves = attack + BY_SLICES * self.attack_sliced, step + BY_SLICES * self.sliced
        return ", ".join(filter(None, (*halves, kept))) or "plain"


BY_SLICES = " by slices of weights"
PLAIN = MemoryPlan()
