"""FedET (Cho et al., 2022), trained adversarially: heterogeneous ensemble transfer to a large server model.

Client k says p_k(x) about a public sample x, with the confidence v_k(x) = Var(p_k(x)) over the classes. The consensus
is the label y(x) = argmax Σ_k v_k p_k / Σ_k v_k. The models D(x) that disagree count too: d(x) is the same weighted
mean over them alone. The server's model f, of the largest architecture, minimises

    CE(f(x), y(x)) + λ · KL(d(x) ‖ softmax(f(x)))    (the second term where models disagree)

Its last layer starts each round as the average of the clients' last layers, and is given back to every architecture.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from fedprophet.cascade.atoms import Chain
from fedprophet.errors import ConfigError
from fedprophet.messages.values import BACKBONE
from fedprophet.methods.distillation import Distillation, DistillationSettings, DistillationState
from fedprophet.methods.registry import method
from fedprophet.methods.world import World, named
from fedprophet.server.aggregate import Usable
from fedprophet.server.coordinator import Conversation, Record
from fedprophet.server.rules.registry import Parameters


def consensus(logits: Tensor, diversity: float) -> dict[str, Tensor]:
    """Return the target of each sample from scores (models × samples × classes), each weighted by its variance."""
    probabilities = torch.softmax(logits, dim=2)
    variance = probabilities.var(dim=2, correction=0)
    labels = _weighted_mean(probabilities, variance, torch.ones_like(variance)).argmax(dim=1)
    disagrees = (probabilities.argmax(dim=2) != labels).to(variance.dtype)
    return {
        "labels": labels,
        "probabilities": _weighted_mean(probabilities, variance, disagrees),
        "weights": diversity * disagrees.amax(dim=0),
    }


def _weighted_mean(probabilities: Tensor, variance: Tensor, counted: Tensor) -> Tensor:
    """Return the mean over the models that are counted (1, the others 0), and zero where none is.

    Where none of them has any confidence, they count alike.
    """
    weights = variance * counted
    weights = torch.where(weights.sum(dim=0) > 0, weights, counted)
    total = weights.sum(dim=0).unsqueeze(1)
    return (weights.unsqueeze(2) * probabilities).sum(dim=0) / torch.where(total > 0, total, 1.0)


def last_layer(chain: Chain) -> dict[str, str]:
    """Return the names of the tensors of the model's last linear layer, by what they are in it."""
    layers = [layer for layer in chain.modules() if isinstance(layer, nn.Linear)]
    names = {id(tensor): name for name, tensor in chain.tensors.items()}
    return {part: names[id(tensor)] for part, tensor in layers[-1].named_parameters()} if layers else {}


def _shapes(chain: Chain, layer: Mapping[str, str]) -> str:
    """Return the shapes of a layer's tensors, to compare and to print."""
    return ", ".join(f"{part} {'×'.join(map(str, chain.tensors[name].shape))}" for part, name in layer.items())


@method(
    "fedet",
    "models as large as memory allows; a server model distils their consensus",
    paper="FedET-AT",
    row=3,
    distills=True,
    reads=("distillation.diversity",),
)
class FedET(Distillation):
    """A server model that learns from the clients' consensus, and hands its last layer to all of them."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._last = {name: last_layer(member.chain) for name, member in world.family.items()}
        shapes = {name: _shapes(member.chain, self._last[name]) for name, member in world.family.items()}
        if not shapes[BACKBONE] or any(shape != shapes[BACKBONE] for shape in shapes.values()):
            own = {BACKBONE: world.config.model.name}
            listed = "; ".join(f"{own.get(n, n)}: {shape or 'no linear layer'}" for n, shape in shapes.items())
            raise ConfigError(
                f"distillation.family: fedet needs models whose last linear layers have the same shape ({listed}). "
                "Name models of one family and width"
            )

    def join(self, state: DistillationState, usable: Usable, record: Record) -> Conversation[DistillationState]:
        """Average by architecture, let the server's model learn the consensus, and hand out its last layer."""
        logits = yield from self.predictions(state, usable, record)
        averages = self.average(state, usable)
        if not len(logits):  # without predictions there is nothing to learn
            return replace(state, models=averages)
        targets = consensus(logits, self.world.config.of(DistillationSettings).diversity)
        student = {**state.model, **self._average_last_layer(state, usable)}
        model = (yield from self.distil(state, {BACKBONE: student}, targets, record))[BACKBONE]
        models = {
            name: {**averaged, **{own: model[self._last[BACKBONE][part]] for part, own in self._last[name].items()}}
            for name, averaged in averages.items()
        }
        return replace(state, model=model, models=models)

    def _average_last_layer(self, state: DistillationState, usable: Usable) -> Parameters:
        """Return the mean of the clients' last layers, whatever their architecture, under the server model's names."""
        server = self._last[BACKBONE]
        layers = [
            (
                update.weight,
                {server[part]: update.parameters[own] for part, own in self._last[task.architecture].items()},
            )
            for task, update in usable
        ]
        return named(self.world.aggregator.join(named(state.model, server.values()), layers), server.values())
