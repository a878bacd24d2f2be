"""jFAT: joint federated adversarial training of the whole model, the paper's memory-hungry reference."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedprophet.client.task import ClientTask, ClientUpdate, Timeline
from fedprophet.methods.base import World, fold, spare
from fedprophet.server.accuracy import personalised
from fedprophet.server.aggregate import Parameters
from fedprophet.server.convergence import Best, better, score
from fedprophet.server.coordinator import Conversation, Record
from fedprophet.threat import ThreatModel

ROBUSTNESS_WEIGHT = 1.5
"""A baseline's best round is the one with the highest clean + 1.5 · adversarial accuracy."""


@dataclass(frozen=True)
class JointState:
    """Where a run is, its best round, and the accuracies of its last evaluation."""

    model: Parameters
    best_model: Parameters
    round: int = 0
    failures: int = 0
    best: Best | None = None
    last: Best | None = None
    discarded: tuple[tuple[int, int], ...] = ()


class JointTraining:
    """Average whole models that were trained adversarially; keep the best round at the end."""

    state = JointState

    def __init__(self, world: World) -> None:
        self.world = world

    def initial(self) -> JointState:
        """Return the state before the first round."""
        model = self.world.initial_model()
        return JointState(model, model)

    def finished(self, state: JointState) -> bool:
        """Whether all rounds are played."""
        return state.round >= self.world.config.rounds

    def model(self, state: JointState) -> Parameters:
        """Return the shared parameters of the model."""
        return state.model

    def timeline(self, state: JointState) -> Timeline:
        """Return which versions of the clients' own layers count."""
        return self.world.timeline(state.round, state.best, state.discarded)

    def results(self, state: JointState) -> Mapping[str, Any]:
        """Return the best round and the last one, so that a reader sees both."""
        return {name: vars(value) for name, value in (("best", state.best), ("last", state.last)) if value}

    def round(self, state: JointState) -> Conversation[JointState]:
        """Play one round: everyone drawn trains the whole model."""
        state = replace(state, round=state.round + 1)
        adversarial = self.world.stage_rule.adversarial(state.round)
        threat = self.world.image_threat(self.world.config.attack.steps) if adversarial else None
        record: Record = {
            "round": state.round,
            "adversarial_training": adversarial,
            "epsilon": self.world.config.attack.radius,
        }
        training = self.world.local_training(state.round)
        cohort = self.world.cohort(state.round)
        reports = [replace(self._task(state, client), kind="report", parameters={}) for client in cohort]
        available = spare((yield reports))
        tasks = [
            replace(self._task(state, client), kind="train", threat=threat, training=training) for client in available
        ]
        updates = yield tasks
        record["times"] = self.world.times(tasks, updates, available)
        model = fold(state.model, tasks, updates, record)
        failures = state.failures + 1 if model is None else 0
        state = replace(state, failures=failures, model=state.model if model is None else model)
        if self.world.evaluation_due(state.round, failures):
            state = self._observe(state, record, (yield self._evaluation_tasks(state)))
        return (self._restore_best(state) if self.finished(state) else state), record

    def _evaluation_tasks(self, state: JointState) -> Sequence[ClientTask]:
        settings = self.world.config.evaluate
        clients = self.world.sample(settings.clients, state.round, "evaluate")
        return [self.evaluation_task(state, client, self.world.image_threat(settings.steps)) for client in clients]

    def _observe(self, state: JointState, record: Record, answers: Sequence[ClientUpdate]) -> JointState:
        accuracy = personalised(answers)
        points = score(accuracy.clean, accuracy.adversarial, ROBUSTNESS_WEIGHT)
        candidate = Best(state.round, points, accuracy.clean, accuracy.adversarial, alpha=1.0)
        best = better(state.best, candidate)
        record |= {"clean": accuracy.clean, "adversarial": accuracy.adversarial, "samples": accuracy.samples}
        record |= {"score": points, "best_round": best.round}
        best_model = state.model if best is candidate else state.best_model
        return replace(state, best=best, last=candidate, best_model=best_model)

    def _restore_best(self, state: JointState) -> JointState:
        """Go back to the best round, the clients' own layers included."""
        assert state.best is not None  # the last round is always evaluated
        discarded = ((state.best.round, state.round),) if state.best.round < state.round else ()
        return replace(state, model=state.best_model, discarded=discarded)

    def _task(self, state: JointState, client: int) -> ClientTask:
        """Return a task on the whole model, which its own classifier ends."""
        return ClientTask(
            "evaluate",
            state.round,
            client,
            self.world.config.seed,
            last=len(self.world.chain),
            batch=self.world.evaluation_batch(len(self.world.chain)),
            timeline=self.timeline(state),
            parameters=state.model,
        )

    def evaluation_task(self, state: JointState, client: int, threat: ThreatModel | None) -> ClientTask:
        """Return the evaluation of the whole model on a client's held-out part."""
        return replace(self._task(state, client), threat=threat)
