"""Runs side by side: which belong into one row, which rows into one table, and how much faster than jFAT each is."""

import statistics
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from fedprophet.config.config import MACHINE_KEYS, Config, FleetSection
from fedprophet.report.runs import Kind, Measured, RunSummary, read_run
from fedprophet.runs.engine_history import told
from fedprophet.runs.session import CUSTOM
from fedprophet.settings.toml import shown

PAPER_NAMES: Mapping[str, str] = {
    "jfat": "jFAT",
    "feddf": "FedDF-AT",
    "fedet": "FedET-AT",
    "heterofl": "HeteroFL-AT",
    "feddrop": "FedDrop-AT",
    "fedrolex": "FedRolex-AT",
    "fedrbn": "FedRBN",
    "fedprophet": "FedProphet",
}
"""The methods of the paper's main table, under its names and in its order."""
REFERENCE = "jfat"
"""The method that speed-ups are over."""

NUMERICS = ("engine", "precision")
"""Keys that decide how numbers are rounded, if anything. Runs that differ in them share a row; a note names them."""
IRRELEVANT = MACHINE_KEYS.union(NUMERICS, {"seed", "data.root", "data.cache", "checkpoint.every", "checkpoint.keep"})
"""Keys in which the runs of one row may differ: they decide where and how often, not what is trained."""
SETTING_KEYS = ("data.name", "data.size", "data.test_per_class", "data.validation")
FLEET, REAL_DEVICES = "fleet.", "real devices"
SETTING_SECTIONS = ("shards.", "population.", FLEET)
ATTACKS: Mapping[str, Callable[[Config], tuple[str, ...]]] = {
    "clean": lambda config: ("clean",),
    "pgd": lambda config: (f"pgd{config.evaluate.steps}",),
    "aa": lambda config: ("autoattack", "aa-fast"),
}
"""The accuracies of the main table, and the names they may have been measured under, the best first."""

NOT_SET = "not set"
Settings = Mapping[str, str]
"""A configuration's keys, dotted, and their values as text."""
T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Statistic:
    """The mean over runs that differ in their seed alone; the sample standard deviation where there are several."""

    mean: float
    deviation: float | None
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Statistic | None":
        """Return the statistic of the values; None where there are none."""
        if not values:
            return None
        return cls(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))


@dataclass(frozen=True)
class Accuracy:
    """An accuracy over the runs of a row: under which attack, and on how many samples in each run."""

    value: Statistic
    attack: str
    samples: tuple[int, ...]


@dataclass(frozen=True)
class Speedup:
    """How many times faster than a jFAT row, in simulated training time."""

    factor: float
    over: str


@dataclass(frozen=True)
class Row:
    """Runs that differ in their seed alone, and perhaps in the engine that carried them out.

    `differs` are the keys that tell it from other rows of its method. Its label names those of them whose value is not
    that of most of these rows (`unusual`).
    """

    runs: tuple[RunSummary, ...]
    differs: Settings = field(default_factory=dict)
    unusual: Settings = field(default_factory=dict)
    speedup: Speedup | None = None

    @property
    def method(self) -> str:
        """The method's name in the registry."""
        return self.runs[0].config.method

    @property
    def finished(self) -> bool:
        """Whether these are final numbers; a run that is not finished is a row of its own."""
        return self.runs[0].finished

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds of its runs."""
        return tuple(run.config.seed for run in self.runs)

    @property
    def label(self) -> str:
        """What the row is called: the paper's name, and what tells it from its neighbours."""
        marks = [f"{key}={value}" for key, value in self.unusual.items()]
        if not self.finished:
            marks += [f"seed {self.seeds[0]}", f"{self.runs[0].rounds} rounds so far"]
        name = PAPER_NAMES.get(self.method, self.method)
        return f"{name} ({', '.join(marks)})" if marks else name

    def over(self, value: Callable[[RunSummary], float | None]) -> Statistic | None:
        """Return a statistic over the runs that have the value."""
        return Statistic.of([found for found in map(value, self.runs) if found is not None])

    def accuracy(self, kind: Kind, column: str) -> Accuracy | None:
        """Return an accuracy of the main table. Where one seed has AutoAttack, its faster stand-in is not mixed in."""
        for attack in ATTACKS[column](self.runs[0].config):
            cells = [cell for run in self.runs if (cell := _cell(run, kind, attack)) is not None]
            value = Statistic.of([cell.accuracy for cell in cells])
            if value is not None:
                return Accuracy(value, attack, tuple(cell.samples for cell in cells))
        return None

    def memory(self, part: str) -> int | None:
        """Return the `least` or the `peak` memory: the largest over its runs."""
        return max((getattr(run.memory, part) for run in self.runs if run.memory), default=None)

    def time(self, part: str) -> Statistic | None:
        """Return the simulated seconds of a part: total, computation, access or communication."""
        return self.over(lambda run: getattr(run.time, part) if run.time else None)

    def wire(self, part: str) -> Statistic | None:
        """Return the bytes on the wire of a part: sent, received, total or jfat."""
        return self.over(lambda run: getattr(run.wire, part) if run.wire else None)

    @property
    def faults(self) -> int:
        """How often, over all its runs, an answer of a client was missing or could not be used."""
        return sum(run.faults for run in self.runs)


def _cell(run: RunSummary, kind: Kind, attack: str) -> Measured | None:
    return run.accuracies.get(kind, {}).get(attack)


@dataclass(frozen=True)
class Setting:
    """Rows that may be compared: the same data, dealt out alike to the same fleet."""

    title: str
    rows: tuple[Row, ...]

    @property
    def runs(self) -> tuple[RunSummary, ...]:
        """All runs of the setting."""
        return tuple(run for row in self.rows for run in row.runs)


@dataclass(frozen=True)
class Comparison:
    """A table for each setting, and what was not as it should be about the runs given."""

    settings: tuple[Setting, ...]
    notes: tuple[str, ...] = ()


def compare(paths: Sequence[Path]) -> Comparison:
    """Return the comparison of the runs in these folders."""
    once, notes = _each_once(paths)
    runs, more = _one_for_each_seed([read_run(path) for path in once])
    groups = _grouped(runs, lambda run: tuple(sorted(_setting(run).items())))
    titles = [_title(group[0]) for group in groups]
    settings = []
    for number, group in enumerate(groups):
        namesakes = [other for other, title in zip(groups, titles, strict=True) if title == titles[number]]
        marks = _distinguished(_setting(group[0]), [_setting(other[0]) for other in namesakes])
        title = ", ".join([titles[number], *(f"{key}={value}" for key, value in marks.items())])
        settings.append(Setting(title, tuple(_rows(group))))
    return Comparison(tuple(settings), (*notes, *more))


# Which runs count ----------------------------------------------------------------------------------------------------


def _each_once(paths: Sequence[Path]) -> tuple[list[Path], list[str]]:
    first: dict[Path, Path] = {}
    notes = []
    for path in paths:
        if path.resolve() in first:
            notes.append(f"{path} is given more than once: it counts once")
        first.setdefault(path.resolve(), path)
    return list(first.values()), list(dict.fromkeys(notes))


def _one_for_each_seed(runs: Sequence[RunSummary]) -> tuple[list[RunSummary], list[str]]:
    """Leave out repetitions: a run with the settings and the seed of another says nothing of its own."""
    kept, notes = [], []
    for same in _grouped(runs, lambda run: (run.config.method, run.config.seed, *_recipe(run))):
        best = max(same, key=lambda run: (run.finished, run.rounds, run.wire is not None))
        kept.append(best)
        others = (run for run in same if run is not best)
        notes += [
            f"{other.path} has the settings and the seed of {best.path}{_elsewhere(other, best)}: it is left out"
            for other in others
        ]
    return kept, notes


def numerics(run: RunSummary) -> str:
    """Return what carried a run out: `engine plain`, or `engine cuda, bfloat16` where the precision plays a part."""
    config = run.config
    if run.deployed:
        return f"engine {run.engine}"
    if run.engines:
        return f"engine {told(run.engines)}"
    precision = {"cuda": f", {config.precision}", "auto": f", {config.precision} on a GPU"}.get(config.engine, "")
    return f"engine {run.engine}{precision}"


def _elsewhere(run: RunSummary, best: RunSummary) -> str:
    ours, theirs = numerics(run), numerics(best)
    return "" if ours == theirs else f" ({ours}, there {theirs})"


def _recipe(run: RunSummary) -> tuple[tuple[str, str], ...]:
    """Return all that decides what is trained, but for the seed."""
    return tuple(sorted({**relevant_settings(run), **_setting(run)}.items()))


def _grouped(items: Iterable[T], key: Callable[[T], K]) -> list[list[T]]:
    """Return the items that have the same key together, in the order of their first."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


# What tells runs apart -----------------------------------------------------------------------------------------------


def relevant_settings(run: RunSummary) -> dict[str, str]:
    """Return every key that may change what is trained; the method and the seed are named on their own."""
    return {key: value for key, value in _known(run).items() if key not in IRRELEVANT and key != "method"}


def _known(run: RunSummary) -> dict[str, str]:
    """Return a run's keys. Real devices are what they are, whatever fleet the configuration names."""
    flat = dict(_flat(run.config.model_dump()))
    return {key: value for key, value in flat.items() if not (run.deployed and key.startswith(FLEET))}


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", shown(value)


def _setting(run: RunSummary) -> dict[str, str]:
    """Return what makes runs comparable: the data, how it is dealt out, and the fleet."""
    flat = _known(run)
    chosen = {key: value for key, value in flat.items() if key in SETTING_KEYS or key.startswith(SETTING_SECTIONS)}
    chosen |= {"devices": REAL_DEVICES} if run.deployed else {}
    # Of these two the name does not say which data it is.
    contents = {"folder": {"data.root": flat["data.root"]}, CUSTOM: {"dataset": run.dataset or "unknown"}}
    return chosen | contents.get(run.config.data.name, {})


def _distinguished(settings: Settings, namesakes: Sequence[Settings]) -> dict[str, str]:
    """Return the keys, with their values here, in which some of the namesakes differ."""
    keys = dict.fromkeys(key for other in namesakes for key in other)
    return {key: settings.get(key, NOT_SET) for key in keys if len({other.get(key) for other in namesakes}) > 1}


def _title(run: RunSummary) -> str:
    config, population = run.config, run.config.population
    size = f" ({config.data.size}×{config.data.size})" if config.data.size else ""
    devices = REAL_DEVICES if run.deployed else _fleet(config.fleet)
    return f"{config.data.name}{size}, {devices}, {population.cohort} of {population.clients} clients a round"


def _fleet(fleet: FleetSection) -> str:
    sampling = "balanced" if fleet.exponent == 0 else f"exponent {fleet.exponent:g}"
    if fleet.exponent < 0:
        sampling = f"unbalanced ({sampling})"
    return f"fleet {fleet.pool} {sampling}"


# Rows ----------------------------------------------------------------------------------------------------------------


def _rows(runs: Sequence[RunSummary]) -> Iterator[Row]:
    """Yield the rows of a setting in the paper's order, other methods behind."""
    place = {method: number for number, method in enumerate(PAPER_NAMES)}
    ordered = sorted(runs, key=lambda run: place.get(run.config.method, len(place)))
    # What is not finished has no final number to be averaged.
    groups = _grouped(ordered, lambda run: (run.config.method, _recipe(run), None if run.finished else run.path))
    rows = [Row(tuple(sorted(group, key=lambda run: run.config.seed))) for group in groups]
    named = [_named(row, [_keys(other) for other in rows if other.method == row.method]) for row in rows]
    references = [row for row in named if row.method == REFERENCE and row.finished]
    for row in named:
        yield replace(row, speedup=_speedup(row, references))


def _named(row: Row, namesakes: Sequence[Settings]) -> Row:
    """Return the row with what tells it from the rows of its method."""
    differs = _distinguished(_keys(row), namesakes)

    def usual(key: str, value: str) -> bool:
        return 2 * sum(other.get(key, NOT_SET) == value for other in namesakes) > len(namesakes)

    return replace(row, differs=differs, unusual={k: v for k, v in differs.items() if not usual(k, v)})


def _keys(row: Row) -> dict[str, str]:
    return relevant_settings(row.runs[0])


def candidates(row: Row, references: Sequence[Row]) -> list[Row]:
    """Return the jFAT rows with the row's model, the one that differs in the fewest other keys first."""
    alike = [reference for reference in references if _model(reference) == _model(row)]
    return sorted(alike, key=lambda reference: len(_distinguished(_keys(row), [_keys(row), _keys(reference)])))


def _speedup(row: Row, references: Sequence[Row]) -> Speedup | None:
    ours = row.time("total") if row.finished else None
    for reference in candidates(row, references):
        theirs = reference.time("total")
        if ours is not None and theirs is not None and ours.mean > 0:
            return Speedup(theirs.mean / ours.mean, reference.label)
    return None


def _model(row: Row) -> dict[str, str]:
    return {key: value for key, value in _keys(row).items() if key.startswith(("model.name", "model.options"))}
