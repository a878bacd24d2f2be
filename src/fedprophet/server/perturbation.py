"""Adaptive Perturbation Adjustment (Section 6.2): how strongly a module's input features are attacked."""

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import Field

from fedprophet.messages.answers import Measured
from fedprophet.server.aggregate import Aggregator
from fedprophet.server.coordinator import Record
from fedprophet.server.plausibility import outliers
from fedprophet.server.rejections import number_fault, reject, sound_answers, weight_fault
from fedprophet.settings.describe import misfit
from fedprophet.settings.section import Section, section
from fedprophet.settings.toml import shown
from fedprophet.settings.values import Clients
from fedprophet.threat import ThreatModel


@section("perturbation")
class PerturbationSettings(Section):
    """Adaptive Perturbation Adjustment (Eq. 11 and 12)."""

    enabled: bool = Field(default=True, description="Adjust alpha; false keeps it at its start.")
    start: float = Field(default=0.3, ge=0, description="alpha at the start of a stage.")
    restart: Literal["start", "last"] = Field(
        default="start",
        description="What a stage after the second begins with: the start value, or the last alpha, which the stage "
        "before was kept with, if that is higher. A low alpha lets robustness go until it has been raised again, which "
        "takes a good part of a stage.",
    )
    change: float = Field(default=0.1, ge=0, description="How much alpha changes at a time (Delta alpha).")
    threshold: float = Field(
        default=0.05, ge=0, lt=1, description="Relative change of the accuracy ratio that counts (gamma)."
    )
    every: int = Field(default=1, ge=1, description="Rounds from one adjustment to the next (50 in the paper's runs).")
    counted_from: Literal["gate", "warmup"] = Field(
        default="gate",
        description="From where those rounds are counted: the gate, or the first round after the warm-up (as in the "
        "paper's runs).",
    )
    window: int = Field(
        default=1, ge=1, description="Evaluations that the ratio is averaged over (5 in the paper's runs)."
    )
    floor: float = Field(default=0.0, ge=0, description="Lowest alpha (the start value in the paper's runs).")

    def starting(self, before: "Perturbation | None") -> float:
        """Return the α that a stage begins with; `before` is what the stage before was kept with, if on features."""
        carried = before.alpha if before is not None and self.restart == "last" else self.start
        return max(carried, self.start)

    def due(self, observed: int, since_warmup: int, evaluated_every: int) -> bool:
        """Whether α is adjusted after the evaluation number `observed`, in this round after the warm-up."""
        if self.counted_from == "gate":
            return observed % math.ceil(self.every / evaluated_every) == 0
        passed = since_warmup - 1
        return passed // self.every > (passed - evaluated_every) // self.every

    def conflicts(self, config: Any) -> Iterator[str]:
        if self.floor > self.start:
            yield misfit("perturbation.floor", self.floor, f"at most perturbation.start = {shown(self.start)}")

    def idle(self, config: Any) -> Iterator[tuple[str, str]]:
        if not self.enabled:
            of_adjusting = ("restart", "change", "threshold", "every", "counted_from", "window", "floor")
            yield from ((key, "perturbation.enabled = false") for key in of_adjusting)


@section("measure")
class MeasureSettings(Section):
    """Measuring max ‖Δz‖ at the end of a stage (Eq. 11)."""

    steps: int = Field(default=10, ge=1, description="PGD steps of the attack that maximises ‖Δz‖.")
    clients: Clients = Field(default="all", description="Clients that measure.")


def accuracy_ratio(clean: float, adversarial: float) -> float:
    """Return C / A. No adversarial accuracy at all makes it infinite, which asks for more robustness."""
    return clean / adversarial if adversarial > 0 else math.inf


def note_magnitude(
    answers: Sequence[Measured], threat: ThreatModel, aggregator: Aggregator, record: Record
) -> float | None:
    """Return E[max ‖Δz‖] over the clients' training samples (Eq. 11) and note what is not counted; None without any.

    It is joined by the run's rule: under the mean, as in the paper, weighted by training samples.
    """
    some = [answer for answer in answers if answer.weight != 0]  # others have nothing to measure on
    sound = aggregator.believed(_sound(some, threat, record), record)
    return aggregator.join_numbers([(each.weight, (each.magnitude,)) for each in sound])[0] if sound else None


def _sound(answers: Sequence[Measured], threat: ThreatModel, record: Record) -> list[Measured]:
    """Return the measured perturbations that can be counted, and note why the others cannot.

    An attack that may move a feature and moves it by nothing is not one: the next module would be trained without any.
    """
    least = sys.float_info.min if threat.radius > 0 else 0.0

    def fault(answer: Measured) -> str | None:
        return weight_fault(answer.weight) or number_fault("measured perturbation", answer.magnitude, least)

    sound = sound_answers(answers, fault, record)
    far = outliers({answer.client: answer.magnitude for answer in sound})
    if far:
        reject(record, {client: f"its measured perturbation is {text}" for client, text in far.items()})
    return [answer for answer in sound if answer.client not in far]


@dataclass(frozen=True)
class Perturbation:
    """The l2 radius of the attack on a module's input features, and how it follows the accuracies.

    `magnitude` is E[max ‖Δz_{m−1}‖] as the clients measured it when module m−1 was fixed; `reference` is the
    C*_{m−1} / A*_{m−1} of that moment; `alpha` is the scaling factor that is adjusted. `changed` is the round after the
    warm-up in which it last became another, 0 before that.
    """

    magnitude: float
    reference: float
    alpha: float
    ratios: tuple[float, ...] = ()
    observed: int = 0
    changed: int = 0

    @property
    def radius(self) -> float:
        """ε_{m−1} = α_{m−1} · E[max ‖Δz_{m−1}‖] (Eq. 11)."""
        return self.alpha * self.magnitude

    def observe(
        self,
        clean: float,
        adversarial: float,
        settings: PerturbationSettings,
        evaluated_every: int = 1,
        since_warmup: int = 0,
    ) -> "Perturbation":
        """Take in an evaluation, one in `evaluated_every` rounds, and adjust α when that is due (Eq. 12).

        `since_warmup` is the number of the round after the warm-up, from 1.
        """
        ratios = (*self.ratios, accuracy_ratio(clean, adversarial))[-settings.window :]
        seen = replace(self, ratios=ratios, observed=self.observed + 1)
        if not settings.enabled or not settings.due(seen.observed, since_warmup, evaluated_every):
            return seen
        ratio = sum(ratios) / len(ratios)
        alpha = self.alpha
        if ratio > (1 + settings.threshold) * self.reference:
            alpha += settings.change
        elif ratio < (1 - settings.threshold) * self.reference:
            alpha -= settings.change
        alpha = max(alpha, settings.floor)
        return replace(seen, alpha=alpha, changed=self.changed if alpha == self.alpha else since_warmup)
