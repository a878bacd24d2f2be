"""The cells of the CIFAR-10 tables: which runs there are, with which settings, and where the paper has them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fedprophet.config.config import Config
from fedprophet.config.load import load_config
from fedprophet.errors import ConfigError, did_you_mean, nearest
from fedprophet.methods import METHODS


@dataclass(frozen=True)
class Cell:
    """A run: one seed of a row. Its name is that of its folder."""

    name: str
    row: "Row"
    seed: int

    def config(self, extra: Sequence[str] = ()) -> Config:
        """Return its configuration, with some more settings."""
        settings = [f"method={self.row.method}", f"seed={self.seed}", *self.row.settings]
        return load_config(self.row.preset, [*settings, *extra])


@dataclass(frozen=True)
class Row:
    """A row of a table: what is run with which seeds, and where the paper has its numbers (experiment, part, row)."""

    name: str
    title: str
    preset: str
    method: str
    settings: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0,)
    paper: tuple[str, str, str] | None = None

    @property
    def cells(self) -> tuple[Cell, ...]:
        return tuple(Cell(f"{self.name}-seed{seed}", self, seed) for seed in self.seeds)


BESIDE_THE_PAPER = (
    "personalised clean / PGD-20",
    "the paper",
    "personalised AutoAttack",
    "the paper's",
    "global clean / PGD-20",
    "best round",
    "last round, personalised",
    "simulated time",
    "wall clock",
)
ONE_MODEL = (
    "personalised clean / PGD-20",
    "personalised AutoAttack",
    "uncalibrated clean / PGD-20",
    "global clean / PGD-20",
    "best round",
    "wall clock",
)


@dataclass(frozen=True)
class Group:
    """Rows that make a table and a part of the figure, and the table's columns, by their names in `columns`."""

    title: str
    rows: tuple[Row, ...]
    columns: tuple[str, ...] = BESIDE_THE_PAPER

    @property
    def cells(self) -> tuple[Cell, ...]:
        return tuple(cell for row in self.rows for cell in row.cells)


ORDER = ("jfat", "fedprophet", "feddf", "fedet", "heterofl", "feddrop", "fedrolex", "fedrbn")
SEEDS = {"jfat": (0, 1, 2), "fedprophet": (0, 1, 2)}
SAVED_OFTEN = "checkpoint.every=25"
SPARING = (SAVED_OFTEN, "evaluate.before_gate=25")
"""Of a cascade, evaluations that nothing depends on are spared: the model is the same, bit for bit."""
NO_APA, NO_DMA = "perturbation.enabled=false", "assignment.enabled=false"
WITHOUT = {NO_APA: "noapa", NO_DMA: "nodma"}
SAVED_WHEN_EVALUATED = "checkpoint.every=5"
EVERY_20 = ("evaluate.every=20", "checkpoint.every=20")
"""Where every evaluated round is saved, the best one always is: a run is packed at that one, with one model."""


def _all_methods(fleet: str) -> Iterator[Row]:
    for method in ORDER:
        entry = METHODS[method]
        yield Row(
            f"{fleet}-{method}",
            entry.paper.removesuffix("-AT"),
            f"cifar10-{fleet}",
            method,
            SPARING if entry.cascade else (SAVED_OFTEN,),
            SEEDS.get(method, (0,)),
            ("table2", f"CIFAR-10 {fleet}", entry.paper),
        )


def _ablation(base: Row) -> Iterator[Row]:
    """Yield FedProphet without parts of it, in the paper's words, with all else as in a row."""
    rules = base.title.removeprefix("FedProphet")
    for title, changes in {"no APA": (NO_APA,), "no DMA": (NO_DMA,), "neither": (NO_APA, NO_DMA)}.items():
        name = "-".join([base.name, *(WITHOUT[change] for change in changes)])
        where = ("table3", "CIFAR-10 balanced", title)
        yield replace(
            base, name=name, title=title + rules, settings=(*base.settings, *changes), seeds=(0,), paper=where
        )


def _shortened() -> Iterator[Row]:
    """Yield all methods with the paper's norm layers and labels, in an eighth of its rounds and less.

    Evaluations every 20 rounds cost a tenth of what they do in every round, and choose nearly the same best one.
    """
    for row in BALANCED:
        short = replace(row, name=f"short-{row.name}", seeds=(0,))
        if METHODS[row.method].cascade:
            rules = (SAVED_WHEN_EVALUATED, *LIKE_THE_PAPER)
            yield replace(short, title=BEST.title, preset=BEST.preset, settings=rules)
        else:
            yield replace(short, settings=(*EVERY_20, *AS_JFAT))


GLOBAL = "cifar10-balanced-global"
ON_TEN = ("shards.kind=iid", "population.clients=10")
CENTRAL = (
    "shards.kind=iid",
    "population.clients=1",
    "population.cohort=1",
    "rounds=52",
    "train.batch=256",
    "train.iterations=156",
    "train.learning_rate=0.05",
    "train.decay=0.944",
    "train.weight_decay=5e-4",
    "evaluate.every=4",
    "checkpoint.every=4",
)
"""All data on one device: 52 epochs, together of about as many samples as 110 rounds of the others, with the learning
rate and weight decay that are usual where data are in one place."""
AS_JFAT = ("rounds=110", "train.decay=0.973", "train.warmup=10%", "attack.ramp=30%")
"""What the preset has for jFAT alone."""
AT_ONCE = ("attack.ramp=0", "train.warmup=20%")
MOVED = ("data.mirror=true", "data.shift=4")
FROZEN = "norm.layers=frozen"
MEAN = "aggregate.horizon=30%"
FIRST_RULES = (
    "rounds=150",
    "train.decay=0.98",
    "train.warmup=20%",
    "attack.ramp=0",
    "perturbation.restart=last",
    "perturbation.threshold=0.02",
)
"""What the preset with rules of our own had when it was first played."""
SHORT = ("rounds=100", "train.decay=0.97", "evaluate.every=20", "checkpoint.every=50")
STAGES = (SAVED_OFTEN, "rounds=200", "perturbation.every=20")
"""At most 200 rounds for a stage of FedProphet."""


def _one_model() -> Iterator[Row]:
    """Yield all methods with the settings for one model; FedProphet's stages have at most 200 and 150 rounds."""
    yield Row("global-jfat", "jFAT, the attack grows", GLOBAL, "jfat", EVERY_20, SEEDS["jfat"])
    for method in ORDER[2:]:
        title = METHODS[method].paper.removesuffix("-AT")
        yield Row(f"global-{method}", f"{title}, the attack grows", GLOBAL, method, (*EVERY_20, *AS_JFAT))
    yield Row("short-global-fedprophet", "FedProphet, the paper's rules", GLOBAL, "fedprophet", STAGES)
    rules = (SAVED_OFTEN, FROZEN, *FIRST_RULES)
    yield Row("frozen-best-fedprophet", "FedProphet, rules of our own, frozen", BEST.preset, "fedprophet", rules)


def _tried() -> Iterator[Row]:
    """Yield what was tried with jFAT for one model: with an attack that grows, and with the whole attack at once."""
    mirrored = (*EVERY_20, "data.mirror=true")
    yield Row("mirror-global-jfat", "the attack grows, mirror images", GLOBAL, "jfat", mirrored)
    higher = (*EVERY_20, "train.learning_rate=0.02", "train.decay=0.96")
    yield Row("higher-global-jfat", "the attack grows, rate 0.02", GLOBAL, "jfat", higher)
    mean = (*EVERY_20, MEAN)
    yield Row("mean-global-jfat", "the attack grows, mean of rounds", GLOBAL, "jfat", mean)
    drawn = (*mean, "train.consistency=1.0")
    yield Row("drawn-global-jfat", "the attack grows, mean of rounds, consistency 1", GLOBAL, "jfat", drawn)
    longer = (*mean, "train.iterations=60")
    yield Row("longer-global-jfat", "the attack grows, mean of rounds, 60 iterations", GLOBAL, "jfat", longer)
    moved = (*mean, *MOVED)
    yield Row("moved-global-jfat", "the attack grows, mean of rounds, moved", GLOBAL, "jfat", moved)
    more = (*moved, "train.iterations=60")
    yield Row(
        "moved-longer-global-jfat", "the attack grows, mean of rounds, moved, 60 iterations", GLOBAL, "jfat", more
    )
    on_ten = (*higher, *ON_TEN)
    yield Row("iid-higher-global-jfat", "the attack grows, rate 0.02, i.i.d. on 10", GLOBAL, "jfat", on_ten)
    together = (*on_ten, *MOVED)
    title = "the attack grows, rate 0.02, moved, i.i.d. on 10"
    yield Row("iid-moved-higher-global-jfat", title, GLOBAL, "jfat", together)
    central = "the attack grows, all data on one device"
    yield Row("central-global-jfat", central, GLOBAL, "jfat", CENTRAL)
    yield Row("central-moved-global-jfat", f"{central}, moved", GLOBAL, "jfat", (*CENTRAL, *MOVED))
    yield Row("short-global-jfat", "at once", GLOBAL, "jfat", (*STAGES, *AT_ONCE, "train.decay=0.994"))
    yield Row("once-global-jfat", "at once, quicker decay", GLOBAL, "jfat", (*SHORT, *AT_ONCE))
    yield Row("frozen-global-jfat", "at once, frozen", GLOBAL, "jfat", (*SHORT, *AT_ONCE, FROZEN))
    yield Row("iid-global-jfat", "at once, i.i.d. on 10", GLOBAL, "jfat", (*SHORT, *AT_ONCE, *ON_TEN))


BEST = Row(
    "best-fedprophet",
    "FedProphet, rules of our own",
    "cifar10-balanced-best",
    "fedprophet",
    (SAVED_WHEN_EVALUATED,),
    SEEDS["fedprophet"],
    ("table2", "CIFAR-10 balanced", "FedProphet"),
)
BALANCED = tuple(_all_methods("balanced"))
LIKE_THE_PAPER = ("norm.layers=local", "train.calibration=none")
GROUPS: tuple[Group, ...] = (
    Group("Every device equally likely", (*BALANCED, BEST)),
    Group("Every device equally likely, in fewer rounds", tuple(_shortened())),
    Group("Mostly weak devices", tuple(_all_methods("unbalanced"))),
    Group(
        "FedProphet without APA or DMA, every device equally likely",
        (*_ablation(BALANCED[ORDER.index("fedprophet")]), *_ablation(BEST)),
    ),
    Group("One model for everyone", tuple(_one_model()), ONE_MODEL),
    Group("One model for everyone: what was tried with jFAT", tuple(_tried()), ONE_MODEL),
)
"""The tables of the page, and the runs behind them."""
CELLS: Mapping[str, Cell] = {cell.name: cell for group in GROUPS for cell in group.cells}


def known(name: str) -> Cell:
    """Return a cell by its name."""
    if name not in CELLS:
        guess = did_you_mean(nearest(name, list(CELLS)))
        raise ConfigError(f"unknown cell {name!r}.{guess} `python benchmarks/cifar10.py cells` lists all of them")
    return CELLS[name]
