"""The configuration of a run: one typed, documented table, from a preset or a TOML file plus `key=value` overrides.

The models below are the only place where a key, its default, its allowed range and its meaning are written down:
error texts, `fedprophet config show` and the reference page are all made from them. Defaults are the paper's values
where it gives one; a preset changes what its experiment needs. Names of methods, models, datasets and device pools are
looked up where their tables are, when the run starts.
"""

import json
import math
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from fractions import Fraction
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from fedprophet.errors import ConfigError, unknown
from fedprophet.settings.describe import Allowed, as_markdown, as_toml, explain, misfit, section_of
from fedprophet.settings.toml import shown, toml_value
from fedprophet.sizes import parse_budget, parse_size

DEFAULT_PRESET = "digits"
MACHINE_KEYS = frozenset({"threads", "engine", "flower.deadline", "flower.cache", "flower.cpus"})
"""Keys about the machines that carry a run out. A run may go on with others, as on another machine."""
PER_METHOD = "methods"
"""The table that holds a table for each method; a resolved configuration has none."""
_RATIO = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*/\s*([0-9]+(?:\.[0-9]+)?)\s*")
_SHARE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*")


def _ratio(value: object) -> object:
    """Turn "8/255" into its number; leave everything else to the check of the type."""
    match = _RATIO.fullmatch(value) if isinstance(value, str) else None
    return float(match[1]) / float(match[2]) if match and float(match[2]) > 0 else value


def _share(text: str) -> Fraction | None:
    match = _SHARE.fullmatch(text)
    return Fraction(match[1]) / 100 if match else None


def _check_rounds(value: int | str) -> int | str:
    share = _share(value) if isinstance(value, str) else Fraction(0)
    if share is None or share >= 1 or (isinstance(value, int) and value < 0):
        raise ValueError("not a number of rounds")
    return value


def _check_samples(value: int | str) -> int | str:
    share = _share(value) if isinstance(value, str) else None
    if not (0 < share < 1 if share is not None else isinstance(value, int) and value >= 1):
        raise ValueError("not a number of samples")
    return value


def _check_budget(value: int | str) -> int | str:
    try:
        parse_budget(value, whole=10**12)
    except ConfigError as error:
        raise ValueError(str(error)) from None
    return value


def _check_size(value: int | str) -> int | str:
    try:
        parse_size(value)
    except ConfigError as error:
        raise ValueError(str(error)) from None
    return value


def _check_options(table: dict[str, Any]) -> dict[str, Any]:
    """Refuse what TOML or JSON cannot hold: the options are written to both."""
    toml_value(table).encode()
    json.dumps(table, allow_nan=False)
    return table


Ratio = Annotated[float, BeforeValidator(_ratio)]
Rounds = Annotated[
    int | str,
    AfterValidator(_check_rounds),
    Allowed("integer or text", 'a whole number of at least 0, or a share of `rounds` below 100 %, such as "20%"'),
]
Samples = Annotated[
    int | str,
    AfterValidator(_check_samples),
    Allowed("integer or text", 'a whole number of at least 1, or a share above 0 and below 100 %, such as "50%"'),
]
Budget = Annotated[
    int | str,
    AfterValidator(_check_budget),
    Allowed("text or integer", 'a size such as "60MB", "64MiB" or a number of bytes, or a share such as "25%"'),
]
Size = Annotated[
    int | str,
    AfterValidator(_check_size),
    Allowed("text or integer", 'a size such as "2GB", "512MiB" or a number of bytes'),
]
Options = Annotated[
    dict[str, Any],
    AfterValidator(_check_options),
    Allowed("table", "a table of numbers, texts, true/false, lists and tables"),
]
Names = Annotated[list[str], Allowed("list", 'a list of names, such as ["vgg11", "vgg16"]')]
Clients = Literal["all"] | Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """The base of all sections: fixed once made, no unknown key, no silent conversion."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class ModelSection(Section):
    """The model that is trained."""

    name: str = Field(default="vgg-small", description="The model's name in the registry.")
    options: Options = Field(default_factory=dict, description="Passed on to the model's builder as they are.")
    weights: str = Field(
        default="",
        description='Starting weights: a safetensors file with torchvision\'s names, or "imagenet"; "": drawn anew.',
    )


class DataSection(Section):
    """The dataset, and what each client holds out of its shard."""

    name: str = Field(default="digits", description="The dataset's name.")
    root: str = Field(
        default="", description='Folder of the dataset\'s files; "": the folder "data" here, where files are needed.'
    )
    size: int = Field(default=0, ge=0, description="Image folders: side of the images in pixels; 0: 224.")
    test_per_class: int = Field(
        default=0,
        ge=0,
        description="Image folders: test images of each class; 0: 25 for caltech256, a fifth otherwise.",
    )
    cache: str = Field(
        default="", description='Image folders: where decoded images are kept; "": ROOT/.fedprophet-cache.'
    )
    validation: float = Field(
        default=0.2, gt=0, lt=1, description="Share of each client's shard that it keeps for validation."
    )


class ShardsSection(Section):
    """How the training set is spread over the clients."""

    kind: Literal["skewed", "iid", "dirichlet"] = Field(
        default="skewed",
        description='"skewed": each client holds mostly a few classes, as in the paper; "iid": evenly spread; '
        '"dirichlet": class shares drawn from a Dirichlet distribution.',
    )
    classes_per_client: int = Field(
        default=2, ge=1, description='"skewed": label-sorted pieces that each client draws.'
    )
    iid_fraction: float = Field(
        default=0.2, ge=0, le=1, description='"skewed": share of the data that is spread evenly.'
    )
    concentration: float = Field(default=0.5, gt=0, description='"dirichlet": the smaller, the more skewed.')


class PopulationSection(Section):
    """The clients, and how many take part in a round."""

    clients: int = Field(default=20, ge=1, description="Clients in the population (N; 100 in the paper).")
    cohort: int = Field(default=5, ge=1, description="Clients drawn for each round (C; 10 in the paper).")


class FleetSection(Section):
    """The devices that the clients are."""

    pool: str = Field(
        default="small", description="Name of a device pool that ships, or the path of a pool's TOML file."
    )
    exponent: float = Field(
        default=0.0,
        description="A device is drawn with a probability that goes with (performance · memory)^exponent: 0 draws all "
        "alike, below 0 favours weak devices.",
    )
    performance: Literal["uniform", "apps"] = Field(
        default="uniform",
        description='Share of its peak performance that a device can spare: "uniform" draws from '
        '[performance_floor, 1], "apps" from six co-running loads.',
    )
    performance_floor: float = Field(default=0.05, gt=0, le=1, description='"uniform": the lowest share that is drawn.')
    memory_share: float = Field(
        default=0.2,
        gt=0,
        le=1,
        description="A device can spare U[0, memory_share] of its peak memory, but never less than the budget.",
    )


class MemorySection(Section):
    """The memory that every client can spare at any time."""

    budget: Budget = Field(
        default="25%",
        description="The paper's R_min, which every module must fit: a size, or a share of what training the whole "
        "model needs.",
    )


class TrainSection(Section):
    """Local training (Eq. 9 and 13)."""

    batch: int = Field(default=64, ge=1, description="Samples in a local batch (B).")
    iterations: int = Field(default=30, ge=1, description="Local SGD iterations of a client in a round (E).")
    learning_rate: float = Field(default=0.005, gt=0, description="Learning rate in the first round of a stage.")
    decay: float = Field(
        default=0.994, gt=0, le=1, description="Factor on the learning rate after each round of a stage."
    )
    momentum: float = Field(
        default=0.9, ge=0, lt=1, description="Momentum of SGD; 0 also saves its copy of the parameters."
    )
    weight_decay: float = Field(default=1e-4, ge=0, description="Weight decay of backbone and heads.")
    warmup: Rounds = Field(
        default="20%", description="Rounds of standard training that start a stage (100 of 500 in the paper)."
    )
    strong_convexity: float = Field(default=1e-5, ge=0, description="Weight of the strong-convexity term (mu).")

    @property
    def copies(self) -> int:
        """How many tensors of a parameter's size training holds: parameter, gradient, and momentum where it is used."""
        return 3 if self.momentum > 0 else 2


class AttackSection(Section):
    """The attack that clients train against: PGD, l_inf on images, l2 on features."""

    radius: Ratio = Field(default=8 / 255, ge=0, le=1, description='eps_0 on images in [0, 1]; may be written "8/255".')
    step: Literal["auto"] | Annotated[Ratio, Field(gt=0)] = Field(
        default="auto", description='Step on images; "auto" is a quarter of the radius; may be written "2/255".'
    )
    steps: int = Field(default=10, ge=0, description="PGD steps on images; 0 trains without an attack.")
    feature_steps: int = Field(default=10, ge=0, description="PGD steps on features.")

    @property
    def step_size(self) -> float:
        """The step on images as a number."""
        return self.radius / 4 if self.step == "auto" else self.step


class PerturbationSection(Section):
    """Adaptive Perturbation Adjustment (Eq. 11 and 12)."""

    enabled: bool = Field(default=True, description="Adjust alpha; false keeps it at its start.")
    start: float = Field(default=0.3, ge=0, description="alpha at the start of every stage.")
    change: float = Field(default=0.1, ge=0, description="How much alpha changes at a time (Delta alpha).")
    threshold: float = Field(
        default=0.05, ge=0, lt=1, description="Relative change of the accuracy ratio that counts (gamma)."
    )
    every: int = Field(default=1, ge=1, description="Rounds from one adjustment to the next (50 in the paper's runs).")
    window: int = Field(
        default=1, ge=1, description="Evaluations that the ratio is averaged over (5 in the paper's runs)."
    )
    floor: float = Field(default=0.0, ge=0, description="Lowest alpha (the start value in the paper's runs).")


class AssignmentSection(Section):
    """Differentiated Module Assignment (Eq. 14 and 15)."""

    enabled: bool = Field(
        default=True, description="Give clients with room to spare later modules too; false: module m alone."
    )


class ConvergenceSection(Section):
    """When a stage ends, and from when on its rounds count."""

    gate: Rounds = Field(
        default="5%", description="Rounds after the warm-up before score, patience and APA start (25 of 500)."
    )
    patience: Rounds = Field(
        default="10%", description="A stage ends when its best score is this many rounds old (50 of 500)."
    )


class EvaluateSection(Section):
    """Validation on the clients during training, and the test at the end."""

    every: int = Field(default=1, ge=1, description="Rounds from one evaluation to the next.")
    steps: int = Field(default=20, ge=1, description="PGD steps of the attack that is evaluated.")
    clients: Clients = Field(default="all", description="Clients that evaluate.")
    test_samples: int = Field(
        default=0, ge=0, description="Samples of the test set that the global accuracy is measured on; 0: all."
    )
    batch: int = Field(
        default=0,
        ge=0,
        description="Samples attacked at a time; 0: up to train.batch, as the largest module's memory allows.",
    )


class MeasureSection(Section):
    """Measuring max ‖Δz‖ at the end of a stage (Eq. 11)."""

    steps: int = Field(default=10, ge=1, description="PGD steps of the attack that maximises ‖Δz‖.")
    clients: Clients = Field(default="all", description="Clients that measure.")


class DistillationSection(Section):
    """Knowledge distillation on a public set (feddf and fedet)."""

    family: Names = Field(
        default_factory=list,
        description="Models that clients may train, smallest first; the last is model.name; []: the family of "
        "model.name.",
    )
    public: Samples = Field(
        default="50%",
        description="Samples of the test set that become the public set; they are left out of the global accuracy.",
    )
    iterations: int = Field(default=128, ge=1, description="SGD iterations of distillation in a round.")
    diversity: float = Field(
        default=0.05, ge=0, description="fedet: weight of the KL term to the models that disagree."
    )


class PropagationSection(Section):
    """Propagation of adversarial norm statistics (fedrbn)."""

    temperature: float = Field(
        default=0.01, gt=0, description="Temperature of the softmax over the clients' similarities."
    )


class AggregateSection(Section):
    """How the server joins what clients have trained; all rules but "mean" resist bad updates."""

    rule: Literal["mean", "clip", "trimmed-mean", "median"] = Field(
        default="mean",
        description='"mean": weighted by shard size, as in the paper; "clip": the same, of updates cut to a largest l2 '
        'norm; "trimmed-mean": each coordinate without its smallest and largest values; "median": of each coordinate. '
        "The last two count all clients alike.",
    )
    clip: float = Field(
        default=0.0,
        ge=0,
        description='"clip": largest l2 norm of an update; 0: the median norm of the round\'s updates.',
    )
    trim: float = Field(
        default=0.2, ge=0, lt=0.5, description='"trimmed-mean": share of the values left out at each end, rounded up.'
    )

    def trimmed(self, senders: int) -> int:
        """How many of n senders' values are left out at each end: ⌈trim · n⌉, but never all of them."""
        return min(math.ceil(Fraction(repr(self.trim)) * senders), max(senders - 1, 0) // 2)


class FlowerSection(Section):
    """Runs on Flower, in simulation and on real devices."""

    deadline: float = Field(
        default=600.0,
        gt=0,
        description="Seconds that a phase of a round may take; who has not answered by then is left out of it.",
    )
    minimum: int = Field(
        default=1,
        ge=1,
        description="Least usable updates of a round, on any engine; with fewer nothing is averaged, and the round "
        "counts.",
    )
    updates: Literal["float32", "bfloat16"] = Field(
        default="float32", description='Numbers in which clients send their updates; "bfloat16" halves them.'
    )
    cache: Size = Field(default="2GB", description="Disk space of a node for modules that are fixed.")
    cpus: int = Field(default=1, ge=1, description="Simulation: CPU cores of one client.")


class CheckpointSection(Section):
    """How often a run is saved."""

    every: int = Field(default=1, ge=1, description="Rounds from one checkpoint to the next.")
    keep: int = Field(
        default=2, ge=1, description="Checkpoints that are kept; with 2, a damaged one has a predecessor."
    )


class Config(Section):
    """Everything that decides a run."""

    method: str = Field(default="fedprophet", description="The training method's name.")
    seed: int = Field(default=0, ge=0, le=2**63 - 1, description="Seed of every random draw of the run.")
    rounds: int = Field(default=500, ge=1, description="Most rounds of a stage; a stage trains one module.")
    threads: int = Field(
        default=0,
        ge=0,
        le=1024,
        description="CPU cores to use: workers of one thread each, or threads of the plain engine; 0 takes torch's own "
        "number, which the run then records.",
    )
    engine: Literal["auto", "plain", "workers", "cuda", "flower-sim"] = Field(
        default="auto",
        description='What carries the clients\' work out: "plain", one client after the other; "workers", clients side '
        'by side in processes; "cuda", groups of clients on a GPU; "flower-sim", Flower\'s simulation; "auto": the GPU '
        "where there is one, else workers where there are several cores.",
    )
    precision: Literal["bfloat16", "float32"] = Field(
        default="bfloat16", description='"cuda": numbers of activations and products; parameters are always float32.'
    )
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    shards: ShardsSection = ShardsSection()
    population: PopulationSection = PopulationSection()
    fleet: FleetSection = FleetSection()
    memory: MemorySection = MemorySection()
    train: TrainSection = TrainSection()
    attack: AttackSection = AttackSection()
    perturbation: PerturbationSection = PerturbationSection()
    assignment: AssignmentSection = AssignmentSection()
    convergence: ConvergenceSection = ConvergenceSection()
    evaluate: EvaluateSection = EvaluateSection()
    measure: MeasureSection = MeasureSection()
    distillation: DistillationSection = DistillationSection()
    propagation: PropagationSection = PropagationSection()
    aggregate: AggregateSection = AggregateSection()
    flower: FlowerSection = FlowerSection()
    checkpoint: CheckpointSection = CheckpointSection()

    @property
    def warmup_rounds(self) -> int:
        """Rounds of standard training that start a stage."""
        return self._rounds(self.train.warmup)

    @property
    def gate_rounds(self) -> int:
        """Rounds after the warm-up before score, patience and APA start."""
        return self._rounds(self.convergence.gate)

    @property
    def patience_rounds(self) -> int:
        """Age of the best score, in rounds, that ends a stage; at least until the next evaluation could beat it."""
        return max(self.evaluate.every, self._rounds(self.convergence.patience))

    def public_samples(self, test: int) -> int:
        """How many of the `test` samples become the public set: at least one, and at least one stays."""
        value = self.distillation.public
        share = _share(value) if isinstance(value, str) else None
        samples = int(value) if share is None else math.floor(share * test)
        if samples >= test:
            text = f"larger than what is held out: the test set has {test} samples, and one at least must stay in it"
            raise ConfigError(f"distillation.public: {samples} samples are {text}. Set it to at most {test - 1}")
        if samples < 1:
            text = f"{value} of {test} test samples is less than one sample. Set it to a number of samples"
            raise ConfigError(f"distillation.public: {text}")
        return samples

    def _rounds(self, value: int | str) -> int:
        share = _share(value) if isinstance(value, str) else None
        return int(value) if share is None else math.floor(share * self.rounds)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        problems = list(_conflicts(self))
        if problems:
            raise ValueError("\n".join(problems))
        return self


def _conflicts(config: Config) -> Iterator[str]:
    """Yield a line for each pair of keys that exclude each other."""
    clients = config.population.clients
    counts = {
        "population.cohort": config.population.cohort,
        "evaluate.clients": config.evaluate.clients,
        "measure.clients": config.measure.clients,
    }
    for key, count in counts.items():
        if isinstance(count, int) and count > clients:
            yield misfit(key, count, f"at most population.clients = {clients}")
    cohort = config.population.cohort
    if config.flower.minimum > cohort:
        yield misfit("flower.minimum", config.flower.minimum, f"at most population.cohort = {cohort}")
    if config.aggregate.rule == "trimmed-mean" and not config.aggregate.trim:
        yield misfit("aggregate.trim", config.aggregate.trim, "above 0 with trimmed-mean, or nobody would be left out")
    left = config.rounds - config.warmup_rounds
    if left <= 0:
        yield misfit("train.warmup", config.train.warmup, f"fewer than rounds = {config.rounds}")
    elif config.gate_rounds >= left:
        text = f"fewer than rounds − train.warmup = {left}, or no round could become a stage's best"
        yield misfit("convergence.gate", config.convergence.gate, text)
    if config.perturbation.floor > config.perturbation.start:
        text = f"at most perturbation.start = {toml_value(config.perturbation.start)}"
        yield misfit("perturbation.floor", config.perturbation.floor, text)


# Reading -------------------------------------------------------------------------------------------------------------


def _preset_texts() -> dict[str, str]:
    files = resources.files("fedprophet.presets").iterdir()
    return {f.name.removesuffix(".toml"): f.read_text("utf-8") for f in files if f.name.endswith(".toml")}


def _first_comment(text: str) -> str:
    return next((line[1:].strip() for line in text.splitlines() if line.startswith("#")), "")


PRESETS: Mapping[str, str] = MappingProxyType({n: _first_comment(t) for n, t in sorted(_preset_texts().items())})
"""Name and one-line description of every preset that ships."""


def load_config(source: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Return the configuration of a preset's name or a TOML file's path, with "key.sub=value" overrides on top."""
    data, place = _read(source)
    changes = [_parse_override(text) for text in overrides]
    chosen = [value for path, value in changes if path == ("method",)]
    data = _for_method(data, place, *chosen[-1:])
    for path, value in changes:
        _assign(data, path, value)
    return _validated(data, place, [".".join(path) for path, _ in changes])


def parse_config(data: Mapping[str, Any], place: str = "") -> Config:
    """Return the configuration in a nested table; `place` says in errors where it came from."""
    return _validated(_for_method(data, place), place)


def _validated(data: Mapping[str, Any], place: str, overridden: Collection[str] = ()) -> Config:
    try:
        return Config.model_validate(dict(data))
    except ValidationError as error:
        raise ConfigError("\n".join(explain(error, Config, data, place, overridden))) from None


def _for_method(data: Mapping[str, Any], place: str, method: object = None) -> dict[str, Any]:
    """Return a table without its `methods`, of which the run's method's is laid over the rest."""
    rest = {key: value for key, value in data.items() if key != PER_METHOD}
    if PER_METHOD not in data:
        return rest
    problems = list(_unfit(data[PER_METHOD], place))
    if problems:
        raise ConfigError("\n".join(problems))
    chosen = rest.get("method", Config().method) if method is None else method
    return _laid_over(rest, data[PER_METHOD].get(chosen, {}) if isinstance(chosen, str) else {})


def _unfit(tables: object, place: str) -> Iterator[str]:
    """Yield a line for everything in the methods' tables that cannot be: a mistake shows whichever method is run."""
    from fedprophet.methods import METHODS  # the methods are configured by this module

    origin = f" ({place})" if place else ""
    if not isinstance(tables, Mapping):
        yield misfit(PER_METHOD, tables, f"a table for each method, such as [{PER_METHOD}.jfat]", origin)
        return
    for name, table in tables.items():
        where = f"{PER_METHOD}.{name}"
        if name not in METHODS:
            yield f"{PER_METHOD}{origin}: {unknown('method', name, METHODS)}"
        elif not isinstance(table, Mapping):
            yield misfit(where, table, "a table", origin)
        elif "method" in table:
            yield misfit(f"{where}.method", table["method"], "every key but this one: the table's name is it", origin)
        else:
            yield from _unfit_keys(table, ", ".join(filter(None, (place, f"[{where}]"))))


def _unfit_keys(table: Mapping[str, Any], place: str) -> Iterator[str]:
    try:
        Config.model_validate(dict(table))
    except ValidationError as error:
        # Keys that exclude each other are for the configuration as a whole: here they would meet mere defaults.
        if any(problem["loc"] for problem in error.errors(include_url=False)):
            yield from explain(error, Config, table, place, ())


def _laid_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return a nested table with the values of both, those above where both have one."""
    result = dict(below)
    for key, value in above.items():
        under = result.get(key)
        result[key] = (
            _laid_over(under if isinstance(under, Mapping) else {}, value) if isinstance(value, Mapping) else value
        )
    return result


def _read(source: str | Path | None) -> tuple[dict[str, Any], str]:
    name = DEFAULT_PRESET if source is None else source
    if isinstance(name, str) and name in PRESETS:
        return tomllib.loads(_preset_texts()[name]), f"in preset {name!r}"
    path = Path(name)
    if isinstance(name, str) and not (path.suffix == ".toml" or len(path.parts) > 1 or path.is_file()):
        raise ConfigError(f"{unknown('preset', name, PRESETS)}. A TOML file's path works too")
    try:
        return tomllib.loads(path.read_bytes().decode("utf-8-sig")), f"in {path}"
    except OSError as error:
        raise ConfigError(f"cannot read the config file {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"the config file {path} is not UTF-8 text: byte {error.start} does not fit") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"the config file {path} is not valid TOML: {error}") from None


def _parse_override(text: str) -> tuple[tuple[str, ...], Any]:
    key, equals, value = text.partition("=")
    path = tuple(part.strip() for part in key.split("."))
    if not equals or not all(path):
        raise ConfigError(f"--set {text!r} is not KEY=VALUE. An example: --set train.batch=32")
    if not _encodable(text):
        raise ConfigError(f"--set {text!r} is not UTF-8 text")
    field = Config.model_fields.get(path[0])
    if len(path) == 1 and field is not None and section_of(field) is not None:
        raise ConfigError(
            f"--set {text!r}: {key.strip()!r} is a table. Set its keys one by one, as {path[0]}.KEY=VALUE"
        )
    return path, _parse_value(value)


def _encodable(text: str) -> bool:
    """Whether the text can be written down: bytes of the command line that are not UTF-8 cannot."""
    return text.encode(errors="ignore").decode() == text


def _parse_value(text: str) -> Any:
    """Return the value as TOML; text that is not TOML (an unquoted name) stands for itself."""
    try:
        table = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return table["value"] if len(table) == 1 else text


def _assign(data: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for part in path[:-1]:
        if not isinstance(data.get(part), dict):
            data[part] = {}
        data = data[part]
    data[path[-1]] = value


# Writing and comparing -----------------------------------------------------------------------------------------------

_REFERENCE_HEAD = """\
# Configuration

<!-- Made by `fedprophet config reference`; change src/fedprophet/runs/config.py instead. -->

A run is configured by a preset's name or a TOML file, and by `--set KEY=VALUE`, which may be repeated:

    fedprophet train digits --set seed=3 --set train.batch=32
    fedprophet config show digits > mine.toml    # every key with its meaning, ready to be edited
    fedprophet train mine.toml

A key that a file leaves out has the default below. A value after `--set` is read as TOML; one that is not TOML is taken
as a text, so that names need no quotes.

A file may hold settings of a single method, such as the rounds of a baseline. They are laid over the rest when the run
is of that method, and `--set` wins over both:

    rounds = 500

    [methods.heterofl]
    rounds = 1000

    [methods.heterofl.train]
    learning_rate = 0.01

`fedprophet config show FILE --method heterofl` prints what comes out. Presets:

"""


def to_toml(config: Config, comments: bool = False) -> str:
    """Return the configuration as TOML that reads back as the same; with `comments`, each key's meaning above it."""
    return as_toml(config, comments)


def reference_markdown() -> str:
    """Return the reference page of every key, made from the models."""
    presets = "\n".join(f"- `{name}`: {text}" for name, text in PRESETS.items())
    return f"{_REFERENCE_HEAD}{presets}\n\n{as_markdown(Config)}"


def differences(
    here: Config | Mapping[str, Any], there: Config | Mapping[str, Any], apart_from: Collection[str] = ()
) -> list[str]:
    """Return "key: here X, there Y" for every key whose values differ, `apart_from` some."""
    ours, theirs = dict(_flat(here)), dict(_flat(there))
    return [
        f"{key}: here {ours.get(key, 'not set')}, there {theirs.get(key, 'not set')}"
        for key in dict.fromkeys((*ours, *theirs))
        if ours.get(key) != theirs.get(key) and key not in apart_from
    ]


def completed(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration that was written down; keys that did not exist then have their defaults."""

    def over(defaults: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
        merged = {**defaults, **table}
        for name, value in defaults.items():
            if isinstance(value, Mapping) and isinstance(table.get(name), Mapping):
                merged[name] = over(value, table[name])
        return merged

    return over(Config().model_dump(), stored)


def _flat(table: Config | Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in (table.model_dump() if isinstance(table, Config) else table).items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", shown(value)
