"""What a method is: a state, and a round that asks clients and returns the next state."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Self, TypedDict, TypeVar

from fedprophet.cascade.norms import hidden_norm_layers, statistics_names
from fedprophet.errors import BudgetError, ConfigError
from fedprophet.messages.answers import Evaluated, Reported, Trained
from fedprophet.messages.tasks import Evaluate, Report, Train
from fedprophet.messages.values import FrozenModule, Resources, Timeline
from fedprophet.methods.refresh import Renewal, refresh_round
from fedprophet.methods.world import World, named
from fedprophet.server.accuracy import Accuracy, note_accuracy
from fedprophet.server.aggregate import Usable, layers_fault
from fedprophet.server.convergence import Best
from fedprophet.server.coordinator import Conversation, Record, ask
from fedprophet.server.horizon import RunningMean
from fedprophet.server.plans import note_plans
from fedprophet.server.rejections import reject
from fedprophet.server.resources import available_resources
from fedprophet.server.rules.registry import Parameters
from fedprophet.server.weights import believed
from fedprophet.sizes import format_size
from fedprophet.threat import ThreatModel

SHARED_LAYERS = "joined in every round like all parameters"
"""Where norm layers come from that clients share."""
NO_LAYERS = "none that keep statistics"
"""What is said of the norm layers of a model whose norms, if it has any, are parameters like all others."""


@dataclass(frozen=True, kw_only=True)
class MethodState:
    """Where a run is, and its best round so far.

    `starting` are the layers that clients begin with where they have none of their own. `failures` counts the rounds in
    a row that had no usable update; `discarded` are the rounds between a best one that was restored and the end of its
    stage. `mean` is that of the model over its last rounds, where there is a horizon. `renewal` is what the round that
    measures norm statistics anew came to; if clients have their own, `norm_layers` are those of the exported model.
    """

    model: Parameters
    best_model: Parameters
    starting: Parameters = field(default_factory=dict)
    best_starting: Parameters = field(default_factory=dict)
    round: int = 0
    failures: int = 0
    best: Best | None = None
    discarded: tuple[tuple[int, int], ...] = ()
    renewal: Renewal | None = None
    norm_layers: Parameters = field(default_factory=dict)
    mean: RunningMean | None = None

    @property
    def refreshed(self) -> bool:
        """Whether the round that measures norm statistics anew was played, or is being played."""
        return self.renewal is not None

    @property
    def judged(self) -> Self:
        """The state with the model that is evaluated, kept and exported: the mean over the horizon, if there is one."""
        return replace(self, model=named(self.mean.parameters, self.model)) if self.mean else self

    @property
    def proven(self) -> int:
        """The round whose state the last usable updates were trained from: a model that is certainly sound.

        The state that was made of them may not be, since bad updates can look good. Only the next round tells.
        """
        return max(0, self.training_rounds - self.failures - 1)

    @property
    def training_rounds(self) -> int:
        """How many rounds of training were played: all but the one that measures statistics."""
        return self.round - int(self.refreshed)


@dataclass(frozen=True)
class Shown:
    """What the progress display shows of a round's record, under a label."""

    label: str
    text: Callable[[Record], str]


class TaskFields(TypedDict):
    """What every task is made with."""

    round: int
    client: int
    seed: int
    timeline: Timeline


class ModelFields(TaskFields):
    """What every task on a part of the model is made with."""

    first: int
    last: int
    head: int | None
    frozen: tuple[FrozenModule, ...]
    batch: int
    parameters: Parameters
    starting: Parameters


S = TypeVar("S", bound=MethodState)


class Method(ABC, Generic[S]):
    """One algorithm. It starts with `initial`, and each `round` leads from a state to the next; it keeps nothing else.

    `norm_layers` says where the norm layers of the exported model come from, `{averaged}` being what the aggregation
    rule makes of clients' own; `client_norm_layers` says which ones a client is evaluated with. Both are for layers
    that live with the clients. `shown` is what only this method notes of a round.
    """

    state: type[S]
    norm_layers = "{averaged}"
    client_norm_layers = "each client's own"
    shown: Shown | None = None
    refreshes_own = False
    """Whether clients' own statistics are measured anew as well when those of the exported model are."""

    def __init__(self, world: World) -> None:
        self.world = world
        pooled = ", variances pooled" if world.aggregator.pools else ""
        self.norm_layers = type(self).norm_layers.format(averaged=world.aggregator.averaged + pooled)
        norm = world.config.norm
        hidden = hidden_norm_layers(world.chain) if norm.refresh != "none" or norm.layers == "frozen" else ()
        if hidden:
            raise ConfigError(
                f"norm: {hidden[0]} keeps statistics, but its forward is traced as a part of the model, so they cannot "
                'be fixed or measured. Use norm layers of torch.nn, or norm.layers = "shared" without norm.refresh'
            )
        if norm.layers == "statistics-local":
            self.norm_layers = f"{SHARED_LAYERS}; statistics: {self.norm_layers}"
            self.client_norm_layers = f"{SHARED_LAYERS}; statistics: {self.client_norm_layers}"
        elif norm.layers != "local":
            rounds = world.config.frozen_after_rounds
            fixed = f"; statistics fixed after {rounds} round{'s' if rounds > 1 else ''} of a stage"
            are_fixed = norm.layers == "frozen" and rounds < world.config.rounds
            joined = f"{SHARED_LAYERS}, variances pooled{fixed if are_fixed else ''}"
            self.norm_layers = self.client_norm_layers = joined

    @abstractmethod
    def initial(self) -> S:
        """Return the state before the first round."""

    @abstractmethod
    def training_round(self, state: S) -> Conversation[tuple[S, Record]]:
        """Play one round of training; return the next state and the round's line for the journal."""

    def fits(self, state: S) -> bool:
        """Whether a state can be of this model as it is cut here; its parameters are known to be the model's."""
        return True

    @abstractmethod
    def trained(self, state: S) -> bool:
        """Whether all rounds of training are played."""

    def round(self, state: S) -> Conversation[tuple[S, Record]]:
        """Play one communication round: one of training or, when these are over, the one that refreshes statistics."""
        return refresh_round(self, state) if self.trained(state) else self.training_round(state)

    def finished(self, state: S) -> bool:
        """Whether all rounds are played."""
        return self.trained(state) and (state.refreshed or not self.world.refreshes)

    @abstractmethod
    def evaluation_task(self, state: S, client: int, threat: ThreatModel | None) -> Evaluate:
        """Return the evaluation of the model so far on a client's held-out samples, attacked at the image."""

    @abstractmethod
    def results(self, state: S) -> Mapping[str, Any]:
        """Return what the closing table shows in addition to the accuracies."""

    def exported(self, state: S, local: Parameters) -> Parameters:
        """Return the one model that is published, given the average of the clients' own layers."""
        return {**local, **state.model}

    def exported_layers(self, local: Parameters) -> Parameters:
        """Return the layers of their own that clients may send for the exported model, as they are in the model."""
        return local

    def with_layers(self, state: S, layers: Parameters) -> S:
        """Return the state with other norm layers in its model, whose training is over."""
        return replace(state, model={**state.model, **layers})

    def layers_of(self, state: S) -> dict[str, str]:
        """Say which norm layers clients are evaluated with (personalised), and which ones a state exports (global)."""
        own, whole = self.client_norm_layers, self.norm_layers
        if not statistics_names(self.world.chain):
            return {"personalised": NO_LAYERS, "global": NO_LAYERS}
        if state.renewal is None:
            return {"personalised": own, "global": whole}
        images, clients = self.world.config.refresh_images, self.world.config.population.clients
        pooled, kept = state.renewal.pooled_text(images), state.renewal.own_text(images, clients)
        added = pooled if own == whole else kept if self.refreshes_own else ""
        return {"personalised": own + added, "global": whole + pooled}

    def timeline(self, state: S) -> Timeline:
        """Return which versions of the clients' own layers count; a resume may go back as far as checkpoints do."""
        checkpoint = self.world.config.checkpoint
        floor = min(state.round - checkpoint.keep * checkpoint.every, state.proven - checkpoint.every)
        return Timeline(state.discarded, min(floor, state.best.round if state.best else floor))

    # What the rounds of all methods are made of.

    def task_fields(self, state: S, client: int) -> TaskFields:
        """Return what every task for a client is made with."""
        timeline = self.timeline(state)
        return {"round": state.round, "client": client, "seed": self.world.config.seed, "timeline": timeline}

    def ask_resources(self, state: S, record: Record) -> Conversation[dict[int, Resources]]:
        """Ask the round's cohort what it has available."""
        cohort = self.world.clients.cohort(state.round)
        reports = yield from ask([Report(**self.task_fields(state, client)) for client in cohort], Reported)
        return available_resources(reports, record)

    def expected_layers(self, task: Train) -> Parameters:
        """Return the client's own layers that have to come with a task's update."""
        chain = self.world.chain
        return named(chain.tensors, chain.local(task.first, task.last)) if task.wants_local else {}

    def mean_after(self, state: S, latest: Parameters, strength: float) -> RunningMean | None:
        """Return the mean of the rounds so far and of one more; it begins with the first under the whole attack."""
        horizon = self.world.config.horizon_rounds
        if not horizon or strength < 1:
            return None
        return state.mean.after(latest, horizon) if state.mean else RunningMean(latest)

    def gathered(self, state: S, usable: Usable) -> Parameters:
        """Return what clients without layers of their own begin with, after those of a round have trained theirs."""
        if not self.world.gathers_layers:
            return state.starting
        own = [(update.weight, named(update.local, self.expected_layers(task))) for task, update in usable]
        return self.world.aggregator.pooled(state.starting, own)

    def layer_reports(self, state: S) -> list[Report]:
        """Return what asks every client that has trained for its own layers."""
        clients = self.world.clients.trained(state.round)
        return [Report(**self.task_fields(state, client), wants_local=True) for client in clients]

    def joined_layers(self, answers: Iterable[Reported], record: Record) -> Parameters:
        """Return one set of own layers, joined from those of the clients; note whose cannot be used."""
        initial, aggregator = self.world.initial_layers, self.world.aggregator
        known = self.exported_layers(initial)

        def sound(answer: Reported) -> bool:
            reason = layers_fault(known, answer.weight, answer.local)
            if reason:
                reject(record, {answer.client: reason})
            return reason is None

        # One after the other: all of them may not fit into memory.
        believable = believed(filter(sound, answers), aggregator.sizes, record)
        return aggregator.join(initial, ((answer.weight, answer.local) for answer in believable))

    def ask_training(
        self, tasks: Sequence[Train], available: Mapping[int, Resources], record: Record
    ) -> Conversation[list[Trained]]:
        """Let clients train, each within the memory it has where that is limited, and note how they did it."""
        limits = {task.client: self.world.limit(available[task.client]) for task in tasks}
        updates = yield from ask([replace(task, memory=limits[task.client]) for task in tasks], Trained)
        return note_plans(updates, limits, record) if self.world.enforces else updates

    def poorest(self) -> Iterator[tuple[str, int]]:
        """Yield what is asked of a client that has no more than R_min: its name, and the memory that it needs."""
        yield "the whole model", self.world.needs.total_memory

    def check_memory(self) -> None:
        """Refuse a budget in which the poorest client cannot train, where memory is limited."""
        world = self.world
        short = [each for each in self.poorest() if each[1] > world.budget] if world.enforces else []
        if short:
            name, needed = short[0]
            raise BudgetError(
                f"memory.enforce: {name} cannot be trained within memory.budget = {world.config.memory.budget} "
                f"({format_size(world.budget, 2)}): the most economical plan needs {format_size(needed, 2)}. Give a "
                f"memory.budget of at least {max(needed for _, needed in short)} bytes{self.or_else()}"
            )

    def or_else(self) -> str:
        """Return what may be done instead where the poorest client has too little memory."""
        return ", or use fedprophet, which trains modules"

    def ask_accuracy(self, state: S, record: Record) -> Conversation[Accuracy | None]:
        """Let clients evaluate the model and return their accuracy; None where none of them did."""
        settings = self.world.config.evaluate
        threat = self.world.image_threat(settings.steps)
        clients = self.world.clients.sample(settings.clients, state.round, "evaluate")
        judged = state.judged
        tasks = [self.evaluation_task(judged, client, threat) for client in clients]
        answers = yield from ask(tasks, Evaluated)
        return note_accuracy(answers, self.world.aggregator, record)
