"""The columns of the tables: what each says of some runs that differ in their seed alone."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from fedprophet.methods import METHODS
from fedprophet.report.compare import Statistic
from fedprophet.report.runs import ReadFolder
from fedprophet.runs.evaluator import Kind


def spread(values: Sequence[float]) -> str:
    """Return `76.8 ± 1.2`, the mean and the sample standard deviation; of a single value that one."""
    found = Statistic.of(values)
    if found is None:
        return ""
    return f"{found.mean:.1f}" + ("" if found.deviation is None else f" ± {found.deviation:.1f}")


def spreads(runs: Iterable[ReadFolder], numbers: Callable[[ReadFolder], Sequence[float] | None]) -> str:
    """Return the spread of each of some numbers over runs, with strokes between; of those that have the numbers."""
    found = [values for run in runs if (values := numbers(run)) is not None]
    return " / ".join(spread(values) for values in zip(*found, strict=True))


def accuracies(kind: Kind, *attacks: str) -> Callable[[ReadFolder], Sequence[float] | None]:
    """Return what gives a run's accuracies of a kind, in %; None where one was not measured."""

    def of(run: ReadFolder) -> Sequence[float] | None:
        cells = run.summary.accuracies.get(kind, {})
        return [100 * cells[attack].accuracy for attack in attacks] if cells.keys() >= set(attacks) else None

    return of


def last_round(run: ReadFolder) -> Sequence[float] | None:
    """Return a run's last accuracies in %."""
    last = run.summary.last
    return None if last is None else (100 * last.clean, 100 * last.adversarial)


def best_round(run: ReadFolder) -> Sequence[float] | None:
    """Return a cascade's accuracies in its best round of all stages, in %; a baseline's are those of its model."""
    best = run.summary.best
    cascade = METHODS[run.summary.config.method].cascade
    return None if best is None or not cascade else (100 * best.clean, 100 * best.adversarial)


def which_round(runs: Sequence[ReadFolder]) -> str:
    """Return which round was the best, of how many, and a cascade's accuracies in it; of several runs these alone."""
    reached = spreads(runs, best_round)
    best = runs[0].summary.best
    if len(runs) > 1 or best is None:
        return reached
    return f"{best.round:,} of {runs[0].summary.rounds:,}" + (f": {reached}" if reached else "")


def autoattack(runs: Sequence[ReadFolder]) -> str:
    """Return the personalised accuracy under AutoAttack, on how many samples of each run and of how many seeds."""
    text = spreads(runs, accuracies("personalised", "autoattack"))
    cells = [run.summary.accuracies.get("personalised", {}).get("autoattack") for run in runs]
    found = [cell for cell in cells if cell]
    samples = ", ".join(sorted({f"{cell.samples:,}" for cell in found}))
    of_some = f", {len(found)} of {len(runs)} seeds" if len(found) < len(runs) else ""
    return f"{text} ({samples} samples{of_some})" if text else ""


def hours(runs: Sequence[ReadFolder]) -> str:
    """Return the simulated time."""
    text = spreads(runs, lambda run: [run.summary.time.total / 3600] if run.summary.time else None)
    return f"{text} h" if text else ""


def wall_clock(runs: Sequence[ReadFolder]) -> str:
    """Return what one run took on the clock."""
    seconds = runs[0].seconds
    return f"{seconds:,.0f} s" if len(runs) == 1 and seconds is not None else ""


Make = Callable[[Sequence[ReadFolder]], str]


def clean_and_attacked(kind: Kind) -> Make:
    """Return the column of the accuracies of a kind."""
    return lambda runs: spreads(runs, accuracies(kind, "clean", "pgd20"))


COLUMNS: Mapping[str, Make] = {
    "personalised clean / PGD-20": clean_and_attacked("personalised"),
    "uncalibrated clean / PGD-20": clean_and_attacked("uncalibrated"),
    "personalised AutoAttack": autoattack,
    "global clean / PGD-20": clean_and_attacked("global"),
    "best round": which_round,
    "last round, personalised": lambda runs: spreads(runs, last_round),
    "simulated time": hours,
    "wall clock": wall_clock,
}
"""Those of our own numbers; the paper's are in `tables`."""
