"""A job on its way through a stack: the shape it is run in, its draws, and its tensors cut out of the stack again."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from fedprophet.cascade.heads import of_head
from fedprophet.cascade.norms import COUNTER
from fedprophet.client.job import Job
from fedprophet.client.statistics import ADVERSARIAL
from fedprophet.fast.aims import UNLABELLED, Teacher
from fedprophet.fast.layout import STATISTICS_ENDINGS
from fedprophet.fast.narrow import WHOLE, Factors, cut_out, factors_of
from fedprophet.messages.tasks import Distill, Evaluate, Measure, ModelTask, Predict, Train
from fedprophet.messages.values import LocalTraining
from fedprophet.randomness import key
from fedprophet.threat import ThreatModel

M_co = TypeVar("M_co", bound=ModelTask, covariant=True)


class AtomSpan(NamedTuple):
    """Atoms `first` … `last` − 1 of an architecture, the head behind them, and the width they are run at."""

    architecture: str
    first: int
    last: int
    head: int | None = None
    width: int = WHOLE


@dataclass(frozen=True)
class StackJob(Job[M_co]):
    """A job and the width that its model is run at (`fast.narrow`)."""

    width: int = WHOLE

    @property
    def span(self) -> AtomSpan:
        """What the job runs. An evaluation runs the frozen modules too."""
        task = self.task
        first = 0 if isinstance(task, Evaluate) else task.first
        return AtomSpan(task.architecture, first, task.last, task.head, self.width)

    @property
    def prefix(self) -> AtomSpan:
        """What lies in front of the task's own part."""
        return AtomSpan(self.task.architecture, 0, self.task.first)

    @cached_property
    def samples(self) -> int:
        """How many samples the job is about."""
        evaluates = isinstance(self.task, Evaluate)
        return len(self.held_out) if evaluates else len(self.client.data.train)  # type: ignore[misc]

    @property
    def at_once(self) -> int:
        """Of how many samples activations are in memory at once."""
        if self.training is not None:
            return min(self.samples, self.training.batch)
        return min(self.samples, self.task.batch) if isinstance(self.task, Predict) else self.samples

    @property
    def training(self) -> LocalTraining | None:
        """The hyper-parameters of a job that trains."""
        return self.task.training if isinstance(self.task, Train | Distill) else None

    @property
    def threat(self) -> ThreatModel | None:
        """The attack that the job runs."""
        return self.task.threat if isinstance(self.task, Train | Evaluate | Measure) else None

    @property
    def seed(self) -> int:
        """The seed of the job's draws: it does not depend on the other jobs of the group."""
        task = self.task
        start = task.part[0] if isinstance(task, Evaluate) and task.part else 0
        # The server distils several models side by side.
        which = task.number if isinstance(task, Distill) else start
        return key(task.seed, f"fast {task.kind}", task.round, task.client, which)

    @property
    def is_calibrated(self) -> bool:
        """Whether the client's label frequencies are added to class scores."""
        return isinstance(self.task, Train | Evaluate) and self.task.calibration > 0

    @property
    def anchored(self: "StackJob[Train | Distill]") -> tuple[str, ...]:
        """The parameters that a proximal term draws back to where they started."""
        if not self.task.training.proximal:
            return ()
        shared = self.workspace.chain.shared(self.task.first, self.task.last)
        heads = (name for name in self.task.parameters if of_head(name))
        return tuple(name for name in (*shared, *heads) if not name.endswith(STATISTICS_ENDINGS))

    @property
    def labels(self: "StackJob[Distill]") -> Tensor:
        """The labels that the public samples are given, where they are."""
        given = self.task.targets.get("labels")
        return torch.full((self.samples,), UNLABELLED) if given is None else given

    @property
    def teacher(self: "StackJob[Distill]") -> Teacher:
        """What is said of the public samples."""
        return Teacher(self.task.targets["probabilities"], self.task.targets["weights"])

    @cached_property
    def factors(self) -> Factors:
        """By how much its tensors are multiplied in a stack."""
        return factors_of(self.workspace.channels, self.kept_channels) if self.kept_channels else {}

    def cut_out(self, trained: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return what a stack trained in the client's own shapes."""
        return cut_out(trained, self.tensors, self.factors) if self.kept_channels else trained

    def local_of(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return those tensors that stay with the client, both sets of statistics where there are two."""
        names = set(self._local_names)
        return {name: value for name, value in tensors.items() if name.removeprefix(ADVERSARIAL) in names}

    def counters(self: "StackJob[Train | Distill]") -> dict[str, Tensor]:
        """Return the norm layers' counts of batches after training. Stacks do not count, since nothing reads them."""
        chain, training = self.workspace.chain, self.task.training
        names = (*self._local_names, *chain.shared(self.task.first, self.task.last))
        clean = {name: self.tensors[name] for name in names if name.endswith(COUNTER)}
        both = {ADVERSARIAL + name: self.known.get(ADVERSARIAL + name, value) for name, value in clean.items()}
        counts = {**clean, **both} if self.two_statistics else clean
        steps = 0 if training.fixed_statistics else training.iterations
        return {name: value + steps for name, value in counts.items()}

    @cached_property
    def _local_names(self) -> tuple[str, ...]:
        return self.workspace.chain.local(self.task.first, self.task.last)
