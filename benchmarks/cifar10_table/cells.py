"""The cells of the CIFAR-10 tables: which runs there are, with which settings, and where the paper has them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fedprophet.config.config import Config
from fedprophet.config.load import load_config
from fedprophet.errors import ConfigError, unknown
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
    "uncalibrated clean / PGD-20",
    "global clean / PGD-20",
    "rounds",
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


def _ablation(name: str, title: str, *changes: str) -> Row:
    where = ("table3", "CIFAR-10 balanced", title)
    return Row(
        f"balanced-fedprophet-{name}", title, "cifar10-balanced", "fedprophet", (*SPARING, *changes), paper=where
    )


GLOBAL = "cifar10-balanced-global"
IN_ONE_PLACE = ("shards.kind=iid", "population.clients=10")
AT_ONCE = ("attack.ramp=0", "train.warmup=20%")
FROZEN = "norm.layers=frozen"
SHORT = ("rounds=100", "train.decay=0.97", "evaluate.every=20", "checkpoint.every=50")


def _one_model() -> Iterator[Row]:
    """Yield runs of the presets for one model; FedProphet's stages have at most 200 and 150 rounds."""
    stages = (SAVED_OFTEN, "rounds=200", "perturbation.every=20")
    yield Row("global-jfat", "jFAT, the attack grows", GLOBAL, "jfat", EVERY_20, SEEDS["jfat"])
    mirrored = (*EVERY_20, "data.mirror=true")
    yield Row("mirror-global-jfat", "jFAT, the attack grows, mirror images", GLOBAL, "jfat", mirrored)
    higher = (*EVERY_20, "train.learning_rate=0.02", "train.decay=0.96")
    yield Row("higher-global-jfat", "jFAT, the attack grows, rate 0.02", GLOBAL, "jfat", higher)
    in_one_place = (*higher, *IN_ONE_PLACE)
    yield Row("iid-higher-global-jfat", "jFAT, the attack grows, rate 0.02, i.i.d. on 10", GLOBAL, "jfat", in_one_place)
    yield Row("short-global-jfat", "jFAT, at once", GLOBAL, "jfat", (*stages, *AT_ONCE, "train.decay=0.994"))
    yield Row("once-global-jfat", "jFAT, at once, quicker decay", GLOBAL, "jfat", (*SHORT, *AT_ONCE))
    yield Row("frozen-global-jfat", "jFAT, at once, frozen", GLOBAL, "jfat", (*SHORT, *AT_ONCE, FROZEN))
    yield Row("iid-global-jfat", "jFAT, at once, i.i.d. on 10", GLOBAL, "jfat", (*SHORT, *AT_ONCE, *IN_ONE_PLACE))
    yield Row("short-global-fedprophet", "FedProphet, the paper's rules", GLOBAL, "fedprophet", stages)
    rules = (SAVED_OFTEN, FROZEN)
    yield Row("frozen-best-fedprophet", "FedProphet, rules of our own, frozen", BEST.preset, "fedprophet", rules)


BEST = Row(
    "best-fedprophet",
    "FedProphet, rules of our own",
    "cifar10-balanced-best",
    "fedprophet",
    (SAVED_WHEN_EVALUATED,),
    SEEDS["fedprophet"],
    ("table2", "CIFAR-10 balanced", "FedProphet"),
)
GROUPS: tuple[Group, ...] = (
    Group("Every device equally likely", (*_all_methods("balanced"), BEST)),
    Group("Mostly weak devices", tuple(_all_methods("unbalanced"))),
    Group(
        "FedProphet without APA or DMA, every device equally likely",
        (
            _ablation("noapa", "no APA", NO_APA),
            _ablation("nodma", "no DMA", NO_DMA),
            _ablation("noapa-nodma", "neither", NO_APA, NO_DMA),
        ),
    ),
    Group("One model for everyone", tuple(_one_model()), ONE_MODEL),
)
"""The tables of the page, and the runs behind them."""
CELLS: Mapping[str, Cell] = {cell.name: cell for group in GROUPS for cell in group.cells}


def known(name: str) -> Cell:
    """Return a cell by its name."""
    if name not in CELLS:
        raise ConfigError(unknown("cell", name, CELLS))
    return CELLS[name]
