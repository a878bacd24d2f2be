"""What passes between server and client, on any engine: `ClientTask` one way, `ClientUpdate` the other."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from fedprophet.threat import ThreatModel

TaskKind = Literal["report", "train", "evaluate", "measure", "predict", "distill", "adopt"]
SERVER = -1
"""The client id of the server's own data: work on the test set or the public set goes through the engine too."""
BACKBONE = "backbone"
"""The architecture of the run's own model. Methods whose clients train other ones call those by their model's name."""


@dataclass(frozen=True)
class Resources:
    """What a device can spare right now: bytes of memory, FLOP/s, and bytes/s to its storage."""

    memory: int
    performance: float
    bandwidth: float


@dataclass(frozen=True)
class LocalTraining:
    """The hyper-parameters of one client's local training (Eq. 9 and 13)."""

    iterations: int
    batch: int
    learning_rate: float
    momentum: float
    weight_decay: float
    strong_convexity: float
    """The paper's mu. It acts on the feature before an auxiliary head; the backbone's own classifier has none."""


@dataclass(frozen=True)
class Timeline:
    """Which versions of a client's own layers count: a version is the round that made it.

    When a stage ends, its best round is restored: the rounds after it, up to the end of the stage, are `discarded`.
    Versions older than the newest one at or before `floor` can never be asked for again.
    """

    discarded: tuple[tuple[int, int], ...] = ()
    floor: int = 0

    def newest(self, versions: Mapping[int, object], before: int) -> int | None:
        """Return the newest version that counts, made before round `before`; None where there is none."""
        alive = (v for v in versions if v < before and not any(after < v <= last for after, last in self.discarded))
        return max(alive, default=None)


@dataclass(frozen=True)
class FrozenModule:
    """A module that is fixed: its atoms `first` … `last` − 1, and the hash of its shared parameters."""

    first: int
    last: int
    digest: str


@dataclass(frozen=True)
class ClientTask:
    """One piece of work for one client.

    The client runs atoms `first` … `last` − 1 behind the `frozen` modules, and exits through the auxiliary head of
    module `head` (None: the backbone's own classifier). `parameters` are the shared ones of those atoms and of the
    head. `threat` acts on the input of atom `first` in training and measuring, on the image in evaluation; None means
    clean. `wants_local` asks for the client's own layers as well. `number` tells apart the tasks that one client is
    given together.

    In evaluation, `attack` names the way in which the threat is carried out, `samples` limits how many of the held-out
    samples are used, and `part` is the range of these that this task is about (None: all).

    `kept` are the channels of a sub-network (by group, see `cascade.channels`): where there are any, the model and
    `parameters` have these alone. With `adversarial_statistics` the norm layers use a second set of statistics, kept
    for attacked inputs. `targets` are what a distillation learns for each public sample.
    """

    kind: TaskKind
    round: int
    client: int
    seed: int
    number: int = 0
    architecture: str = BACKBONE
    first: int = 0
    last: int = 0
    head: int | None = None
    frozen: tuple[FrozenModule, ...] = ()
    threat: ThreatModel | None = None
    training: LocalTraining | None = None
    batch: int = 64
    timeline: Timeline = Timeline()
    wants_local: bool = False
    attack: str = "pgd"
    samples: int | None = None
    part: tuple[int, int] | None = None
    adversarial_statistics: bool = False
    kept: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    targets: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    parameters: Mapping[str, Tensor] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class ClientUpdate:
    """What came back: trained parameters, the client's weight q_k, what it measured, and what it can spare."""

    kind: TaskKind
    round: int
    client: int
    weight: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    resources: Resources | None = None
    local: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    parameters: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    number: int = 0
