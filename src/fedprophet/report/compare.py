"""Runs side by side: which runs share a row, which rows share a table, and how much faster than jFAT each row is."""

import statistics
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, product
from pathlib import Path
from string import ascii_lowercase
from typing import TypeVar

from fedprophet.config.compare import flat
from fedprophet.config.config import Config, machine_keys
from fedprophet.display.numbers import counted
from fedprophet.fleet.availability import FleetSettings
from fedprophet.methods import METHODS, reads
from fedprophet.report.enforced import EnforcedMemory, together
from fedprophet.report.folders import read_run
from fedprophet.report.runs import RunSummary
from fedprophet.runs.engine_history import engines_text
from fedprophet.runs.evaluator import Kind
from fedprophet.settings.toml import shown
from fedprophet.settings.values import CUSTOM

REFERENCE = "jfat"
"""Speed-ups are over this method."""
NUMERICS = ("engine", "precision")
"""Keys that at most change how numbers are rounded. Runs that differ in them share a row, and a note names them."""
IRRELEVANT = frozenset({*NUMERICS, "seed", "data.root", "data.options.cache", "checkpoint.every", "checkpoint.keep"})
"""Keys in which the runs of one row may differ: they do not change what is trained."""
SETTING_KEYS = ("data.name", "data.validation")
ARCHITECTURE = "model.architecture"
"""Stands beside the keys of the configuration where the model has no name."""
FLEET, REAL_DEVICES = "fleet.", "real devices"
SETTING_SECTIONS = ("data.options.", "shards.", "population.", FLEET)
COLUMN_ATTACKS: Mapping[str, Callable[[Config], tuple[str, ...]]] = {
    "clean": lambda config: ("clean",),
    "pgd": lambda config: (f"pgd{config.evaluate.steps}",),
    "aa": lambda config: ("autoattack", "aa-fast"),
}
"""The accuracies of the main table, and the attacks that each may have been measured with, the preferred one first."""

NOT_SET = "not set"
LONGEST_NAME = 48
"""A row with a longer label has a letter for its keys in tables, notes and pictures; a legend tells them."""
Keys = Mapping[str, str]
"""The keys of a configuration, dotted, and their values as text."""
T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Statistic:
    """The mean over runs that differ only in their seed, and the sample standard deviation if there are several."""

    mean: float
    deviation: float | None
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Statistic | None":
        """Return the statistic of some values; None if there are none."""
        if not values:
            return None
        return cls(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))

    def scaled(self, factor: float) -> "Statistic":
        """Return the statistic in another unit."""
        deviation = None if self.deviation is None else factor * self.deviation
        return Statistic(factor * self.mean, deviation, self.count)


@dataclass(frozen=True)
class RowAccuracy:
    """An accuracy over the runs of a row: under which attack, on how many samples in each run, in which precisions."""

    value: Statistic
    attack: str
    samples: tuple[int, ...]
    precisions: tuple[str, ...]


@dataclass(frozen=True)
class Speedup:
    """How many times faster than a jFAT row, in simulated training time."""

    factor: float
    over: str


@dataclass(frozen=True)
class Row:
    """Runs that differ only in their seed, and perhaps in their engine.

    `differs` holds the keys that distinguish it from other rows of its method. `unusual` holds those of them whose
    value most of these rows do not share: the label names them. A `letter` stands for them where the label is long.
    """

    runs: tuple[RunSummary, ...]
    differs: Keys = field(default_factory=dict)
    unusual: Keys = field(default_factory=dict)
    speedup: Speedup | None = None
    letter: str = ""

    @property
    def method(self) -> str:
        return self.runs[0].config.method

    @property
    def finished(self) -> bool:
        """Whether its numbers are final; a run that has not finished is a row of its own."""
        return self.runs[0].finished

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(run.config.seed for run in self.runs)

    @property
    def label(self) -> str:
        """The paper's name for the method, and what distinguishes the row."""
        return _marked(METHODS[self.method].paper, (*self.keys, *self._so_far))

    @property
    def name(self) -> str:
        """The label, or a shorter one with a letter in place of the keys: what stands in tables, notes and pictures."""
        return _marked(f"{METHODS[self.method].paper} {self.letter}", self._so_far) if self.letter else self.label

    @property
    def keys(self) -> tuple[str, ...]:
        """What is unusual about it, as in `train.batch=7`."""
        return tuple(f"{key}={value}" for key, value in self.unusual.items())

    @property
    def _so_far(self) -> tuple[str, ...]:
        if self.finished:
            return ()
        return f"seed {self.seeds[0]}", f"{counted(self.runs[0].rounds, 'round')} so far"

    def over(self, value: Callable[[RunSummary], float | None]) -> Statistic | None:
        """Return a statistic over the runs that have the value."""
        return Statistic.of([found for found in map(value, self.runs) if found is not None])

    def accuracy(self, kind: Kind, column: str) -> RowAccuracy | None:
        """Return an accuracy of the main table. If any seed has AutoAttack, no aa-fast is mixed in."""
        for attack in COLUMN_ATTACKS[column](self.runs[0].config):
            cells = [cell for run in self.runs if (cell := run.accuracies.get(kind, {}).get(attack)) is not None]
            value = Statistic.of([cell.accuracy for cell in cells])
            if value is not None:
                precisions = tuple(dict.fromkeys(cell.precision for cell in cells if cell.precision))
                return RowAccuracy(value, attack, tuple(cell.samples for cell in cells), precisions)
        return None

    def memory(self, part: str) -> int | None:
        """Return the `least` or the `peak` memory: the largest over its runs."""
        return max((getattr(run.memory, part) for run in self.runs if run.memory), default=None)

    @property
    def enforced(self) -> EnforcedMemory | None:
        """What training took in the runs that were held to their memory."""
        return together(run.enforced for run in self.runs if run.enforced)

    def time(self, part: str) -> Statistic | None:
        """Return the simulated seconds of a part: total, computation, access or communication."""
        return self.over(lambda run: getattr(run.time, part) if run.time else None)

    def wire(self, part: str) -> Statistic | None:
        """Return the bytes on the wire of a part: sent, received, total or whole_model."""
        return self.over(lambda run: getattr(run.wire, part) if run.wire else None)

    @property
    def faults(self) -> int:
        """How many answers of clients were missing or unusable, over all its runs."""
        return sum(run.faults for run in self.runs)


@dataclass(frozen=True)
class Setting:
    """Rows that may be compared: the same data, sharded in the same way over the same fleet."""

    title: str
    rows: tuple[Row, ...]

    @property
    def runs(self) -> tuple[RunSummary, ...]:
        return tuple(run for row in self.rows for run in row.runs)


@dataclass(frozen=True)
class Comparison:
    """The settings, and notes on runs that were left out."""

    settings: tuple[Setting, ...]
    notes: tuple[str, ...] = ()


def compare(paths: Sequence[Path]) -> Comparison:
    """Return the comparison of the runs in these folders."""
    once, notes = each_once(paths)
    runs, more = _one_for_each_seed([read_run(path) for path in once])
    groups = _grouped(runs, lambda run: tuple(sorted(_setting(run).items())))
    titles = [_title(group[0]) for group in groups]
    settings = []
    for group, title in zip(groups, titles, strict=True):
        namesakes = [_setting(other[0]) for other, name in zip(groups, titles, strict=True) if name == title]
        marks = _distinguished(_setting(group[0]), namesakes)
        full = ", ".join([title, *(f"{key}={value}" for key, value in marks.items())])
        settings.append(Setting(full, tuple(_rows(group))))
    return Comparison(_lettered(settings), (*notes, *more))


# Which runs count ----------------------------------------------------------------------------------------------------


def each_once(paths: Sequence[Path]) -> tuple[list[Path], list[str]]:
    first: dict[Path, Path] = {}
    notes = []
    for path in paths:
        if path.resolve() in first:
            notes.append(f"{path} is given more than once: it counts once")
        first.setdefault(path.resolve(), path)
    return list(first.values()), list(dict.fromkeys(notes))


def _one_for_each_seed(runs: Sequence[RunSummary]) -> tuple[list[RunSummary], list[str]]:
    """Leave out repetitions: a second run with the same settings and seed adds nothing."""
    kept, notes = [], []
    for same in _grouped(runs, lambda run: (run.config.method, run.config.seed, *_recipe(run))):
        best = max(same, key=lambda run: (run.finished, run.rounds, run.wire is not None))
        kept.append(best)
        for other in same:
            if other is not best:
                ours, theirs = numerics(other), numerics(best)
                engines = "" if ours == theirs else f" ({ours} instead of {theirs})"
                notes.append(f"{other.path} repeats the settings and the seed of {best.path}{engines}: it is left out")
    return kept, notes


def numerics(run: RunSummary) -> str:
    """Return which engine a run used: `engine plain`, or `engine cuda, bfloat16` where precision matters."""
    config = run.config
    if run.deployed:
        return f"engine {run.engine}"
    if run.engines:
        return f"engine {engines_text(run.engines)}"
    precision = {"cuda": f", {config.precision}", "auto": f", {config.precision} on a GPU"}.get(config.engine, "")
    return f"engine {run.engine}{precision}"


def _recipe(run: RunSummary) -> tuple[tuple[str, str], ...]:
    """Return everything that determines what is trained, except the seed."""
    return tuple(sorted({**relevant_settings(run), **_setting(run)}.items()))


def _grouped(items: Iterable[T], key: Callable[[T], K]) -> list[list[T]]:
    """Return the items with the same key together, in the order of their first."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


# What distinguishes runs ---------------------------------------------------------------------------------------------


def relevant_settings(run: RunSummary) -> dict[str, str]:
    """Return every key that may change what the run's method trains, except the method and the seed.

    A model that was handed over adds what it is: its name says nothing.
    """
    left_out = machine_keys() | IRRELEVANT | {"method"}
    known = {key: value for key, value in _known(run).items() if reads(run.config.method, key)}
    return {key: value for key, value in known.items() if key not in left_out} | _own_model(run)


def _own_model(run: RunSummary) -> dict[str, str]:
    """Return what tells a model that was handed over from others, none of which have a name."""
    if run.config.model.name != CUSTOM:
        return {}
    parts = [f"{run.model.parameters} parameters", run.model.architecture] if run.model else ["unknown"]
    return {ARCHITECTURE: " ".join(filter(None, parts))}


def changed_settings(run: RunSummary) -> dict[str, str]:
    """Return those of them that do something and are not at their defaults, for people: numbers have four digits."""
    defaults, values = (dict(flat(config)) for config in (Config(), run.config))
    relevant = relevant_settings(run).keys() - run.config.idle_keys().keys()
    return {k: _short(v) for k, v in values.items() if k in relevant and (k not in defaults or v != defaults[k])}


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else shown(value)


def _known(run: RunSummary) -> dict[str, str]:
    """Return a run's keys. The fleet of the configuration does not apply to real devices."""
    keys = ((key, value) for key, value in flat(run.config) if not (run.deployed and key.startswith(FLEET)))
    return {key: shown(value) for key, value in keys}


def _setting(run: RunSummary) -> dict[str, str]:
    """Return what makes runs comparable: the data, its shards, and the fleet."""
    known = _known(run)
    chosen = {key: value for key, value in known.items() if of_setting(key)}
    chosen.pop("data.options.cache", None)
    chosen |= {"devices": REAL_DEVICES} if run.deployed else {}
    # The names "folder" and "custom" do not say which data it is.
    contents = {"folder": {"data.root": known["data.root"]}, CUSTOM: {"dataset": run.dataset or "unknown"}}
    return chosen | contents.get(run.config.data.name, {})


def of_setting(key: str) -> bool:
    """Whether a key says something about the setting, which runs of a table have in common."""
    return key in SETTING_KEYS or key.startswith(SETTING_SECTIONS)


def _distinguished(own: Keys, namesakes: Sequence[Keys]) -> dict[str, str]:
    """Return the keys in which some of the namesakes differ, with their values in `own`."""
    keys = dict.fromkeys(key for other in namesakes for key in other)
    return {key: own.get(key, NOT_SET) for key in keys if len({other.get(key) for other in namesakes}) > 1}


def _title(run: RunSummary) -> str:
    config, population = run.config, run.config.population
    side = config.data.options.get("size")
    size = f" ({side}×{side})" if side else ""
    devices = REAL_DEVICES if run.deployed else _fleet(config.fleet)
    return f"{config.data.name}{size}, {devices}, {population.cohort} of {population.clients} clients a round"


def _fleet(fleet: FleetSettings) -> str:
    sampling = "balanced" if fleet.exponent == 0 else f"exponent {fleet.exponent:g}"
    if fleet.exponent < 0:
        sampling = f"unbalanced ({sampling})"
    return f"fleet {fleet.pool} {sampling}"


# Rows ----------------------------------------------------------------------------------------------------------------


def _rows(runs: Sequence[RunSummary]) -> Iterator[Row]:
    """Yield the rows of a setting in the paper's order, other methods last."""
    ordered = sorted(runs, key=lambda run: METHODS[run.config.method].row)
    # A run that has not finished has no final number to average.
    groups = _grouped(ordered, lambda run: (run.config.method, _recipe(run), None if run.finished else run.path))
    rows = [Row(tuple(sorted(group, key=lambda run: run.config.seed))) for group in groups]
    named = [_named(row, [_keys(other) for other in rows if other.method == row.method]) for row in rows]
    references = [row for row in named if row.method == REFERENCE and row.finished]
    for row in named:
        yield replace(row, speedup=_speedup(row, references))


def _named(row: Row, namesakes: Sequence[Keys]) -> Row:
    """Return the row with what distinguishes it from the rows of its method."""
    differs = _distinguished(_keys(row), namesakes)
    shared = {key: sum(other.get(key, NOT_SET) == differs[key] for other in namesakes) for key in differs}
    unusual = {key: value for key, value in differs.items() if 2 * shared[key] <= len(namesakes)}
    return replace(row, differs=differs, unusual=unusual)


def _marked(name: str, marks: Sequence[str]) -> str:
    return f"{name} ({', '.join(marks)})" if marks else name


def _lettered(settings: Sequence[Setting]) -> tuple[Setting, ...]:
    """Give rows with a long label a letter: the same one to rows of a method with the same keys, in all settings."""
    letters: dict[tuple[str, tuple[str, ...]], str] = {}
    unused: dict[str, Iterator[str]] = {}
    for row in (row for setting in settings for row in setting.rows):
        if row.keys and len(row.label) > LONGEST_NAME and (row.method, row.keys) not in letters:
            letters[row.method, row.keys] = next(unused.setdefault(row.method, _letters()))
    return tuple(
        replace(
            setting,
            rows=tuple(replace(row, letter=letters.get((row.method, row.keys), "")) for row in setting.rows),
        )
        for setting in settings
    )


def _letters() -> Iterator[str]:
    """Yield a, b, …, z, aa, ab, …"""
    yield from ("".join(word) for size in count(1) for word in product(ascii_lowercase, repeat=size))


def _keys(row: Row) -> dict[str, str]:
    return relevant_settings(row.runs[0])


def candidates(row: Row, references: Sequence[Row]) -> list[Row]:
    """Return the jFAT rows with the row's model; the one that differs in the fewest other keys comes first."""
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
    return {
        key: value for key, value in _keys(row).items() if key.startswith(("model.name", "model.options", ARCHITECTURE))
    }
