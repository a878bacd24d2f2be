"""A task on its way into a stack: what the client brings, and how what it trained becomes its own again."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from fedprophet.cascade.narrow import slice_state
from fedprophet.client.run import Client, layers_before
from fedprophet.client.statistics import ADVERSARIAL, statistics_names
from fedprophet.client.subnetwork import NarrowLayers
from fedprophet.client.workspace import LocalLayers, Workspace
from fedprophet.fast.narrow import Factors, cut_out, factors_of
from fedprophet.messages.task import ClientTask
from fedprophet.randomness import key as draw_key


@dataclass(frozen=True)
class Job:
    """A task with its client, and the width that the client is run at (`fast.narrow`)."""

    task: ClientTask
    client: Client
    workspace: Workspace
    width: int

    @cached_property
    def layers(self) -> LocalLayers:
        """Where the client's own layers are kept, those of its sub-network where it has one."""
        workspace, kept = self.workspace, self.task.kept
        full = workspace.layers
        return NarrowLayers(full, workspace.channels, kept, workspace.initial) if kept else full

    @cached_property
    def own(self) -> Mapping[str, Tensor]:
        """The client's own layers."""
        task = self.task
        return self.layers.get(task.architecture, task.client, task.timeline, layers_before(task)) or {}

    @cached_property
    def tensors(self) -> Mapping[str, Tensor]:
        """Every tensor that the client's program needs, from wherever it is kept."""
        initial = {name: value for name, value in self.workspace.initial.items() if name not in self.own}
        if self.task.kept:
            initial = slice_state(self.workspace.channels, self.task.kept, initial)
        modules = self.workspace.modules
        frozen = {n: v for module in self.task.frozen for n, v in modules[module.digest].items()}
        found = {**initial, **self.own, **frozen, **self.task.parameters}
        # A client that has no adversarial statistics yet begins with its clean ones.
        names = statistics_names(self.workspace.chain) if self.task.adversarial_statistics else ()
        return {**{ADVERSARIAL + name: found[name] for name in names}, **found}

    @cached_property
    def factors(self) -> Factors:
        """By how much its tensors are multiplied in a stack."""
        return factors_of(self.workspace.channels, self.task.kept) if self.task.kept else {}

    @property
    def seed(self) -> int:
        """The seed of the task's draws: it does not depend on who else is in the group."""
        task = self.task
        return draw_key(task.seed, f"fast {task.kind}", task.round, task.client, task.part[0] if task.part else 0)

    def taken(self, trained: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return what a stack trained in the client's own shapes."""
        return cut_out(trained, self.tensors, self.factors) if self.task.kept else trained

    def local(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return those of the client's tensors that stay with it, both sets of statistics where there are two."""
        names = set(self._local_names)
        return {name: value for name, value in tensors.items() if name.removeprefix(ADVERSARIAL) in names}

    @cached_property
    def _local_names(self) -> tuple[str, ...]:
        return self.workspace.chain.local(self.task.first, self.task.last)

    def counters(self, steps: int) -> dict[str, Tensor]:
        """Return the norm layers' counts of batches, which nothing computes with, as the plain path leaves them."""
        names = [name for name in self._local_names if name.endswith("num_batches_tracked")]
        clean = {name: self.own.get(name, self.workspace.initial[name]) for name in names}
        both = {ADVERSARIAL + name: self.own.get(ADVERSARIAL + name, value) for name, value in clean.items()}
        counts = {**clean, **both} if self.task.adversarial_statistics else clean
        return {name: value + steps for name, value in counts.items()}
