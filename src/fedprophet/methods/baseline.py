"""What the paper's baselines share: rounds, evaluation, and the best round that is restored at the end.

A baseline says what each client is asked to train (`assign`), what that costs (`cost`) and how the answers are joined
(`join`); what it leaves alone is joint training of the whole model.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from fedprophet.cascade.cost import ChainCost
from fedprophet.messages.task import ClientTask, ClientUpdate, Resources, Timeline
from fedprophet.methods.base import CLIENT_NORM_LAYERS, NORM_LAYERS, World, fold, judged, spare
from fedprophet.server.aggregate import Parameters
from fedprophet.server.convergence import Best, better, score
from fedprophet.server.coordinator import Conversation, Record
from fedprophet.threat import ThreatModel

ROBUSTNESS_WEIGHT = 1.5
"""A baseline's best round is the one with the highest clean + 1.5 · adversarial accuracy."""


@dataclass(frozen=True)
class BaselineState:
    """Where a run is, its best round, and the accuracies of its last evaluation."""

    model: Parameters
    best_model: Parameters
    round: int = 0
    failures: int = 0
    best: Best | None = None
    last: Best | None = None
    discarded: tuple[tuple[int, int], ...] = ()


S = TypeVar("S", bound=BaselineState)
Joining = Generator[Sequence[ClientTask], Sequence[ClientUpdate], S | None]
"""Joins what came back, perhaps with further tasks; None where nothing that came back can be used."""


class Baseline(Generic[S]):
    """Rounds in which everyone drawn trains something that begins with the image; the best round is the result."""

    state: type[S]
    norm_layers = NORM_LAYERS
    client_norm_layers = CLIENT_NORM_LAYERS

    def __init__(self, world: World) -> None:
        self.world = world
        self.norm_layers = world.norm_layers(type(self).norm_layers)

    def initial(self) -> S:
        """Return the state before the first round."""
        model = self.world.initial_model()
        return self.state(model, model)

    def finished(self, state: S) -> bool:
        """Whether all rounds are played."""
        return state.round >= self.world.config.rounds

    def exported(self, state: S, local: Parameters) -> Parameters:
        """Return the model, with averaged norm layers."""
        return {**local, **state.model}

    def timeline(self, state: S) -> Timeline:
        """Return which versions of the clients' own layers count."""
        return self.world.timeline(state.round, state.best, state.discarded)

    def results(self, state: S) -> Mapping[str, Any]:
        """Return the best round and the last one, so that a reader sees both."""
        return {name: vars(value) for name, value in (("best", state.best), ("last", state.last)) if value}

    def round(self, state: S) -> Conversation[S]:
        """Play one round: ask, assign, train, join, evaluate; after the last one, go back to the best."""
        world = self.world
        state = replace(state, round=state.round + 1)
        record: Record = {
            "round": state.round,
            "adversarial_training": world.stage_rule.adversarial(state.round),
            "epsilon": world.config.attack.radius,
        }
        cohort = world.cohort(state.round)
        available = spare((yield [replace(self.task(state, client), kind="report") for client in cohort]), record)
        tasks = self.assign(state, available, record)
        updates = yield tasks
        record["times"] = world.times(tasks, updates, available, self.cost)
        joined = yield from self.join(state, tasks, updates, record)
        state = replace(state, failures=state.failures + 1) if joined is None else replace(joined, failures=0)
        if world.evaluation_due(state.round, state.failures):
            asked = self._evaluation_tasks(state)
            state = self._observe(state, record, asked, (yield asked))
        return (self._restore_best(state, record) if self.finished(state) else state), record

    # What a baseline may do in a way of its own.

    def assign(self, state: S, available: Mapping[int, Resources], record: Record) -> list[ClientTask]:
        """Return what each client trains: the whole model, attacked after the warm-up."""
        return [self.train_task(state, client) for client in available]

    def cost(self, task: ClientTask) -> ChainCost:
        """Return the cost of the model that a task trains."""
        return self.world.cost

    def join(
        self, state: S, tasks: Sequence[ClientTask], updates: Sequence[ClientUpdate], record: Record
    ) -> Joining[S]:
        """Average the models that came back."""
        yield from ()
        model = fold(self.world, state.model, tasks, updates, record)
        return None if model is None else replace(state, model=model)

    def evaluation_task(self, state: S, client: int, threat: ThreatModel | None) -> ClientTask:
        """Return the evaluation of the whole model on a client's held-out part."""
        return replace(self.task(state, client), kind="evaluate", threat=threat, parameters=state.model)

    # Tasks.

    def task(self, state: S, client: int) -> ClientTask:
        """Return a task on the whole model, which its own classifier ends, without any parameters."""
        last = len(self.world.chain)
        return ClientTask(
            "report",
            state.round,
            client,
            self.world.config.seed,
            last=last,
            batch=self.world.evaluation_batch(last),
            timeline=self.timeline(state),
        )

    def train_task(self, state: S, client: int) -> ClientTask:
        """Return the local training of the whole model."""
        world = self.world
        adversarial = world.stage_rule.adversarial(state.round)
        return replace(
            self.task(state, client),
            kind="train",
            threat=world.image_threat(world.config.attack.steps) if adversarial else None,
            training=world.local_training(state.round),
            parameters=state.model,
        )

    # The best round.

    def _evaluation_tasks(self, state: S) -> Sequence[ClientTask]:
        settings = self.world.config.evaluate
        clients = self.world.sample(settings.clients, state.round, "evaluate")
        return [self.evaluation_task(state, client, self.world.image_threat(settings.steps)) for client in clients]

    def _observe(self, state: S, record: Record, tasks: Sequence[ClientTask], answers: Sequence[ClientUpdate]) -> S:
        """Keep the best round. A round that nobody has evaluated has no accuracy and cannot be it."""
        accuracy = judged(tasks, answers, record)
        if accuracy is None:
            return state
        points = score(accuracy.clean, accuracy.adversarial, ROBUSTNESS_WEIGHT)
        candidate = Best(state.round, points, accuracy.clean, accuracy.adversarial, alpha=1.0)
        best = better(state.best, candidate)
        record |= {"score": points, "best_round": best.round}
        best_model = state.model if best is candidate else state.best_model
        return replace(state, best=best, last=candidate, best_model=best_model)

    def _restore_best(self, state: S, record: Record) -> S:
        """Go back to the best round, the clients' own layers included; where none was evaluated, stay at the last."""
        if state.best is None:
            record["best_round"] = None
            return state
        discarded = ((state.best.round, state.round),) if state.best.round < state.round else ()
        return replace(state, model=state.best_model, discarded=discarded)
