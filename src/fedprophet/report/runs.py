"""A run as comparison and report see it: its accuracies, its memory, its simulated time, and what it consists of."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from fedprophet.config.config import Config
from fedprophet.report.enforced import EnforcedMemory
from fedprophet.runs.engine_history import EngineSpan
from fedprophet.runs.evaluator import Kind
from fedprophet.server.coordinator import Record

DEPLOYED = "Flower, real devices"
"""The engine of a run whose clients were real devices."""

Share = Annotated[float, Field(ge=0, le=1)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


@dataclass(frozen=True)
class MeasuredAccuracy:
    """An accuracy, the number of samples, and, if they are known, its 95 % interval and the precision it is of."""

    accuracy: Share
    samples: Count
    interval: tuple[Finite, Finite] | None = None
    precision: str | None = None


@dataclass(frozen=True)
class Reached:
    """The personalised accuracies of a training round."""

    round: Count
    clean: Share
    adversarial: Share


@dataclass(frozen=True)
class SimulatedTime:
    """Simulated seconds of a whole run; communication is not part of the total, as in the paper."""

    computation: float
    access: float
    communication: float

    @property
    def total(self) -> float:
        return self.computation + self.access


@dataclass(frozen=True)
class Memory:
    """Bytes of training in the cost model: `least` fits the smallest task of every round, `peak` the largest task."""

    least: int
    peak: int


@dataclass(frozen=True)
class Wire:
    """Bytes that the server counted on the network, and those that training the whole model takes: jFAT's."""

    sent: Count
    received: Count
    whole_model: Count

    @property
    def total(self) -> int:
        return self.sent + self.received


@dataclass(frozen=True)
class RoundWire:
    """The bytes of one round, None if they were not counted, and how many clients failed in it."""

    round: int
    wire: Wire | None
    faults: int


@dataclass(frozen=True)
class ModelSetup:
    """The model that was trained."""

    name: str
    parameters: Count
    architecture: str | None = None
    """A hash of its layers and tensors (`runs.setup.architecture`); runs of earlier versions have none."""


@dataclass(frozen=True)
class RunSummary:
    """A run as a comparison sees it; what its folder does not hold is None or empty.

    The clients of a `deployed` run were real devices: it has no simulated time.
    """

    path: Path
    config: Config
    rounds: int
    finished: bool
    version: str | None = None
    accuracies: Mapping[Kind, Mapping[str, MeasuredAccuracy]] = field(default_factory=dict)
    best: Reached | None = None
    last: Reached | None = None
    time: SimulatedTime | None = None
    memory: Memory | None = None
    enforced: EnforcedMemory | None = None
    wire: Wire | None = None
    wire_rounds: tuple[RoundWire, ...] = ()
    faults: int = 0
    deployed: bool = False
    norm_layers: Mapping[str, str] = field(default_factory=dict)
    public_samples: int = 0
    dataset: str | None = None
    model: ModelSetup | None = None
    engines: tuple[EngineSpan, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def engine(self) -> str:
        """The engines that the run recorded, else the one in its configuration; a deployment has its own name."""
        if self.deployed:
            return DEPLOYED
        return ", ".join(dict.fromkeys(span.use.engine for span in self.engines)) or self.config.engine


@dataclass(frozen=True)
class Module:
    """A module of the cascade: its layers, and what its training takes."""

    index: Count
    layers: list[str]
    memory_bytes: Count


@dataclass(frozen=True)
class DataSetup:
    """The data that a model was trained on."""

    name: str
    shape: list[Count]
    classes: Count
    train: Count
    test: Count


@dataclass(frozen=True)
class Setup:
    """What a run consists of and the machines it was played on, as far as its folder says; see `runs.setup`."""

    modules: list[Module] = field(default_factory=list)
    budget_bytes: Count = 0
    whole_model_bytes: Count = 0
    model: ModelSetup | None = None
    data: DataSetup | None = None
    machines: list[dict[str, Any]] = field(default_factory=list)
    refreshes: bool = True
    """Whether the model has statistics that can be measured anew; results.json does not say."""
    starting_weights: str | None = None


@dataclass(frozen=True)
class ReadFolder:
    """A run's folder as it was read: the run, the records of its journal if that is sound, and what it consists of."""

    summary: RunSummary
    records: Sequence[Record]
    setup: Setup
    seconds: float | None
    """What its rounds took on the clock; None if a round's time is not known."""
