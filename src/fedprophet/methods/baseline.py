"""What the paper's baselines share: rounds, evaluation, and the best round that is restored at the end.

A baseline says what each client is asked to train (`assign`), what that costs (`cost`) and how the answers are joined
(`join`). By default that is joint training of the whole model.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from fedprophet.cascade.cost import ChainCost
from fedprophet.fleet.clock import training_times
from fedprophet.messages.tasks import Evaluate, Train
from fedprophet.messages.values import Resources
from fedprophet.methods.base import Method, MethodState, ModelFields
from fedprophet.server.aggregate import Usable
from fedprophet.server.convergence import Best, better, score
from fedprophet.server.coordinator import Conversation, Record
from fedprophet.threat import ThreatModel

ROBUSTNESS_WEIGHT = 1.5
"""A baseline's best round is the one with the highest clean + 1.5 · adversarial accuracy.

The paper's text does not have this weight; its tables report the rounds that it chooses, on the data that is reported.
"""


@dataclass(frozen=True, kw_only=True)
class BaselineState(MethodState):
    """Also has the accuracies of the last evaluation."""

    last: Best | None = None


S = TypeVar("S", bound=BaselineState)


class Baseline(Method[S]):
    """Rounds in which all clients drawn train something that begins with the image; the best round is the result."""

    def initial(self) -> S:
        model, layers = self.world.initial_model(), self.world.starting_layers()
        return self.state(model=model, best_model=model, starting=layers, best_starting=layers)

    def trained(self, state: S) -> bool:
        return state.round >= self.world.config.rounds

    def results(self, state: S) -> Mapping[str, Any]:
        """Return the best round and the last one, so that a reader sees both."""
        return {name: vars(value) for name, value in (("best", state.best), ("last", state.last)) if value}

    def training_round(self, state: S) -> Conversation[tuple[S, Record]]:
        """Play one round: report, assign, train, join, evaluate; after the last one, go back to the best."""
        state = replace(state, round=state.round + 1)
        threat = self.world.training_threat(state.round)
        record: Record = {
            "round": state.round,
            "adversarial_training": threat is not None,
            "epsilon": threat.radius if threat else self.world.config.attack.radius,
        }
        available = yield from self.ask_resources(state, record)
        tasks = self.assign(state, available, record)
        updates = yield from self.ask_training(tasks, available, record)
        record["times"] = training_times(tasks, updates, available, self.cost)
        usable = self.world.aggregator.usable(tasks, updates, record, self.expected_layers)
        if usable:
            joined = yield from self.join(state, usable, record)
            strength = self.world.stage_rule().strength(state.round)
            mean = self.mean_after(state, joined.model, strength)
            state = replace(joined, failures=0, starting=self.gathered(state, usable), mean=mean)
        else:
            state = replace(state, failures=state.failures + 1)
        if self.world.stage_rule().ungated.evaluates(state.round, state.failures):
            state = yield from self._evaluate(state, record)
        return (self._restore_best(state, record) if self.trained(state) else state), record

    # What a baseline may do differently.

    def assign(self, state: S, available: Mapping[int, Resources], record: Record) -> list[Train]:
        """Return what each client trains: the whole model, attacked after the warm-up."""
        return [self.train_task(state, client) for client in available]

    def cost(self, task: Train) -> ChainCost:
        """Return the cost of the model that a task trains."""
        return self.world.needs

    def join(self, state: S, usable: Usable, record: Record) -> Conversation[S]:
        """Join what came back and can be used, perhaps with further tasks."""
        yield from ()
        return replace(state, model=self.world.aggregator.join_updates(state.model, usable))

    def evaluation_task(self, state: S, client: int, threat: ThreatModel | None) -> Evaluate:
        """Return the evaluation of the whole model on a client's held-out samples."""
        fields, drawn = self.model_fields(state, client), self.world.evaluation_draws(len(self.world.chain))
        return Evaluate(**fields, threat=threat, calibration=self.world.calibration(client), drawn=drawn)

    # Tasks.

    def model_fields(self, state: S, client: int) -> ModelFields:
        """Return what a task on a whole model is made with."""
        last = len(self.world.chain)
        return {
            **self.task_fields(state, client),
            "first": 0,
            "last": last,
            "head": None,
            "frozen": (),
            "batch": self.world.evaluation_batch(last),
            "parameters": state.model,
            "starting": state.starting,
        }

    def train_task(self, state: S, client: int) -> Train:
        """Return the local training of the whole model."""
        world = self.world
        return Train(
            **self.model_fields(state, client),
            threat=world.training_threat(state.round),
            training=world.local_training(state.round),
            calibration=world.calibration(client),
            wants_local=world.gathers_layers,
        )

    # The best round.

    def _evaluate(self, state: S, record: Record) -> Conversation[S]:
        """Keep the best round. A round that nobody evaluated has no accuracy and cannot become the best."""
        accuracy = yield from self.ask_accuracy(state, record)
        if accuracy is None:
            return state
        points = score(accuracy.clean, accuracy.adversarial, ROBUSTNESS_WEIGHT)
        candidate = Best(state.round, points, accuracy.clean, accuracy.adversarial, alpha=1.0)
        best = better(state.best, candidate)
        record |= {"score": points, "best_round": best.round}
        if best is candidate:
            state = replace(state, best_model=state.judged.model, best_starting=state.starting)
        return replace(state, best=best, last=candidate)

    def _restore_best(self, state: S, record: Record) -> S:
        """Go back to the best round, the clients' own layers included; where none was evaluated, stay at the last."""
        if state.best is None:
            record["best_round"] = None
            return replace(state.judged, mean=None)
        discarded = ((state.best.round, state.round),) if state.best.round < state.round else ()
        return replace(state, model=state.best_model, starting=state.best_starting, discarded=discarded, mean=None)
