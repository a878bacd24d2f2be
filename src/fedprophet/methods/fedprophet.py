"""FedProphet (Algorithm 2): a cascade of modules, each trained robustly by the fleet, then fixed."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from fedprophet.cascade.heads import build_head, head_name, head_parameters
from fedprophet.errors import TrainingError
from fedprophet.fleet.clock import training_times
from fedprophet.messages.answers import Measured, Trained
from fedprophet.messages.modules import digest
from fedprophet.messages.tasks import Evaluate, Measure, Refresh, Train
from fedprophet.messages.values import FrozenModule
from fedprophet.methods.base import Method, MethodState, ModelFields
from fedprophet.methods.refresh import renewed
from fedprophet.methods.registry import method
from fedprophet.methods.world import World, named
from fedprophet.randomness import global_rng
from fedprophet.server.assignment import AssignmentSettings, assign
from fedprophet.server.convergence import Best, StageRule, better
from fedprophet.server.coordinator import Conversation, Record, ask
from fedprophet.server.perturbation import (
    MeasureSettings,
    Perturbation,
    PerturbationSettings,
    accuracy_ratio,
    note_magnitude,
)
from fedprophet.server.rules.registry import Parameters
from fedprophet.threat import ThreatModel, feature_threat, with_steps

MEASURE_TRIES = 3
"""A run stops after this many rounds in a row in which nobody measured a module's features."""


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


@dataclass(frozen=True, kw_only=True)
class CascadeState(MethodState):
    """`stage` is the module m in training, from 0; it is the number of modules when all are fixed."""

    heads: Parameters
    best_heads: Parameters
    stage: int = 0
    stage_round: int = 0
    perturbation: Perturbation | None = None
    fixed: tuple[Fixed, ...] = ()

    @property
    def judged(self) -> "CascadeState":
        return replace(super().judged, heads=named(self.mean.parameters, self.heads)) if self.mean else self

    @property
    def reference(self) -> float:
        """C*/A* at the end of the stage before, or of the last one that was evaluated; 1 in the first."""
        known = [(f.clean, f.adversarial) for f in self.fixed if f.clean is not None and f.adversarial is not None]
        return accuracy_ratio(*known[-1]) if known else 1.0

    @property
    def alpha(self) -> float:
        """By how much the perturbation is scaled; 1 in the first stage, which attacks images."""
        return self.perturbation.alpha if self.perturbation else 1.0


@method(
    "fedprophet",
    "robust cascade of modules, each within the memory budget (the paper's method)",
    paper="FedProphet",
    row=8,
    cascade=True,
)
class FedProphet(Method[CascadeState]):
    """Train module after module, each under the attack that the frozen modules before it let through."""

    state = CascadeState

    def initial(self) -> CascadeState:
        model, heads, layers = self.world.initial_model(), initial_heads(self.world), self.world.starting_layers()
        return CascadeState(
            model=model, best_model=model, heads=heads, best_heads=heads, starting=layers, best_starting=layers
        )

    def fits(self, state: CascadeState) -> bool:
        """Whether a state's heads and its fixed modules are those of the modules here."""
        modules, shapes = self.world.modules, {name: head.shape for name, head in initial_heads(self.world).items()}
        return (
            {name: head.shape for name, head in state.heads.items()} == shapes
            and state.stage == len(state.fixed) <= len(modules)
            and all(
                digest(self._parameters(state, module.first, module.last)) == done.digest
                for module, done in zip(modules, state.fixed, strict=False)
            )
        )

    def poorest(self) -> Iterator[tuple[str, int]]:
        """Yield every module: each is trained by all clients at some time."""
        atoms = self.world.cost.atoms
        for module in self.world.modules:
            layers = ", ".join(layer for atom in atoms[module.first : module.last] for layer in atom.layers)
            yield f"module {module.index + 1} ({layers})", self.world.needs.memory(module.first, module.last)

    def or_else(self) -> str:
        return ""  # it is an atom, which cannot be cut any finer

    def trained(self, state: CascadeState) -> bool:
        """Whether every module is fixed."""
        return state.stage == len(self.world.modules)

    def with_layers(self, state: CascadeState, layers: Parameters) -> CascadeState:
        """Return the state with other norm layers, in its fixed modules too: these are others by that."""
        state = super().with_layers(state, layers)
        parts = [self._parameters(state, module.first, module.last) for module in self.world.modules]
        pairs = zip(state.fixed, parts, strict=True)
        return replace(state, fixed=tuple(replace(done, digest=self.world.frozen.add(part)) for done, part in pairs))

    def results(self, state: CascadeState) -> Mapping[str, Any]:
        """Return what each frozen module reached, for the closing table."""
        return {"stages": [vars(module) for module in state.fixed]}

    # One round: report, assign (Eq. 14, 15), train (Eq. 13), average (Eq. 16, 17), evaluate and adjust (Eq. 12); at the
    # end of a stage fix the module and measure (Eq. 11).

    def training_round(self, state: CascadeState) -> Conversation[tuple[CascadeState, Record]]:
        """Play one communication round of Algorithm 2."""
        state = replace(state, round=state.round + 1, stage_round=state.stage_round + 1)
        threat = self._training_threat(state)
        record: Record = {
            "round": state.round,
            "module": state.stage + 1,
            "stage_round": state.stage_round,
            "adversarial_training": threat is not None,
            "epsilon": (threat or self._threat(state)).radius,
            "alpha": state.perturbation.alpha if state.perturbation else None,
        }
        state = yield from self._train(state, record)
        if self._rule(state).evaluates(state.stage_round, state.failures):
            state = yield from self._evaluate(state, record)
        if self._overdue(state) >= 0:
            state = yield from self._fix_module(state, record)
        return state, record

    def _rule(self, state: CascadeState) -> StageRule:
        """Return how long the stage lasts and what counts in it."""
        return self.world.stage_rule(state.stage)

    def _overdue(self, state: CascadeState) -> int:
        """Return for how many rounds the stage has been over; below 0 it is not."""
        rule, perturbation = self._rule(state), state.perturbation
        since_best = state.round - state.best.round if state.best else None
        since_alpha = state.stage_round - rule.warmup - perturbation.changed if perturbation else None
        return rule.overdue(state.stage_round, since_best, since_alpha)

    def _train(self, state: CascadeState, record: Record) -> Conversation[CascadeState]:
        """Ask the cohort what it has available, assign modules, train them, and average what came back."""
        world = self.world
        available = yield from self.ask_resources(state, record)
        assigned = dict.fromkeys(available, state.stage)
        if world.config.of(AssignmentSettings).enabled:
            assigned = assign(world.needs, world.modules, state.stage, available)
        tasks = [self._train_task(state, client, last) for client, last in assigned.items()]
        record["assigned"] = {str(client): last + 1 for client, last in assigned.items()}
        updates = yield from self.ask_training(tasks, available, record)
        record["times"] = training_times(tasks, updates, available, lambda task: world.needs)
        usable = world.aggregator.usable(tasks, updates, record, self.expected_layers)
        if not usable:
            return replace(state, failures=state.failures + 1)
        state = replace(state, failures=0, starting=self.gathered(state, usable))
        if world.config.of(AssignmentSettings).heads == "passed":
            usable = [(task, self._with_passed_heads(state, task, update)) for task, update in usable]
        average = world.aggregator.join_updates({**state.model, **state.heads}, usable)
        mean = self.mean_after(state, average, self._rule(state).strength(state.stage_round))
        return replace(state, model=named(average, state.model), heads=named(average, state.heads), mean=mean)

    def _with_passed_heads(self, state: CascadeState, task: Train, update: Trained) -> Trained:
        """Return an update with the heads of the modules before the client's last one, as the client was given them."""
        passed = [m for m in self.world.modules[state.stage :] if m.last < task.last]
        names = [name for module in passed for name in head_parameters(module.index)]
        return replace(update, parameters={**named(state.heads, names), **update.parameters})

    def _evaluate(self, state: CascadeState, record: Record) -> Conversation[CascadeState]:
        """Let clients evaluate w*_1 ∘ … ∘ w_m; keep the best round, adjust the perturbation.

        A round that nobody evaluated has no accuracy: it cannot become the best, and does not move the perturbation.
        """
        accuracy = yield from self.ask_accuracy(state, record)
        rule = self._rule(state)
        if accuracy is None or not rule.counts(state.stage_round):
            return state
        points = rule.score(accuracy.clean, accuracy.adversarial, state.reference)
        candidate = Best(state.round, points, accuracy.clean, accuracy.adversarial, state.alpha)
        best = better(state.best, candidate)
        record |= {"score": points, "best_round": best.round}
        if best is candidate:
            kept = state.judged
            state = replace(
                state, best=best, best_model=kept.model, best_heads=kept.heads, best_starting=state.starting
            )
        if state.perturbation is not None:
            config = self.world.config
            settings, every = config.of(PerturbationSettings), config.evaluate.every
            since_warmup = state.stage_round - rule.warmup
            adjusted = state.perturbation.observe(accuracy.clean, accuracy.adversarial, settings, every, since_warmup)
            state = replace(state, perturbation=adjusted)
        return state

    def _fix_module(self, state: CascadeState, record: Record) -> Conversation[CascadeState]:
        """Restore the stage's best round, fix its module, and measure how far an attack moves its output (Eq. 11).

        Where nobody evaluated the stage, its last round is kept. Where nobody measures, there is no radius to train
        the next module with: the stage goes on for another round, and the module is fixed again at its end.
        """
        best, module = state.best, self.world.modules[state.stage]
        restored = yield from self._refreshed(self._restored(state.judged), record)
        fixed = Fixed(
            round=best.round if best else state.round,
            clean=best.clean if best else None,
            adversarial=best.adversarial if best else None,
            alpha=restored.alpha,
            radius=self._threat(restored).radius,
            digest=self.world.frozen.add(self._parameters(restored, module.first, module.last)),
        )
        restored = replace(restored, fixed=(*state.fixed, fixed))
        noted = {"module": state.stage + 1, **vars(fixed)}
        perturbation = None
        if state.stage + 1 < len(self.world.modules):
            magnitude = yield from self._magnitude(restored, record)
            if magnitude is None:
                return self._postponed(state, record)
            noted["magnitude"] = magnitude
            start = self.world.config.of(PerturbationSettings).starting(restored.perturbation)
            perturbation = Perturbation(magnitude, restored.reference, start)
        record["fixed"] = noted
        return replace(restored, stage=state.stage + 1, stage_round=0, perturbation=perturbation, best=None, mean=None)

    def _refreshed(self, state: CascadeState, record: Record) -> Conversation[CascadeState]:
        """Let clients measure the norm statistics of module m anew before it is fixed, where that is asked for."""
        norm = self.world.config.norm
        if norm.refresh == "none" or norm.refresh_after != "stage":
            return state
        fields = self._model_fields(state, 0, state.stage, self._exit(state.stage))
        task = Refresh(**fields, threat=self.world.refresh_threat, calibration=self.world.calibration(0))
        fresh = yield from renewed(self.world, task, record)
        return replace(state, model={**state.model, **fresh})

    def _magnitude(self, state: CascadeState, record: Record) -> Conversation[float | None]:
        """Let clients measure E[max ‖Δz_m‖] under the attack that module m was trained with; None if nobody answers."""
        world, settings = self.world, self.world.config.of(MeasureSettings)
        threat = with_steps(self._threat(state), settings.steps)
        clients = world.clients.sample(settings.clients, state.round, "measure")
        drawn = world.evaluation_draws(world.modules[state.stage].last)
        tasks = [
            Measure(**self._model_fields(state, client, state.stage, head=None), threat=threat, drawn=drawn)
            for client in clients
        ]
        answers = yield from ask(tasks, Measured)
        magnitude = note_magnitude(answers, threat, world.aggregator, record)
        if magnitude is not None or len(answers) < len(tasks):
            return magnitude
        raise TrainingError(
            f"module {state.stage + 1} has diverged: no client could measure how far an attack moves its features. "
            "A new run with a lower train.learning_rate usually helps"
        )

    def _restored(self, state: CascadeState) -> CascadeState:
        """Go back to the best round of the stage, the clients' own layers included; without one, stay at the last."""
        best = state.best
        if best is not None and state.perturbation is not None:
            state = replace(state, perturbation=replace(state.perturbation, alpha=best.alpha))
        if best is None or best.round == state.round:
            return state
        discarded = (*state.discarded, (best.round, state.round))
        return replace(
            state, model=state.best_model, heads=state.best_heads, starting=state.best_starting, discarded=discarded
        )

    def _postponed(self, state: CascadeState, record: Record) -> CascadeState:
        """Let the stage go on, unless nobody has measured for several rounds: then clients cannot be reached."""
        module, overdue = state.stage + 1, 1 + self._overdue(state)
        if overdue >= MEASURE_TRIES:
            raise TrainingError(
                f"nobody has measured how far an attack moves the features of module {module}, in {overdue} rounds in "
                "a row. Check that clients are connected and that flower.deadline gives them enough time; then resume"
            )
        record["postponed"] = {"module": module, "reason": "nobody measured", "tries": overdue}
        for noted in ("refreshed", "not_refreshed"):  # of statistics that are not used: the module goes on training
            record.pop(noted, None)
        return state

    # Tasks.

    def _threat(self, state: CascadeState) -> ThreatModel:
        """The attack on the input of module m: on images in the first stage, on features of radius ε_{m−1} after it."""
        attack = self.world.config.attack
        if state.perturbation is None:
            return self.world.image_threat(attack.steps)
        bounds = self.world.chain.atoms[self.world.modules[state.stage].first - 1].bounds
        return feature_threat(state.perturbation.radius, attack.feature_steps, bounds)

    def _training_threat(self, state: CascadeState) -> ThreatModel | None:
        """The attack that a round trains under: none in the warm-up, and on images a growing one after it."""
        if state.perturbation is None:
            return self.world.training_threat(state.stage_round)
        return self._threat(state) if self._rule(state).adversarial(state.stage_round) else None

    def _model_fields(self, state: CascadeState, client: int, last: int, head: int | None) -> ModelFields:
        """Return what a task on modules m … `last` and a head is made with, behind the frozen modules."""
        module, end = self.world.modules[state.stage], self.world.modules[last].last
        return {
            **self.task_fields(state, client),
            "first": module.first,
            "last": end,
            "head": head,
            "frozen": self._frozen(state),
            "batch": self.world.evaluation_batch(module.last),
            "parameters": self._parameters(state, module.first, end, head),
            "starting": named(state.starting, self.world.chain.local(0, end) if state.starting else ()),
        }

    def _frozen(self, state: CascadeState) -> tuple[FrozenModule, ...]:
        """Return the frozen modules before module m; after a resume they are added to the store again."""
        frozen = []
        for module, fixed in zip(self.world.modules[: state.stage], state.fixed, strict=False):
            if fixed.digest not in self.world.frozen:
                self.world.frozen.add(self._parameters(state, module.first, module.last))
            frozen.append(FrozenModule(module.first, module.last, fixed.digest))
        return tuple(frozen)

    def _train_task(self, state: CascadeState, client: int, last: int) -> Train:
        """Return the joint training of modules m … M_k under the last one's exit (Eq. 13)."""
        return Train(
            **self._model_fields(state, client, last, self._exit(last)),
            threat=self._training_threat(state),
            training=self.world.local_training(state.stage_round),
            calibration=self.world.calibration(client),
            wants_local=self.world.gathers_layers,
        )

    def evaluation_task(self, state: CascadeState, client: int, threat: ThreatModel | None) -> Evaluate:
        """Return the evaluation of the cascade so far: up to module m, through its exit, attacked at the image."""
        stage = min(state.stage, len(self.world.modules) - 1)
        fields = self._model_fields(replace(state, stage=stage), client, stage, self._exit(stage))
        drawn = self.world.evaluation_draws(self.world.modules[stage].last)
        return Evaluate(**fields, threat=threat, calibration=self.world.calibration(client), drawn=drawn)

    def _exit(self, last: int) -> int | None:
        """Return the head behind a module; the last one has the backbone's own classifier."""
        return None if last == len(self.world.modules) - 1 else last

    def _parameters(self, state: CascadeState, first: int, last: int, head: int | None = None) -> Parameters:
        """Return the shared parameters of atoms `first` … `last` − 1 and of a head."""
        own = named(state.model, self.world.chain.shared(first, last))
        return {**own, **named(state.heads, () if head is None else head_parameters(head))}


def initial_heads(world: World) -> Parameters:
    """Return fresh auxiliary heads for all modules but the last."""
    heads: dict[str, Tensor] = {}
    for module in world.modules[:-1]:
        with global_rng(world.config.seed, "heads", module.index):
            head = build_head(world.cost.atoms[module.last - 1].output[1:], world.cost.classes)
        heads |= {f"{head_name(module.index)}.{name}": p.detach() for name, p in head.named_parameters()}
    return heads
