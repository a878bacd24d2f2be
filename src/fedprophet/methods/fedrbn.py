"""FedRBN (Hong et al., 2023): robustness propagates from clients that can afford adversarial training to the others.

Every client trains the whole model. Those that can hold it train under attack, the others on clean images. All keep two
sets of norm statistics, clean and adversarial, with one affine transformation; an attacked client first updates its
clean set on the clean batch. A client c that cannot attack receives adversarial statistics, the mean of those of this
round's attacked clients A, weighted by how similar their clean statistics (μ, σ²) are, over the norm layers l:

    s_a = mean_l ½ (cos(μ_c, μ_a) + cos(σ²_c, σ²_a)),    weights = softmax_a(s_a / T),    T = 0.01

Clean images are judged with the clean statistics and attacked ones with the adversarial statistics.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from pydantic import Field

from fedprophet.cascade.norms import statistics_names
from fedprophet.client.statistics import ADVERSARIAL, under_attack
from fedprophet.errors import ConfigError, ModelError
from fedprophet.fleet.clock import add_adoption
from fedprophet.messages.answers import Adopted
from fedprophet.messages.tasks import Adopt, Evaluate, Train
from fedprophet.messages.values import SERVER, Resources
from fedprophet.methods.base import Shown
from fedprophet.methods.baseline import Baseline, BaselineState
from fedprophet.methods.registry import method
from fedprophet.methods.world import World, named
from fedprophet.server.aggregate import Usable
from fedprophet.server.coordinator import Conversation, Record, ask
from fedprophet.server.rules.mean import partial_average
from fedprophet.server.rules.registry import Join, Parameters
from fedprophet.settings.section import Section, section
from fedprophet.threat import ThreatModel


@section("propagation")
class PropagationSettings(Section):
    """Propagation of adversarial norm statistics (fedrbn)."""

    temperature: float = Field(
        default=0.01, gt=0, description="Temperature of the softmax over the clients' similarities."
    )


def similarity(one: Parameters, other: Parameters) -> float:
    """Return the mean cosine of two clients' statistics: each layer's means and variances count alike."""
    cosines = [F.cosine_similarity(one[name].double(), other[name].double(), dim=0) for name in one]
    return float(torch.stack(cosines).mean())


def propagate(
    clean: Parameters,
    sources: Sequence[tuple[Parameters, Parameters]],
    temperature: float,
    join: Join = partial_average,
) -> Parameters:
    """Return adversarial statistics for a client with these clean ones; a source has clean and adversarial ones."""
    similarities = torch.tensor([similarity(clean, theirs) for theirs, _ in sources], dtype=torch.float64)
    weights = torch.softmax(similarities / temperature, dim=0).tolist()
    return join(clean, [(w, adversarial) for w, (_, adversarial) in zip(weights, sources, strict=True)])


@method(
    "fedrbn",
    "whole model; only clients with enough memory attack, norm statistics spread robustness",
    paper="FedRBN",
    row=7,
    reads=("propagation.",),
)
class FedRBN(Baseline[BaselineState]):
    """Joint training where only clients with enough memory attack, and norm statistics carry robustness over."""

    state = BaselineState
    shown = Shown("under attack", lambda record: f"{len(record['attacked'])}/{len(record['times'])} clients")
    norm_layers = "{averaged} (statistics: the adversarial ones)"
    client_norm_layers = (
        "each client's own (statistics: the clean ones for clean images, the adversarial ones for attacked images)"
    )

    def __init__(self, world: World) -> None:
        super().__init__(world)
        layers = world.config.norm.layers
        if world.config.norm.shares_statistics:
            raise ConfigError(
                f"norm.layers: given {layers!r}, but fedrbn spreads robustness by the statistics that each client has "
                'of its own. Set it to "local" or "statistics-local", or use another method'
            )
        self._statistics = statistics_names(world.chain)
        if not self._statistics:
            raise ModelError(
                f"method {world.config.method} needs norm layers that keep statistics, such as batch norms, and "
                f"{type(world.chain.model).__name__} has none: use a model that has some, or another method"
            )

    def assign(self, state: BaselineState, available: Mapping[int, Resources], record: Record) -> list[Train]:
        """Let all clients train the whole model, and attack it where it fits their memory."""
        tasks = []
        for client, resources in available.items():
            task = replace(self.train_task(state, client), wants_local=True)
            attacks = task.threat is not None and resources.memory >= self.world.needs.total_memory
            tasks.append(replace(task, threat=task.threat if attacks else None, adversarial_statistics=attacks))
        record["attacked"] = [task.client for task in tasks if task.threat is not None]
        return tasks

    def poorest(self) -> Iterator[tuple[str, int]]:
        """Yield the whole model without an attack, which is what clients of little memory train."""
        yield "the whole model", self.world.needs.clean_memory

    def join(self, state: BaselineState, usable: Usable, record: Record) -> Conversation[BaselineState]:
        """Average the models, then send adversarial statistics to the clients that trained without attack."""
        propagation = self._propagation(state, usable)
        add_adoption(record["times"], propagation, (yield from ask(propagation, Adopted)))
        return replace(state, model=self.world.aggregator.join_updates(state.model, usable))

    def expected_layers(self, task: Train) -> Parameters:
        """Return the statistics that a client has to send: a second set where it attacks."""
        first, names = super().expected_layers(task), self._statistics if task.adversarial_statistics else ()
        return {**first, **{ADVERSARIAL + name: first[name] for name in names}}

    def _propagation(self, state: BaselineState, usable: Usable) -> list[Adopt]:
        """Return what the clients that trained without attack adopt from those that attacked."""
        attacked = {task.client for task, _ in usable if task.adversarial_statistics}
        names = self._statistics
        # What a client has just trained may lie on a GPU, and what it had stored before does not.
        local = {update.client: {name: value.cpu() for name, value in update.local.items()} for _, update in usable}
        sources = [
            (named(layers, names), {name: layers[ADVERSARIAL + name] for name in names})
            for client, layers in local.items()
            if client in attacked
        ]
        temperature, join = self.world.config.of(PropagationSettings).temperature, self.world.aggregator.join
        tasks = []
        for client in [client for client in local if sources and client not in attacked]:
            given = propagate(named(local[client], names), sources, temperature, join)
            parameters = {ADVERSARIAL + name: value for name, value in given.items()}
            tasks.append(Adopt(**self.task_fields(state, client), parameters=parameters))
        return tasks

    def evaluation_task(self, state: BaselineState, client: int, threat: ThreatModel | None) -> Evaluate:
        """Return an evaluation that judges attacked images with a client's adversarial statistics."""
        task = super().evaluation_task(state, client, threat)
        # The server holds one exported model, whose statistics are the adversarial ones already.
        return replace(task, adversarial_statistics=threat is not None and client != SERVER)

    def exported_layers(self, local: Parameters) -> Parameters:
        """Return the layers that clients may send: some of them have a second set of statistics."""
        return {**local, **{ADVERSARIAL + name: value for name, value in local.items()}}

    def exported(self, state: BaselineState, local: Parameters) -> Parameters:
        """Return the model with the adversarial statistics, where any client has them."""
        return {**under_attack(local), **state.model}
