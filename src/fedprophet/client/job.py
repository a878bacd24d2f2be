"""What a task means on every engine: what it starts from, and what becomes of its result.

An engine supplies the computation in between: one job after the other (`client.run`), or many as one stack
(`engines.stacked`).
"""

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from fedprophet.cascade.narrow import slice_state
from fedprophet.cascade.norms import statistics_names
from fedprophet.client.limits import NO_TERMS, Terms
from fedprophet.client.measure import evaluated_positions
from fedprophet.client.statistics import ADVERSARIAL
from fedprophet.client.subnetwork import NarrowLayers
from fedprophet.client.workspace import LocalLayers, Workspace
from fedprophet.data.augmented import ShiftedExamples
from fedprophet.data.dataset import ClientData
from fedprophet.data.examples import Examples
from fedprophet.finite import all_finite
from fedprophet.messages.answers import Distilled, Evaluated, Measured, Predicted, Refreshed, Trained
from fedprophet.messages.modules import digest
from fedprophet.messages.tasks import Distill, Evaluate, Measure, ModelTask, Predict, Refresh, Task, Train
from fedprophet.messages.values import Resources
from fedprophet.randomness import generator

T_co = TypeVar("T_co", bound=Task, covariant=True)


@dataclass(frozen=True)
class Client:
    """One client: its data, and what its device has available in a given round."""

    data: ClientData
    resources: Callable[[int], Resources]

    @property
    def weight(self) -> float:
        """q_k before normalisation: the size of the client's shard."""
        return float(self.data.size)


@dataclass(frozen=True)
class Job(Generic[T_co]):
    """A task together with the client that carries it out and the workspace of its architecture."""

    task: T_co
    client: Client
    workspace: Workspace

    # What a job starts from.

    @cached_property
    def kept_channels(self) -> Mapping[str, Tensor]:
        """The channels of the client's sub-network; none where it runs the whole model."""
        return self.task.kept_channels if isinstance(self.task, Train | Evaluate) else {}

    @cached_property
    def two_statistics(self) -> bool:
        """Whether norm layers have a second set of statistics, for attacked inputs."""
        return isinstance(self.task, Train | Evaluate) and self.task.adversarial_statistics

    @cached_property
    def layers(self) -> LocalLayers:
        """Where the client's own layers are stored; a sub-network sees its channels of them."""
        full, kept = self.workspace.layers, self.kept_channels
        if not kept:
            return full
        starting = {**self.workspace.initial, **(self.task.starting if isinstance(self.task, ModelTask) else {})}
        return NarrowLayers(full, self.workspace.channels, kept, starting)

    @cached_property
    def own(self) -> Mapping[str, Tensor]:
        """The client's own layers, as far as it has trained any."""
        task = self.task
        return self.layers.get(task.architecture, task.client, task.timeline, task.layers_before) or {}

    @cached_property
    def known(self: "Job[ModelTask]") -> Mapping[str, Tensor]:
        """The client's own layers, and those that the server sent for a client that has none."""
        starting = self.task.starting
        if self.kept_channels:
            starting = slice_state(self.workspace.channels, self.kept_channels, starting)
        return {**starting, **self.own}

    @cached_property
    def local(self: "Job[ModelTask]") -> Mapping[str, Tensor]:
        """The own layers of every atom up to the task's last one; where it has none yet, those that it starts with."""
        names = self.workspace.chain.local(0, self.task.last)
        initial = {name: self.workspace.initial[name] for name in names if name not in self.known}
        if self.kept_channels:
            initial = slice_state(self.workspace.channels, self.kept_channels, initial)
        return {name: initial[name] if name in initial else self.known[name] for name in names}

    @cached_property
    def tensors(self: "Job[ModelTask]") -> Mapping[str, Tensor]:
        """Every tensor that the job's model consists of, both sets of statistics where there are two."""
        modules = self.workspace.modules
        frozen = {name: v for module in self.task.frozen for name, v in modules[module.digest].items()}
        clean = {**self.local, **frozen, **self.task.parameters}
        if not self.two_statistics:
            return clean
        # A client that has no adversarial statistics yet begins with its clean ones.
        names = [name for name in statistics_names(self.workspace.chain) if name in clean]
        return clean | {ADVERSARIAL + name: self.known.get(ADVERSARIAL + name, clean[name]) for name in names}

    @cached_property
    def features_key(self: "Job[ModelTask]") -> Hashable:
        """What cached features depend on: the client, the frozen modules, and its own layers in them."""
        before = self.workspace.chain.local(0, self.task.first)
        version = digest({name: self.known[name] for name in before if name in self.known})
        return self.task.client, tuple(module.digest for module in self.task.frozen), version

    @cached_property
    def offsets(self) -> Tensor | None:
        """How far down and right each training image is moved in this round; None if the task moves none."""
        task, data = self.task, self.client.data
        if not (data.shift and isinstance(task, Train)):
            return None
        draw = generator(task.seed, "shift", task.round, task.client)
        return torch.randint(-data.shift, data.shift + 1, (len(data.train), 2), generator=draw)

    @cached_property
    def examples(self) -> Examples:
        """The client's training samples as the task sees them."""
        train = self.client.data.train
        return train if self.offsets is None else ShiftedExamples(train, self.offsets)

    @cached_property
    def prior(self: "Job[Train | Evaluate | Refresh]") -> Tensor | None:
        """The logarithm of the client's label frequencies in its training samples; None where nothing is calibrated.

        Every label counts as if there were some more samples of it, so that one never seen stays possible.
        """
        if not self.task.calibration:
            return None
        labels = self.client.data.own.labels
        counts = torch.bincount(labels, minlength=self.workspace.classes).double() + self.task.calibration
        return (counts / counts.sum()).log().float()

    @cached_property
    def held_out(self: "Job[Evaluate]") -> Tensor:
        """The positions of the held-out samples that an evaluation is about."""
        return evaluated_positions(self.task, len(self.client.data.validation))

    # What becomes of the result.

    @property
    def header(self) -> dict[str, Any]:
        """The fields that every answer has."""
        task = self.task
        return {"round": task.round, "client": task.client, "number": task.number, "weight": self.client.weight}

    def store(self, layers: Mapping[str, Tensor]) -> None:
        """Make layers the client's own, beside those it has; where there are none, nothing is kept."""
        task = self.task
        if layers:
            self.layers.put(task.architecture, task.client, task.round, {**self.own, **layers}, task.timeline)

    def trained(
        self: "Job[Train]",
        loss: float,
        parameters: Mapping[str, Tensor],
        local: Mapping[str, Tensor],
        finite: bool,
        terms: Terms = NO_TERMS,
    ) -> Trained:
        """Store what the client trained of its own layers, and return what goes to the server.

        `finite` says whether every trained number is finite. A client whose training diverged keeps its own layers as
        they were, and the server drops its update. The server does not see these layers, so the loss has to tell it.
        """
        if not finite:
            loss = math.nan
        if math.isfinite(loss):
            self.store(local)
        return Trained(
            **self.header,
            loss=loss,
            samples=len(self.client.data.train),
            parameters=parameters,
            local=local if self.task.wants_local else {},
            plan=str(terms),
            peak=terms.peak,
        )

    def evaluated(self: "Job[Evaluate]", clean: int, adversarial: int, broken: Mapping[str, int]) -> Evaluated:
        """Return how many samples were right, and how many each component of the attack broke."""
        samples = len(self.held_out)
        return Evaluated(**self.header, samples=samples, clean=clean, adversarial=adversarial, broken=broken)

    def refreshed(self: "Job[Refresh]", statistics: Mapping[str, Tensor]) -> Refreshed:
        """Return statistics that were measured anew, weighted by the client's own samples.

        `keeps` stores them, if they are finite; the answer then says over how many samples those are that are kept.
        """
        samples = len(self.client.data.train)
        if not self.task.keeps:
            return Refreshed(**self._header_of_training, samples=samples, statistics=statistics)
        finite = all_finite(statistics.values())
        if finite and samples:
            self.store(statistics)
        return Refreshed(**self._header_of_training, samples=samples if finite else 0)

    def measured(self: "Job[Measure]", magnitude: float) -> Measured:
        """Return how far the attack moved the feature, weighted by the client's own training samples."""
        return Measured(**self._header_of_training, samples=len(self.client.data.train), magnitude=magnitude)

    def predicted(self: "Job[Predict]", logits: Tensor) -> Predicted:
        """Return class scores in the host's memory: they are joined with those of models that ran elsewhere."""
        return Predicted(**self.header, logits=logits.cpu())

    def distilled(self: "Job[Distill]", loss: float, tensors: Mapping[str, Tensor]) -> Distilled:
        """Return the whole model after distillation, norm layers included, out of tensors by their names."""
        chain = self.workspace.chain
        return Distilled(
            **self.header, loss=loss, parameters={name: tensors[name] for name in (*chain.shared(), *chain.local())}
        )

    @property
    def _header_of_training(self) -> dict[str, Any]:
        """The same fields, of an answer about the client's training samples: the weight leaves held-out ones out.

        Mirror images do not count either: a client's weight is never above the size of its shard.
        """
        return {**self.header, "weight": float(len(self.client.data.own))}
