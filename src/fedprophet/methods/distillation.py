"""Knowledge distillation: each client trains the largest model of a family that it can hold (FedDF, FedET).

The server averages the models of one architecture, and what the clients know is joined through their predictions on a
public set, which is taken from the held-out test set. The clients' norm layers travel with their models: without them
their predictions would not be theirs.
"""

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedprophet.cascade.cost import ChainCost
from fedprophet.messages.task import BACKBONE, SERVER, ClientTask, ClientUpdate, Resources
from fedprophet.methods.base import Architecture, World, drop, named
from fedprophet.methods.baseline import Baseline, BaselineState
from fedprophet.server.aggregate import Parameters
from fedprophet.server.coordinator import Record

Asking = Generator[Sequence[ClientTask], Sequence[ClientUpdate], Mapping[str, Parameters]]


@dataclass(frozen=True)
class DistillationState(BaselineState):
    """`model` is the server's model with the norm layers it was distilled with; `models` are those of the family."""

    models: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)


class Distillation(Baseline[DistillationState]):
    """What both methods share: who trains what, and how models meet on the public set."""

    state = DistillationState
    norm_layers = "those that the server's model was distilled with"
    client_norm_layers = norm_layers

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.family = world.family

    def initial(self) -> DistillationState:
        """Return every architecture as it starts, norm layers included."""
        models = {name: _tensors(architecture) for name, architecture in self.family.items()}
        return DistillationState(models[BACKBONE], models[BACKBONE], models=models)

    def architecture(self, resources: Resources) -> str:
        """Return the largest architecture that fits a client's memory, or else the smallest there is."""
        costs = {name: architecture.cost.total_memory for name, architecture in self.family.items()}
        fitting = [name for name, memory in costs.items() if memory <= resources.memory]
        return max(fitting or [min(costs, key=costs.__getitem__)], key=costs.__getitem__)

    def assign(self, state: DistillationState, available: Mapping[int, Resources], record: Record) -> list[ClientTask]:
        """Give each client its architecture, with the parameters that all clients of it share."""
        chosen = {client: self.architecture(resources) for client, resources in available.items()}
        own = {BACKBONE: self.world.config.model.name}
        record["architectures"] = {str(client): own.get(name, name) for client, name in chosen.items()}
        tasks = []
        for client, name in chosen.items():
            chain = self.family[name].chain
            shared = named(state.models[name], chain.shared())
            task = replace(self.train_task(state, client), architecture=name, last=len(chain))
            tasks.append(replace(task, parameters=shared, wants_local=True))
        return tasks

    def cost(self, task: ClientTask) -> ChainCost:
        """Return the cost of the client's architecture."""
        return self.family[task.architecture].cost

    def average(
        self, state: DistillationState, tasks: Sequence[ClientTask], found: Sequence[ClientUpdate]
    ) -> dict[str, Parameters]:
        """Average the clients' models, norm layers included, architecture by architecture."""
        names = {task.client: task.architecture for task in tasks}
        return {
            name: self.world.joined(model, [(u.weight, self._whole(u, name)) for u in found if names[u.client] == name])
            for name, model in state.models.items()
        }

    def layers(self, task: ClientTask) -> Parameters:
        """Return the layers of its own that a client sends with its model."""
        chain = self.family[task.architecture].chain
        return named(chain.tensors, chain.local())

    def _whole(self, update: ClientUpdate, architecture: str) -> Parameters:
        """Return a client's model, its own layers included."""
        return {**update.parameters, **named(update.local, self.family[architecture].chain.local())}

    def predictions(
        self, state: DistillationState, tasks: Sequence[ClientTask], found: Sequence[ClientUpdate], record: Record
    ) -> Generator[Sequence[ClientTask], Sequence[ClientUpdate], Tensor]:
        """Return the scores of every client's model on the public set: models × samples × classes.

        A model whose scores are not finite says nothing.
        """
        names = {task.client: task.architecture for task in tasks}
        asked = [
            replace(
                self._server_task(state, names[update.client], number),
                kind="predict",
                parameters=self._whole(update, names[update.client]),
            )
            for number, update in enumerate(found)
        ]
        answers = yield asked
        scores = {found[answer.number].client: answer.parameters["logits"] for answer in answers}
        finite = {client: logits for client, logits in scores.items() if bool(torch.isfinite(logits).all())}
        if len(finite) < len(scores):
            lost = scores.keys() - finite.keys()
            drop(record, dict.fromkeys(sorted(lost), "what its model says of the public set is not finite"))
        return torch.stack(list(finite.values())) if finite else torch.empty(0)

    def distil(
        self, state: DistillationState, students: Mapping[str, Parameters], targets: Parameters, record: Record
    ) -> Asking:
        """Train models on the public set and return them; one that diverges, or does not come back, stays as it was."""
        training = replace(self.world.local_training(state.round), iterations=self.world.config.distillation.iterations)
        asked = [
            replace(
                self._server_task(state, name, number),
                kind="distill",
                training=training,
                parameters=student,
                targets=targets,
            )
            for number, (name, student) in enumerate(students.items())
        ]
        answers = yield asked
        came = {list(students)[answer.number]: answer for answer in answers}
        sound = {name: a for name, a in came.items() if _finite(a.metrics.get("loss", math.nan), a.parameters)}
        own = {BACKBONE: self.world.config.model.name}
        losses = {name: sound[name].metrics["loss"] if name in sound else None for name in students}
        record["distillation"] = {own.get(name, name): loss for name, loss in losses.items()}
        return {**students, **{name: answer.parameters for name, answer in sound.items()}}

    def _server_task(self, state: DistillationState, name: str, number: int) -> ClientTask:
        last = len(self.family[name].chain)
        return replace(self.task(state, SERVER), architecture=name, last=last, number=number)


def _tensors(architecture: Architecture) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in architecture.chain.tensors.items()}


def _finite(loss: float, tensors: Parameters) -> bool:
    return all(bool(torch.isfinite(value).all()) for value in (torch.tensor(loss), *tensors.values()))
