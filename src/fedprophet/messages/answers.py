"""What a client sends back: one frozen class for each kind of task."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from fedprophet.messages.values import Resources

ANSWERS: dict[str, type["Answer"]] = {}
"""The answer to every kind of task, by the kind's name. Each class enters itself."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What came back for one task. `weight` is q_k before normalisation: the size of the client's shard."""

    kind: ClassVar[str] = ""
    round: int
    client: int
    number: int = 0
    weight: float

    def __init_subclass__(cls, kind: str = "", **more: Any) -> None:
        super().__init_subclass__(**more)
        if kind:
            cls.kind = kind
            ANSWERS[kind] = cls


@dataclass(frozen=True, kw_only=True)
class Reported(Answer, kind="report"):
    """What the device has available, and the client's own layers where they were asked for."""

    resources: Resources | None = None
    local: Mapping[str, Tensor] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, kw_only=True)
class Adopted(Answer, kind="adopt"):
    """The layers are the client's own now."""


@dataclass(frozen=True, kw_only=True)
class Trained(Answer, kind="train"):
    """The trained parameters, the mean loss of the iterations, and on how many samples.

    A loss that is not finite says that training diverged, also where only the client's own layers did. If the task has
    a limit of memory, `plan` says in words how the client kept within it, and `peak` how many bytes it took.
    """

    loss: float
    samples: int
    parameters: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    local: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    plan: str = ""
    peak: int = 0


@dataclass(frozen=True, kw_only=True)
class Evaluated(Answer, kind="evaluate"):
    """How many held-out samples were used, and how many of them were right: clean, and under attack if there was one.

    `broken` says how many samples each component of an attack newly broke, by the component's name.
    """

    samples: int
    clean: int = 0
    adversarial: int = 0
    broken: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Measured(Answer, kind="measure"):
    """The mean over `samples` of max ‖Δz‖₂. Its weight is the number of the client's own training samples."""

    samples: int
    magnitude: float


@dataclass(frozen=True, kw_only=True)
class Refreshed(Answer, kind="refresh"):
    """Mean and variance of what norm layers read, over `samples`, by name; where the client keeps them, none are sent.

    Its weight is the number of the client's own training samples.
    """

    samples: int
    statistics: Mapping[str, Tensor] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, kw_only=True)
class Predicted(Answer, kind="predict"):
    """The class scores of the public samples."""

    logits: Tensor


@dataclass(frozen=True, kw_only=True)
class Distilled(Answer, kind="distill"):
    """The whole model after distillation, norm layers included, and the mean loss."""

    loss: float
    parameters: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
