"""Adaptive Perturbation Adjustment (Section 6.2): how strongly a module's input features are attacked."""

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class AdjustmentRule:
    """Eq. 12's constants. The paper's text adjusts every round on the last evaluation, with no lower limit."""

    enabled: bool = True
    change: float = 0.1
    threshold: float = 0.05
    every: int = 1
    window: int = 1
    floor: float = 0.0


def accuracy_ratio(clean: float, adversarial: float) -> float:
    """Return C / A. No adversarial accuracy at all makes it infinite, which asks for more robustness."""
    return clean / adversarial if adversarial > 0 else math.inf


@dataclass(frozen=True)
class Perturbation:
    """The l2 radius of the attack on a module's input features, and how it follows the accuracies.

    `magnitude` is E[max ‖Δz_{m−1}‖] as the clients measured it when module m−1 was fixed; `reference` is the
    C*_{m−1} / A*_{m−1} of that moment; `alpha` is the scaling factor that is adjusted.
    """

    magnitude: float
    reference: float
    alpha: float
    ratios: tuple[float, ...] = ()
    observed: int = 0

    @property
    def radius(self) -> float:
        """ε_{m−1} = α_{m−1} · E[max ‖Δz_{m−1}‖] (Eq. 11)."""
        return self.alpha * self.magnitude

    def observe(self, clean: float, adversarial: float, rule: AdjustmentRule) -> "Perturbation":
        """Take in one evaluation, and adjust α when one is due (Eq. 12)."""
        ratios = (*self.ratios, accuracy_ratio(clean, adversarial))[-rule.window :]
        seen = replace(self, ratios=ratios, observed=self.observed + 1)
        if not rule.enabled or seen.observed % rule.every:
            return seen
        ratio = sum(ratios) / len(ratios)
        alpha = self.alpha
        if ratio > (1 + rule.threshold) * self.reference:
            alpha += rule.change
        elif ratio < (1 - rule.threshold) * self.reference:
            alpha -= rule.change
        return replace(seen, alpha=max(alpha, rule.floor))
