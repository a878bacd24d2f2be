"""What an experiment is: where its numbers come from, what the paper claims about them, and how they are drawn.

Numbers come from trained runs (`Trained`), are computed (`Computed`), or are times by the simulated clock (`Clocked`);
all say which runs they need and what they found.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from fedprophet.durations import format_duration
from fedprophet.report.compare import Statistic
from fedprophet.reproduce.drawing import Draw
from fedprophet.reproduce.findings import Claim, Curve, Part, Quantity, Values
from fedprophet.reproduce.readings import Reading
from fedprophet.reproduce.runs import FinishedRun, PlannedRun, Setup, Variant, finished, once, with_scale
from fedprophet.reproduce.scales import PAPER, PaperSetting

Say = Callable[[str], None]


def silent(text: str) -> None:
    """Say nothing."""


class Source(Protocol):
    """Where an experiment's numbers come from."""

    @property
    def effort(self) -> str:
        """What it takes where there are no runs to train."""
        ...

    @property
    def rows(self) -> Mapping[str, Variant]:
        """What its rows train, or would train."""
        ...

    def heeds_changes(self, setup: Setup) -> bool:
        """Return whether the keys that the user changes reach it."""
        ...

    def runs(self, setup: Setup) -> tuple[PlannedRun, ...]:
        """Return the runs that it needs, each once."""
        ...

    def parts(self, setup: Setup, say: Say = silent) -> Iterator[Part]:
        """Yield what is known now, a part for each setting; say what takes long before it is begun."""
        ...


@dataclass(frozen=True)
class Experiment:
    """A table or figure of the paper. `attacks` are what trained models are measured with beside clean and PGD."""

    name: str
    title: str
    shows: str
    source: Source
    quantities: tuple[Quantity, ...]
    draw: Draw
    claims: tuple[Claim, ...] = ()
    attacks: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """Its name as the paper writes it: `Table 2`."""
        kind = self.name.rstrip("0123456789")
        return f"{kind.capitalize()} {self.name.removeprefix(kind)}"


class WithoutRuns:
    """What trains nothing."""

    def runs(self, setup: Setup) -> tuple[PlannedRun, ...]:
        return ()


@dataclass(frozen=True)
class Computed(WithoutRuns):
    """Numbers that follow from the paper's models, pools and cost model; the same whatever is asked for."""

    compute: Callable[[Setup], Iterator[Part]]
    effort = "no data, no training"

    @property
    def rows(self) -> Mapping[str, Variant]:
        """Nothing is trained, and nothing can be changed."""
        return {}

    def heeds_changes(self, setup: Setup) -> bool:
        return False

    def parts(self, setup: Setup, say: Say = silent) -> Iterator[Part]:
        yield from self.compute(replace(with_scale(setup, PAPER), overrides=()))


@dataclass(frozen=True)
class Clocked(WithoutRuns):
    """Simulated time of the paper's runs; it heeds what is changed in these, not in small ones."""

    compute: Callable[[Setup, PaperSetting], Part]
    rows: Mapping[str, Variant]
    effort = "no data, no training; a few minutes"

    def heeds_changes(self, setup: Setup) -> bool:
        return setup.scale == PAPER

    def parts(self, setup: Setup, say: Say = silent) -> Iterator[Part]:
        paper = with_scale(setup, PAPER)
        for number, setting in enumerate(paper.settings, start=1):
            say(f"setting {number} of {len(paper.settings)}: {setting.label}, simulating its rounds")
            yield self.compute(paper, setting)


@dataclass(frozen=True)
class Trained:
    """Numbers of trained runs: a row is a variant, a column is a reading; the mean over seeds.

    `unbalanced`: also on unbalanced fleets. `tables` has rows of its own in place of the variants; like `curves`, it is
    read from the first seed.
    """

    rows: Mapping[str, Variant]
    readings: Mapping[str, Reading]
    unbalanced: bool = False
    tables: Callable[[FinishedRun], Values] | None = None
    curves: tuple[Callable[[FinishedRun], Curve], ...] = ()
    effort = "no runs in these settings"

    def heeds_changes(self, setup: Setup) -> bool:
        return True

    def runs(self, setup: Setup) -> tuple[PlannedRun, ...]:
        return once(
            run
            for setting in self._settings(setup)
            for variant in self.rows.values()
            for run in setup.planned(setting, variant)
        )

    def parts(self, setup: Setup, say: Say = silent) -> Iterator[Part]:
        for setting in self._settings(setup):
            there = {row: list(finished(setup.planned(setting, variant))) for row, variant in self.rows.items()}
            values = {row: self._values(runs) for row, runs in there.items()}
            firsts = [runs[0] for runs in there.values() if runs]
            tables = {row: exact for run in firsts for row, exact in (self.tables(run) if self.tables else {}).items()}
            curves = tuple(curve(run) for run in firsts for curve in self.curves)
            notes = tuple(f"{setting.label}: {note}" for note in _about(there))
            yield Part(setting.label, setting.paper, tables or values, curves, notes)

    def _settings(self, setup: Setup) -> tuple[PaperSetting, ...]:
        return tuple(w for w in setup.settings if self.unbalanced or w.on_balanced_fleet)

    def _values(self, runs: list[FinishedRun]) -> dict[str, Statistic]:
        found = {
            name: Statistic.of([value for value in map(read, runs) if value is not None])
            for name, read in self.readings.items()
        }
        return {name: value for name, value in found.items() if value is not None}


def _about(there: Mapping[str, list[FinishedRun]]) -> Iterator[str]:
    """Yield what a reader must know of the runs: starting weights, cascades whose best round is not the last model."""
    runs = [run for found in there.values() for run in found]
    weights = dict.fromkeys(run.results.get("starting_weights") or "drawn at random" for run in runs)
    if runs:
        yield f"starting weights {', '.join(weights)}."
        seconds = sum({run.path: run.seconds for run in runs}.values())
        yield f"all runs together took {format_duration(seconds)} of wall clock."
    for run in {run.path: run for run in runs}.values():
        best, last = run.results.get("best", {}), len(run.results["modules"])
        if best.get("module", last) < last:
            where = f"round {best['round']}, when module {best['module']} of {last} was trained"
            yield f"{run.path.name}: the best round is {where}; the rounds after it were no better by that measure."
