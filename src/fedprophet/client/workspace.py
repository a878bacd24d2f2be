"""What a client computes with: the chain that tasks are loaded into, its stores and its caches."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from fedprophet.cascade.atoms import Chain
from fedprophet.cascade.channel_flow import channels_of
from fedprophet.cascade.channels import Channels
from fedprophet.cascade.heads import Head, of_head
from fedprophet.client.features import FeatureCache
from fedprophet.client.part import ModelPart
from fedprophet.client.planning import Planner
from fedprophet.messages.modules import ModuleStore
from fedprophet.messages.tasks import ModelTask
from fedprophet.messages.values import Timeline
from fedprophet.storage.mapped import copied_to_file

Plan = Callable[[Chain], Chain]
"""Returns a chain that computes the same as the one given, in another way."""


def as_written(chain: Chain) -> Chain:
    """Compute as the model is written."""
    return chain


class LocalLayers(Protocol):
    """Where a client's own layers are kept between rounds (see `client.layer_store`)."""

    def get(self, architecture: str, client: int, timeline: Timeline, before: int) -> Mapping[str, Tensor] | None: ...

    def put(
        self, architecture: str, client: int, round: int, tensors: Mapping[str, Tensor], timeline: Timeline
    ) -> None: ...


@dataclass
class Workspace:
    """A chain that tasks are loaded into one after the other, and the stores that they read and write.

    `input_shape` is that of one image. `initial` are the local layers of a client that has not trained yet. `loaded`
    remembers which frozen module each atom holds, so that a frozen prefix is not copied again for every task.

    An engine may bring a plan of its own: the same model, computed in another way. Where memory is limited (`frugal`),
    only what is in training is in memory: the model and features lie in files, and images are fetched batch by batch.
    """

    chain: Chain
    input_shape: tuple[int, ...]
    classes: int
    modules: ModuleStore
    layers: LocalLayers
    features: FeatureCache
    frugal: bool = False
    planner: Planner = field(default_factory=Planner)
    initial: Mapping[str, Tensor] = field(init=False)
    loaded: dict[int, str | None] = field(init=False, default_factory=dict)
    plan: Plan = field(init=False, default=as_written)
    _planned: Chain = field(init=False)

    def __post_init__(self) -> None:
        self.initial = self.values(self.chain.local())
        self.run_by(as_written)

    def run_by(self, plan: Plan) -> None:
        """Run tasks by a plan from now on."""
        self.plan, self._planned = plan, plan(self.chain)

    def part(self, first: int, last: int, head: Head | None = None, prior: Tensor | None = None) -> ModelPart:
        """Return the part of the chain that a task runs; `prior` is what the client adds to class scores."""
        return ModelPart(self._planned, first, last, head, None if prior is None else prior.to(self.device))

    def move_to_files(self) -> None:
        """Keep the model's tensors in files that are this process's own: those of a parent would be shared with it."""
        for tensor in self.chain.tensors.values():
            tensor.data = copied_to_file(tensor.data)

    @property
    def device(self) -> torch.device:
        """Where the model is: data and parameters are brought there."""
        return self.chain.device

    @cached_property
    def channels(self) -> Channels:
        """The channels that sub-networks are cut along."""
        return channels_of(self.chain.model, self.input_shape)

    def values(self, names: tuple[str, ...]) -> dict[str, Tensor]:
        """Return copies of tensors of the model."""
        tensors = self.chain.tensors
        return {name: tensors[name].detach().clone(memory_format=torch.contiguous_format) for name in names}

    def load(self, task: ModelTask, local: Mapping[str, Tensor]) -> None:
        """Bring the chain to the state the task asks for: frozen prefix, the client's own layers, the task's part."""
        for module in task.frozen:
            if any(self.loaded.get(atom) != module.digest for atom in range(module.first, module.last)):
                self.chain.load(self.modules[module.digest])
                self.loaded.update(dict.fromkeys(range(module.first, module.last), module.digest))
        self.loaded.update(dict.fromkeys(range(task.first, task.last), None))
        self.chain.load(local)
        self.chain.load({name: value for name, value in task.parameters.items() if not of_head(name)})
