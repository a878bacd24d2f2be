"""When a stage has converged, and which of its rounds is kept.

The paper trains a module for at most 500 rounds, and ends early when the accuracy has not improved for 50. What that
accuracy is and from when on it counts (`score` with its LARGEST_RATIO, the gate) it does not say: that is ours.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Best:
    """The best evaluated round of a stage so far."""

    round: int
    score: float
    clean: float
    adversarial: float
    alpha: float


@dataclass(frozen=True)
class StageRule:
    """A stage starts with `warmup` rounds of standard training; `gate` rounds later its score begins to count.

    In the `ramp` rounds after the warm-up the attack on images grows, and no score counts. From one evaluation to the
    next there are `every` rounds, and `before_gate` rounds as long as no score counts. `weight` is that of the
    adversarial accuracy in the score; None: ratio*. `waits_for_alpha`: patience begins anew when alpha changes, so that
    a stage is not over before the effect of the change can be seen.
    """

    rounds: int
    warmup: int
    gate: int
    patience: int
    every: int = 1
    before_gate: int = 1
    weight: float | None = None
    waits_for_alpha: bool = False
    ramp: int = 0

    @property
    def ungated(self) -> "StageRule":
        """The same where any round may be the best, as in a baseline: no evaluation is spared."""
        return replace(self, before_gate=self.every)

    def adversarial(self, stage_round: int) -> bool:
        """Whether a round (the first is 1) trains adversarially."""
        return stage_round > self.warmup

    def strength(self, stage_round: int) -> float:
        """Return which share of its radius the attack on images has in a round: 0 in the warm-up, then up to 1."""
        attacked = max(stage_round - self.warmup, 0)
        return min(attacked / max(self.ramp, 1), 1.0)

    def counts(self, stage_round: int) -> bool:
        """Whether a round can become the stage's best, end it, or move the perturbation."""
        return stage_round > self.warmup + max(self.gate, self.ramp)

    def evaluates(self, stage_round: int, failures: int = 0) -> bool:
        """Whether a round is evaluated: every few rounds if there is something new, and always the last of a stage.

        So a stage never lacks a best. `failures` are the rounds in a row that changed nothing.
        """
        interval = self.every if self.counts(stage_round) else self.before_gate
        return stage_round >= self.rounds or (not failures and stage_round % interval == 0)

    def score(self, clean: float, adversarial: float, reference: float) -> float:
        """Return by what the rounds of a stage are compared, given C*/A* of the stage before."""
        return score(clean, adversarial, reference if self.weight is None else self.weight)

    def overdue(self, stage_round: int, since_best: int | None, since_alpha: int | None = None) -> int:
        """Return for how many rounds the stage has been over; below 0 it is not.

        It is over when all its rounds are used, or when its best score has not been beaten for long: `since_best` are
        the rounds since then, `since_alpha` those since alpha changed; None where there was no such round.
        """
        beyond = stage_round - self.rounds
        if since_best is None:
            return beyond
        if self.waits_for_alpha and since_alpha is not None:
            since_best = min(since_best, since_alpha)
        return max(beyond, since_best - self.patience)


LARGEST_RATIO = 1e6


def score(clean: float, adversarial: float, reference: float) -> float:
    """Return clean + ratio* · adversarial, with ratio* = C*/A* of the stage before (1 in the first).

    After a stage without any adversarial accuracy the ratio is infinite; it counts as 10^6: robustness alone decides.
    """
    return clean + min(reference, LARGEST_RATIO) * adversarial


def better(best: Best | None, candidate: Best) -> Best:
    """Return the one with the higher score; a tie keeps the earlier."""
    return candidate if best is None or candidate.score > best.score else best
