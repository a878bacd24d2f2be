"""FedProphet (Algorithm 2): a cascade of modules, each trained robustly by the fleet, then fixed."""

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedprophet.errors import TrainingError
from fedprophet.messages.task import ClientTask, ClientUpdate, FrozenModule, TaskKind, Timeline
from fedprophet.methods.base import CLIENT_NORM_LAYERS, NORM_LAYERS, World, drop, fold, judged, named, spare
from fedprophet.server.aggregate import Parameters, mean_metric
from fedprophet.server.assignment import assign
from fedprophet.server.convergence import Best, better, score
from fedprophet.server.coordinator import Conversation, Record
from fedprophet.server.perturbation import AdjustmentRule, Perturbation, accuracy_ratio
from fedprophet.server.rejections import weight_fault
from fedprophet.threat import ThreatModel, feature_threat, with_steps

MEASURE_TRIES = 3
"""So many rounds in a row in which nobody measures a module's features stop a run."""

Ask = Generator[Sequence[ClientTask], Sequence[ClientUpdate], Any]


@dataclass(frozen=True)
class Fixed:
    """A module that is done: its best round, the accuracies there, the attack it was trained under, and its hash.

    Where nobody evaluated it, it has no accuracies, and its round is the stage's last.
    """

    round: int
    clean: float | None
    adversarial: float | None
    alpha: float
    radius: float
    digest: str


@dataclass(frozen=True)
class CascadeState:
    """Where a run is. `stage` is the module m in training, from 0; it is the number of modules when all are fixed."""

    model: Parameters
    heads: Parameters
    best_model: Parameters
    best_heads: Parameters
    round: int = 0
    failures: int = 0
    stage: int = 0
    stage_round: int = 0
    perturbation: Perturbation | None = None
    best: Best | None = None
    fixed: tuple[Fixed, ...] = ()
    discarded: tuple[tuple[int, int], ...] = ()

    @property
    def reference(self) -> float:
        """C*/A* at the end of the stage before, or of the last one that was evaluated; 1 in the first."""
        known = [(f.clean, f.adversarial) for f in self.fixed if f.clean is not None and f.adversarial is not None]
        return accuracy_ratio(*known[-1]) if known else 1.0


class FedProphet:
    """Train module after module; between rounds nothing is kept here, all of it is in the state."""

    state = CascadeState
    client_norm_layers = CLIENT_NORM_LAYERS

    def __init__(self, world: World) -> None:
        self.world = world
        self.norm_layers = world.norm_layers(NORM_LAYERS)
        settings = world.config.perturbation
        # The rule counts evaluations, the setting rounds.
        every = math.ceil(settings.every / world.config.evaluate.every)
        self.rule = AdjustmentRule(
            settings.enabled, settings.change, settings.threshold, every, settings.window, settings.floor
        )

    def initial(self) -> CascadeState:
        """Return the state before the first round."""
        model, heads = self.world.initial_model(), self.world.initial_heads()
        return CascadeState(model, heads, model, heads)

    def finished(self, state: CascadeState) -> bool:
        """Whether every module is fixed."""
        return state.stage == len(self.world.modules)

    def exported(self, state: CascadeState, local: Parameters) -> Parameters:
        """Return the whole model, with averaged norm layers."""
        return {**local, **state.model}

    def timeline(self, state: CascadeState) -> Timeline:
        """Return which versions of the clients' own layers count."""
        return self.world.timeline(state.round, state.best, state.discarded)

    def results(self, state: CascadeState) -> Mapping[str, Any]:
        """Return what each fixed module reached, for the closing table."""
        return {"stages": [vars(module) for module in state.fixed]}

    # One round: report, assign, train, average, evaluate, and at the end of a stage measure.

    def round(self, state: CascadeState) -> Conversation[CascadeState]:
        """Play one communication round of Algorithm 2."""
        state = replace(state, round=state.round + 1, stage_round=state.stage_round + 1)
        record: Record = {
            "round": state.round,
            "module": state.stage + 1,
            "stage_round": state.stage_round,
            "adversarial_training": self.world.stage_rule.adversarial(state.stage_round),
            "epsilon": self._threat(state).radius,
            "alpha": state.perturbation.alpha if state.perturbation else None,
        }
        state = yield from self._train(state, record)
        if self.world.evaluation_due(state.stage_round, state.failures):
            state = yield from self._evaluate(state, record)
        since_best = state.round - state.best.round if state.best else None
        if self.world.stage_rule.ends(state.stage_round, since_best):
            state = yield from self._fix_module(state, record)
        return state, record

    def _train(self, state: CascadeState, record: Record) -> Ask:
        """Ask the cohort what it can spare, assign modules, train them, and average what came back."""
        world = self.world
        reports = yield [self._task("report", state, client) for client in world.cohort(state.round)]
        available = spare(reports, record)
        assigned = dict.fromkeys(available, state.stage)
        if world.config.assignment.enabled:
            assigned = assign(world.cost, world.modules, state.stage, available)
        tasks = [self._train_task(state, client, last) for client, last in assigned.items()]
        record["assigned"] = {str(client): last + 1 for client, last in assigned.items()}
        updates = yield tasks
        record["times"] = world.times(tasks, updates, available)
        average = fold(world, {**state.model, **state.heads}, tasks, updates, record)
        if average is None:
            return replace(state, failures=state.failures + 1)
        return replace(state, failures=0, model=named(average, state.model), heads=named(average, state.heads))

    def _evaluate(self, state: CascadeState, record: Record) -> Ask:
        """Let clients evaluate w*_1 ∘ … ∘ w_m; keep the best round, adjust the perturbation.

        A round that nobody has evaluated has no accuracy: it cannot become the best, and moves nothing.
        """
        accuracy = yield from self._accuracy(state, record)
        if accuracy is None or not self.world.stage_rule.counts(state.stage_round):
            return state
        alpha = state.perturbation.alpha if state.perturbation else 1.0
        points = score(accuracy.clean, accuracy.adversarial, state.reference)
        candidate = Best(state.round, points, accuracy.clean, accuracy.adversarial, alpha)
        best = better(state.best, candidate)
        record |= {"score": points, "best_round": best.round}
        if best is candidate:
            state = replace(state, best=best, best_model=state.model, best_heads=state.heads)
        if state.perturbation is not None:
            adjusted = state.perturbation.observe(accuracy.clean, accuracy.adversarial, self.rule)
            state = replace(state, perturbation=adjusted)
        return state

    def _accuracy(self, state: CascadeState, record: Record) -> Ask:
        settings = self.world.config.evaluate
        clients = self.world.sample(settings.clients, state.round, "evaluate")
        threat = self.world.image_threat(settings.steps)
        tasks = [self.evaluation_task(state, client, threat) for client in clients]
        return judged(tasks, (yield tasks), record)

    def _fix_module(self, state: CascadeState, record: Record) -> Ask:
        """Restore the stage's best round, fix its module, and measure how far an attack moves its output (Eq. 11).

        Where nobody evaluated the stage, its last round is kept. Where nobody measures, there is no radius to train
        the next module with: the stage goes on for another round, at whose end the module is fixed anew.
        """
        stage, best = state.stage, state.best
        alpha = state.perturbation.alpha if state.perturbation else 1.0
        kept = Best(state.round, math.nan, math.nan, math.nan, alpha) if best is None else best
        restored = self._restored(state, kept)
        module, radius = self.world.modules[stage], self._threat(restored).radius
        digest = self.world.frozen.add(named(restored.model, self.world.chain.shared(module.first, module.last)))
        clean, adversarial = (best.clean, best.adversarial) if best else (None, None)
        fixed = Fixed(kept.round, clean, adversarial, kept.alpha, radius, digest)
        restored = replace(restored, fixed=(*state.fixed, fixed))
        perturbation, magnitude = None, dict[str, float]()
        if stage + 1 < len(self.world.modules):
            measured = yield from self._magnitude(restored, record)
            if measured is None:
                return self._postponed(state, record)
            magnitude = {"magnitude": measured}
            perturbation = Perturbation(measured, restored.reference, self.world.config.perturbation.start)
        record["fixed"] = {"module": stage + 1, **vars(fixed), **magnitude}
        return replace(restored, stage=stage + 1, stage_round=0, perturbation=perturbation, best=None)

    def _restored(self, state: CascadeState, best: Best) -> CascadeState:
        """Go back to the best round of the stage, the clients' own layers included."""
        if state.perturbation is not None:
            state = replace(state, perturbation=replace(state.perturbation, alpha=best.alpha))
        if best.round == state.round:
            return state
        discarded = (*state.discarded, (best.round, state.round))
        return replace(state, model=state.best_model, heads=state.best_heads, discarded=discarded)

    def _postponed(self, state: CascadeState, record: Record) -> CascadeState:
        """Let the stage go on, unless nobody has measured for rounds: then the clients are out of reach."""
        rule, module = self.world.stage_rule, state.stage + 1
        since_best = state.round - state.best.round if state.best else 0
        overdue = 1 + max(state.stage_round - rule.rounds, since_best - rule.patience)
        if overdue >= MEASURE_TRIES:
            raise TrainingError(
                f"nobody has measured how far an attack moves the features of module {module}, in {overdue} rounds in "
                "a row. See that clients are connected and that flower.deadline leaves them the time; then resume"
            )
        record["postponed"] = {"module": module, "reason": "nobody measured", "tries": overdue}
        return state

    def _magnitude(self, state: CascadeState, record: Record) -> Ask:
        """E[max ‖Δz_m‖] over the clients' training samples, under the attack that module m was trained with.

        It is that of the clients that answered; None where none of them did.
        """
        settings, module = self.world.config.measure, self.world.modules[state.stage]
        threat = with_steps(self._threat(state), settings.steps)
        clients = self.world.sample(settings.clients, state.round, "measure")
        parameters = named(state.model, self.world.chain.shared(module.first, module.last))
        tasks = [
            replace(self._task("measure", state, client), last=module.last, threat=threat, parameters=parameters)
            for client in clients
        ]
        answers = yield tasks
        # A client of weight 0 has nothing to measure on.
        reasons = {answer.client: _measure_fault(answer) for answer in answers if answer.weight != 0}
        lost = {client: reason for client, reason in reasons.items() if reason is not None}
        if lost:
            drop(record, lost)
        sound = [answer for answer in answers if answer.client in reasons and answer.client not in lost]
        if sound:
            return mean_metric(sound, "magnitude")
        if len(answers) < len(tasks):
            return None
        raise TrainingError(
            f"module {state.stage + 1} has diverged: no client could measure how far an attack moves its features. "
            "A new run with a lower train.learning_rate usually helps"
        )

    # Tasks.

    def _threat(self, state: CascadeState) -> ThreatModel:
        """The attack on the input of module m: on images in the first stage, on features of radius ε_{m−1} after it."""
        attack = self.world.config.attack
        if state.perturbation is None:
            return self.world.image_threat(attack.steps)
        bounds = self.world.chain.atoms[self.world.modules[state.stage].first - 1].bounds
        return feature_threat(state.perturbation.radius, attack.feature_steps, bounds)

    def _task(self, kind: TaskKind, state: CascadeState, client: int) -> ClientTask:
        """Return a task that begins at module m, behind the modules that are fixed."""
        modules = self.world.modules
        return ClientTask(
            kind,
            state.round,
            client,
            self.world.config.seed,
            first=modules[state.stage].first,
            frozen=self._frozen(state),
            batch=self.world.evaluation_batch(modules[state.stage].last),
            timeline=self.timeline(state),
        )

    def _frozen(self, state: CascadeState) -> tuple[FrozenModule, ...]:
        """Return the fixed modules before module m; after a resume they are put at hand again."""
        frozen = []
        for module, fixed in zip(self.world.modules[: state.stage], state.fixed, strict=False):
            if fixed.digest not in self.world.frozen:
                self.world.frozen.add(named(state.model, self.world.chain.shared(module.first, module.last)))
            frozen.append(FrozenModule(module.first, module.last, fixed.digest))
        return tuple(frozen)

    def _train_task(self, state: CascadeState, client: int, last: int) -> ClientTask:
        """Return the joint training of modules m … M_k under the last one's exit (Eq. 13)."""
        world, end = self.world, self.world.modules[last].last
        adversarial = world.stage_rule.adversarial(state.stage_round)
        task = self._task("train", state, client)
        return replace(
            task,
            last=end,
            head=self._exit(last),
            parameters=self._parameters(state, task.first, end, self._exit(last)),
            threat=self._threat(state) if adversarial else None,
            training=world.local_training(state.stage_round),
        )

    def evaluation_task(self, state: CascadeState, client: int, threat: ThreatModel | None) -> ClientTask:
        """Return the evaluation of the cascade so far: up to module m, through its exit, attacked at the image."""
        stage = min(state.stage, len(self.world.modules) - 1)
        end, head = self.world.modules[stage].last, self._exit(stage)
        task = self._task("evaluate", replace(state, stage=stage), client)
        parameters = self._parameters(state, task.first, end, head)
        return replace(task, last=end, head=head, threat=threat, parameters=parameters)

    def _exit(self, last: int) -> int | None:
        return None if last == len(self.world.modules) - 1 else last

    def _parameters(self, state: CascadeState, first: int, last: int, head: int | None) -> Parameters:
        own = named(state.model, self.world.chain.shared(first, last))
        exit_names = [] if head is None else [f"heads.{head}.weight", f"heads.{head}.bias"]
        return {**own, **named(state.heads, exit_names)}


def _measure_fault(answer: ClientUpdate) -> str | None:
    """Return why a measured perturbation cannot be counted, or None where it can."""
    magnitude = answer.metrics.get("magnitude", math.nan)
    return weight_fault(answer.weight) or (
        None if 0 <= magnitude < math.inf else f"its measured perturbation is {magnitude}"
    )
