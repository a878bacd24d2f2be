"""Knowledge distillation: each client trains the largest model of a family that it can hold (FedDF, FedET).

The server averages the models of one architecture, and what the clients know is joined through their predictions on a
public set, which is taken from the held-out test set. The clients' norm layers travel with their models: predictions
depend on them.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedprophet.cascade.cost import ChainCost
from fedprophet.cascade.norms import norm_names
from fedprophet.errors import ConfigError
from fedprophet.finite import all_finite
from fedprophet.messages.answers import Distilled, Predicted, Trained
from fedprophet.messages.tasks import Distill, Predict, Train
from fedprophet.messages.values import BACKBONE, SERVER, LocalTraining, Resources
from fedprophet.methods.base import Shown
from fedprophet.methods.baseline import Baseline, BaselineState
from fedprophet.methods.world import World, named
from fedprophet.server.aggregate import Usable
from fedprophet.server.coordinator import Conversation, Record, ask
from fedprophet.server.rejections import reject
from fedprophet.server.rules.registry import Parameters
from fedprophet.settings.section import MOST_REAL, Section, section
from fedprophet.settings.values import Names, Samples, share_of


@section("distillation")
class DistillationSettings(Section):
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
    learning_rate: Literal["train"] | Annotated[float, Field(gt=0, le=MOST_REAL)] = Field(
        default="train", description='Learning rate of distillation; "train": that of the round\'s training.'
    )
    weight_decay: Literal["train"] | Annotated[float, Field(ge=0, le=MOST_REAL)] = Field(
        default="train", description='Weight decay of distillation; "train": train.weight_decay.'
    )
    norm_layers: Literal["averaged", "kept"] = Field(
        default="averaged",
        description="feddf: the norm layers that distillation starts from: the clients' average, or those that the "
        "server's models had after the last one (as in the paper's runs).",
    )
    diversity: float = Field(
        default=0.05, ge=0, description="fedet: weight of the KL term to the models that disagree."
    )

    def training(self, usual: LocalTraining) -> LocalTraining:
        """Return the hyper-parameters of distillation, given those of the round's training.

        What keeps clients together, fixed statistics and terms that draw back, has no place where the models meet;
        nor have weights of attacked samples, since nothing is attacked.
        """
        rate, decay = self.learning_rate, self.weight_decay
        return replace(
            usual,
            iterations=self.iterations,
            learning_rate=usual.learning_rate if rate == "train" else rate,
            weight_decay=usual.weight_decay if decay == "train" else decay,
            fixed_statistics=False,
            proximal=0.0,
            boundary_weights=False,
            consistency=0.0,
        )

    def public_samples(self, test: int) -> int:
        """Return how many of the `test` samples become the public set: at least one, and at least one stays."""
        samples = share_of(self.public, test)
        if samples >= test:
            text = f"larger than what is held out: the test set has {test} samples, and one at least must stay in it"
            raise ConfigError(f"distillation.public: {samples} samples are {text}. Set it to at most {test - 1}")
        if samples < 1:
            text = f"{self.public} of {test} test samples is less than one sample. Set it to a number of samples"
            raise ConfigError(f"distillation.public: {text}")
        return samples


def _architectures(record: Record) -> str:
    return ", ".join(f"{count} {name}" for name, count in Counter(record["architectures"].values()).items())


@dataclass(frozen=True, kw_only=True)
class DistillationState(BaselineState):
    """`model` is the server's model with the norm layers it was distilled with; `models` are those of the family."""

    models: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)


class Distillation(Baseline[DistillationState]):
    """What both methods share: who trains what, and how models meet on the public set."""

    state = DistillationState
    shown = Shown("models", _architectures)
    norm_layers = "those that the server's model was distilled with"
    client_norm_layers = norm_layers

    def __init__(self, world: World) -> None:
        super().__init__(world)
        # Wherever clients' norm layers live, distillation ends with the server's own.
        self.norm_layers = self.client_norm_layers = type(self).norm_layers
        self._costs = {name: world.needed(member.cost, member.chain) for name, member in world.family.items()}

    def initial(self) -> DistillationState:
        """Return every architecture as it starts, norm layers included."""
        models = {
            name: {tensor: value.detach().clone() for tensor, value in architecture.chain.tensors.items()}
            for name, architecture in self.world.family.items()
        }
        return DistillationState(model=models[BACKBONE], best_model=models[BACKBONE], models=models)

    def architecture(self, resources: Resources) -> str:
        """Return the largest architecture that fits a client's memory, or else the smallest there is."""
        costs = {name: cost.total_memory for name, cost in self._costs.items()}
        fitting = [name for name, memory in costs.items() if memory <= resources.memory]
        return max(fitting or [min(costs, key=costs.__getitem__)], key=costs.__getitem__)

    def assign(self, state: DistillationState, available: Mapping[int, Resources], record: Record) -> list[Train]:
        """Give each client its architecture, with that architecture's shared parameters."""
        chosen = {client: self.architecture(resources) for client, resources in available.items()}
        record["architectures"] = {str(client): self._model_name(name) for client, name in chosen.items()}
        tasks = []
        for client, name in chosen.items():
            chain = self.world.family[name].chain
            shared = named(state.models[name], chain.shared())
            task = self.train_task(state, client)
            begun = named(state.models[name], chain.local()) if self.world.gathers_layers else {}
            task = replace(task, architecture=name, last=len(chain), parameters=shared, starting=begun)
            tasks.append(replace(task, wants_local=True))
        return tasks

    def cost(self, task: Train) -> ChainCost:
        return self._costs[task.architecture]

    def poorest(self) -> Iterator[tuple[str, int]]:
        """Yield the smallest model of the family."""
        name = min(self._costs, key=lambda name: self._costs[name].total_memory)
        yield self._model_name(name), self._costs[name].total_memory

    def average(self, state: DistillationState, usable: Usable) -> dict[str, Parameters]:
        """Average the clients' models, norm layers included, architecture by architecture."""
        sent = [(task.architecture, update.weight, self._whole(task, update)) for task, update in usable]
        return {
            name: self.world.aggregator.join(model, [(weight, whole) for own, weight, whole in sent if own == name])
            for name, model in state.models.items()
        }

    def own_layers(self, state: DistillationState, architecture: str) -> Parameters:
        """Return the norm layers that the server's model of an architecture has."""
        return named(state.models[architecture], norm_names(self.world.family[architecture].chain))

    def gathered(self, state: DistillationState, usable: Usable) -> Parameters:
        """Return nothing: the server's model of each architecture has norm layers to begin with."""
        return {}

    def expected_layers(self, task: Train) -> Parameters:
        """Return the client's own layers that come with its model."""
        chain = self.world.family[task.architecture].chain
        return named(chain.tensors, chain.local())

    def _whole(self, task: Train, update: Trained) -> Parameters:
        """Return a client's model, its own layers included."""
        return {**update.parameters, **named(update.local, self.world.family[task.architecture].chain.local())}

    def predictions(self, state: DistillationState, usable: Usable, record: Record) -> Conversation[Tensor]:
        """Return the scores of every client's model on the public set: models × samples × classes.

        A model whose scores are not finite is left out.
        """
        whole = Predict(**self.model_fields(state, SERVER))
        asked = [
            replace(
                whole,
                number=number,
                architecture=task.architecture,
                last=task.last,
                parameters=self._whole(task, update),
            )
            for number, (task, update) in enumerate(usable)
        ]
        answers = yield from ask(asked, Predicted)
        scores = {usable[answer.number][0].client: answer.logits for answer in answers}
        finite = {client: logits for client, logits in scores.items() if all_finite([logits])}
        if len(finite) < len(scores):
            lost = scores.keys() - finite.keys()
            reject(record, dict.fromkeys(sorted(lost), "the scores of its model on the public set are not finite"))
        return torch.stack(list(finite.values())) if finite else torch.empty(0)

    def distil(
        self, state: DistillationState, students: Mapping[str, Parameters], targets: Parameters, record: Record
    ) -> Conversation[Mapping[str, Parameters]]:
        """Train models on the public set and return them; one that diverges, or does not come back, stays as it was."""
        settings = self.world.config.of(DistillationSettings)
        training = settings.training(self.world.local_training(state.round))
        whole = Distill(**self.model_fields(state, SERVER), training=training, targets=targets)
        asked = [
            replace(
                whole, number=number, architecture=name, last=len(self.world.family[name].chain), parameters=student
            )
            for number, (name, student) in enumerate(students.items())
        ]
        answers = yield from ask(asked, Distilled)
        came = {list(students)[answer.number]: answer for answer in answers}
        sound = {name: a for name, a in came.items() if math.isfinite(a.loss) and all_finite(a.parameters.values())}
        record["distillation"] = {
            self._model_name(name): sound[name].loss if name in sound else None for name in students
        }
        return {**students, **{name: answer.parameters for name, answer in sound.items()}}

    def _model_name(self, architecture: str) -> str:
        return self.world.config.model.name if architecture == BACKBONE else architecture
