"""At which scale experiments run: the paper's settings, or a small stand-in for each."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class PaperSetting:
    """Data, model and fleet. `paper` is the part of the paper's tables beside which its numbers stand.

    `balanced` is the setting with the same data on a balanced fleet, perhaps this one. `small_model` is the small
    model of Table 1. `seconds` are wall-clock seconds of a run by its method, where they were measured.
    """

    preset: str
    label: str
    paper: str
    balanced: str
    small_model: str
    seconds: Mapping[str, float]

    @property
    def on_balanced_fleet(self) -> bool:
        return self.balanced == self.preset


@dataclass(frozen=True)
class Scale:
    """The settings that stand for the paper's, and how the numbers are to be read."""

    name: str
    help: str
    hardware: str
    settings: tuple[PaperSetting, ...]
    like_the_paper: bool
    """Whether our numbers can be subtracted from the paper's."""
    attacks: bool
    """Whether trained models are also measured with AutoAttack, which takes long."""


H200 = {"jfat": 701.0, "fedprophet": 3500 * 0.92}
"""benchmarks/results/cifar10.md: three jFAT runs; 1,179 s for 1,279 rounds of FedProphet, which has at most 3,500."""
TWO_CORES = {
    "jfat": 30.0,
    "feddf": 57.0,
    "fedet": 48.0,
    "heterofl": 55.0,
    "feddrop": 59.0,
    "fedrolex": 62.0,
    "fedrbn": 21.0,
    "fedprophet": 38.0,
}
"""Half of the processor time that a run took with two workers on an AMD EPYC (docs/how-to/reproduce.md)."""


def _setting(data: str, fleet: str, label: str, small: str, seconds: Mapping[str, float]) -> PaperSetting:
    title = f"{label} {fleet}"
    return PaperSetting(f"{data}-{fleet}", title, title, f"{data}-balanced", small, seconds)


PAPER = Scale(
    "paper",
    "the paper's data, models and rounds",
    "one H200",
    (
        _setting("cifar10", "balanced", "CIFAR-10", "cnn3", H200),
        _setting("cifar10", "unbalanced", "CIFAR-10", "cnn3", H200),
        _setting("caltech256", "balanced", "Caltech-256", "cnn4", {}),
        _setting("caltech256", "unbalanced", "Caltech-256", "cnn4", {}),
    ),
    like_the_paper=True,
    attacks=True,
)
SMALL = Scale(
    "small",
    "digits and a VGG of seven convolutions in place of CIFAR-10 and VGG16, on a balanced fleet",
    "two CPU cores",
    (PaperSetting("digits-paper", "digits", "CIFAR-10 balanced", "digits-paper", "vgg-small-3", TWO_CORES),),
    like_the_paper=False,
    attacks=False,
)
SCALES: Mapping[str, Scale] = {scale.name: scale for scale in (PAPER, SMALL)}
