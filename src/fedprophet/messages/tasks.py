"""What the server asks of a client: one frozen class for each kind of task, with the fields that kind has.

A new kind of task is a class here, the class of its answer in `answers`, and its handler in `client.run`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from fedprophet.messages.values import BACKBONE, EVERY_VERSION, FrozenModule, LocalTraining, Timeline
from fedprophet.threat import ThreatModel

TASKS: dict[str, type["Task"]] = {}
"""Every kind of task by its name, which messages and the journal use. Each class enters itself."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One piece of work for one client.

    `number` tells apart the tasks that one client is given together; `timeline` says which versions of the client's own
    layers count.
    """

    kind: ClassVar[str] = ""
    round: int
    client: int
    seed: int
    number: int = 0
    architecture: str = BACKBONE
    timeline: Timeline = EVERY_VERSION

    def __init_subclass__(cls, kind: str = "", **more: Any) -> None:
        super().__init_subclass__(**more)
        if kind:
            cls.kind = kind
            TASKS[kind] = cls

    @property
    def layers_before(self) -> int:
        """The round before which the client's own layers were made that the task starts from.

        What a client trained in this very round counts for everything but training it, which may be a repetition.
        """
        return self.round + 1


@dataclass(frozen=True, kw_only=True)
class Report(Task, kind="report"):
    """Say what the device has available; with `wants_local`, send the client's own layers too."""

    wants_local: bool = False


@dataclass(frozen=True, kw_only=True)
class Adopt(Task, kind="adopt"):
    """Take `parameters` from the server as layers of the client's own."""

    parameters: Mapping[str, Tensor] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, kw_only=True)
class ModelTask(Task):
    """A task that runs a part of the model: atoms `first` … `last` − 1 behind the `frozen` modules.

    The part ends with the auxiliary head of module `head` (None: the backbone's own classifier, or a bare feature).
    `parameters` are the shared ones of those atoms and of the head. `starting` are layers that a client begins with
    where it has none of its own (without them: those of the untrained model). `batch` is the number of samples at a
    time where nothing is trained.
    """

    first: int = 0
    last: int = 0
    head: int | None = None
    frozen: tuple[FrozenModule, ...] = ()
    batch: int = 64
    parameters: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    starting: Mapping[str, Tensor] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, kw_only=True)
class Train(ModelTask, kind="train"):
    """Train the part on the client's samples, under `threat` at the input of atom `first` (None: clean).

    `kept_channels` are the channels of a sub-network, by group (see `cascade.channels`): where there are any, the model
    and `parameters` have these alone. With `adversarial_statistics` the norm layers use a second set of statistics,
    reserved for attacked inputs. `memory` is how many bytes the training may take (0: as many as it does); the client
    finds a way to compute that keeps within them. `wants_local` asks for the client's own layers as well. With
    `calibration` above 0 the logarithm of the client's label frequencies is added to the class scores, in the loss and
    in the attack; each label is counted as if there were that many more samples of it.
    """

    training: LocalTraining
    threat: ThreatModel | None = None
    calibration: float = 0.0
    wants_local: bool = False
    adversarial_statistics: bool = False
    kept_channels: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    memory: int = 0

    @property
    def layers_before(self) -> int:
        """Training starts from the layers of an earlier round."""
        return self.round


@dataclass(frozen=True, kw_only=True)
class Evaluate(ModelTask, kind="evaluate"):
    """Count the client's held-out samples that the model gets right, clean and under `threat` at the image.

    The frozen modules take part: the model is run from the image on. `attack` names the way in which the threat is
    carried out, `samples` limits how many held-out samples are used, and `part` is the range of these that this task is
    about (None: all). Where only `batch` samples at a time fit the memory, an attack's random starts are still those of
    batches of `drawn` samples (0: of `batch`). `kept_channels`, `adversarial_statistics` and `calibration` are those of
    `Train`.
    """

    threat: ThreatModel | None = None
    calibration: float = 0.0
    attack: str = "pgd"
    samples: int | None = None
    part: tuple[int, int] | None = None
    drawn: int = 0
    adversarial_statistics: bool = False
    kept_channels: Mapping[str, Tensor] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, kw_only=True)
class Measure(ModelTask, kind="measure"):
    """Measure how far `threat` at the input of atom `first` moves the feature behind the part (Eq. 11).

    The attack's random starts are those of batches of `drawn` samples, as in `Evaluate`.
    """

    threat: ThreatModel
    drawn: int = 0


@dataclass(frozen=True, kw_only=True)
class Refresh(ModelTask, kind="refresh"):
    """Measure anew, on the training samples, the statistics of what the part's norm layers read.

    As in an evaluation the model is run from the image on, which `threat` attacks (None: clean), with `calibration` as
    in `Train`. `layer` names the one norm layer that is measured behind the others as they are; "" measures all, each
    behind layers that normalise by their batch. `keeps`: the client makes the statistics its own, and sends none.
    """

    threat: ThreatModel | None = None
    calibration: float = 0.0
    layer: str = ""
    keeps: bool = False

    @property
    def layers_before(self) -> int:
        """Measuring starts from the layers of an earlier round: it may be a repetition, like training."""
        return self.round


@dataclass(frozen=True, kw_only=True)
class Predict(ModelTask, kind="predict"):
    """Return the class scores of every public sample."""


@dataclass(frozen=True, kw_only=True)
class Distill(ModelTask, kind="distill"):
    """Train on the public samples, towards `targets` for each of them."""

    training: LocalTraining
    targets: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
