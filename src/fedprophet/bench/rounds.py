"""Rounds of jFAT and of every FedProphet stage, timed on each engine, training and evaluation separately.

The modules before a stage have random weights: nothing is trained to get there. Every engine plays the same rounds,
with the same cohorts and assignments. All work is done once before it is timed, so that compiling, capturing and the
features of frozen modules, which a run pays for once per stage, are not counted.
"""

import gc
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fedprophet import machine
from fedprophet.bench.count import task_flops
from fedprophet.bench.synthetic import sizes_of, synthetic
from fedprophet.cascade.cost import ChainCost
from fedprophet.config.config import Config
from fedprophet.config.load import load_config
from fedprophet.data.dataset import Dataset
from fedprophet.errors import ConfigError, OutOfMemoryError, memory_for
from fedprophet.messages.answers import Answer, Evaluated, Trained
from fedprophet.messages.tasks import Evaluate, Task, Train
from fedprophet.methods.fedprophet import Fixed
from fedprophet.methods.world import named
from fedprophet.runs.session import Session, assemble
from fedprophet.server.coordinator import Engine, play_round
from fedprophet.server.perturbation import Perturbation, PerturbationSettings
from fedprophet.threads import torch_threads

PLAIN, WORKERS, CUDA = "plain", "workers", "cuda"
PLAIN_ONE_THREAD = "plain-1"
"""The plain loop with one thread: if layers are narrow, more threads can be slower."""
PLAIN_SIDES = (PLAIN, PLAIN_ONE_THREAD)
TRAINING, WARMUP, EVALUATION = "training", "warm-up training", "evaluation"
PARTS = (TRAINING, WARMUP, EVALUATION)
"""What is timed: training under attack, training without attack (the first rounds of a stage), and evaluation."""
MEASURED_METHODS = ("jfat", "fedprophet")

Watch = Callable[[str], None]
"""Called with what is being measured."""


@dataclass(frozen=True)
class RoundsSettings:
    """What is measured: `stages` count from 0 (None: all), no round starts after `limit` seconds of a case."""

    preset: str
    overrides: tuple[str, ...] = ()
    methods: tuple[str, ...] = MEASURED_METHODS
    stages: tuple[int, ...] | None = None
    repeat: int = 3
    limit: float = 20.0
    engines: tuple[str, ...] = (PLAIN,)
    real_data: bool = False

    def config(self, method: str) -> Config:
        """Return the configuration that a run would have."""
        return load_config(self.preset, [*self.overrides, f"method={method}"])

    def measured(self, method: str, engine: str) -> Config:
        """Return the configuration of a session in which every round is attacked and evaluated and no stage ends."""
        # One worker per core, whatever number of threads torch chooses.
        threads = {WORKERS: machine.cores(), PLAIN_ONE_THREAD: 1}
        cores = (f"threads={threads[engine]}",) if engine in threads else ()
        steady = ("train.warmup=0", "convergence.gate=0", "evaluate.every=1", f"rounds={self.repeat + 1}")
        name = PLAIN if engine in PLAIN_SIDES else engine
        return load_config(self.preset, [*cores, *self.overrides, *steady, f"method={method}", f"engine={name}"])


@dataclass(frozen=True)
class Case:
    """A method, and for a cascade the stage, from 0."""

    method: str
    stage: int | None = None

    @property
    def number(self) -> int | None:
        """The stage, counted from 1."""
        return None if self.stage is None else self.stage + 1

    def __str__(self) -> str:
        return self.method if self.stage is None else f"{self.method} stage {self.number}"


@dataclass(frozen=True)
class Timing:
    """One part of one round. `first`: the seconds of the untimed work before, all of it or (plain) some."""

    round: int
    tasks: int
    seconds: float
    flops: float
    peak_bytes: int
    first: float


@dataclass
class CaseResult:
    """A case on an engine: the timings of each part, and the server's own seconds in each round.

    `stages` is the number of stages of the method.
    """

    case: Case
    engine: str
    stages: int = 0
    parts: dict[str, list[Timing]] = field(default_factory=dict)
    server: list[float] = field(default_factory=list)
    assigned: list[Mapping[str, int]] = field(default_factory=list)
    failure: str | None = None


def fast_engine() -> str:
    return CUDA if machine.has_gpu() else WORKERS


def plain_sides(overrides: Sequence[str]) -> tuple[str, ...]:
    """Return the plain loops to beat: with torch's threads and, on several cores, with one thread."""
    chosen = any(text.partition("=")[0].strip() == "threads" for text in overrides)
    return (PLAIN,) if chosen or machine.has_gpu() or torch.get_num_threads() == 1 else PLAIN_SIDES


def dataset_of(settings: RoundsSettings) -> Dataset | None:
    """Return random images of the preset's shape; None if the preset's own data is used."""
    if settings.real_data:
        return None
    config = settings.config(settings.methods[0])
    return synthetic(sizes_of(config.data), config.seed)


def cases_of(settings: RoundsSettings, dataset: Dataset | None) -> tuple[Case, ...]:
    cases: list[Case] = []
    for method in settings.methods:
        if method != "fedprophet":
            cases.append(Case(method))
            continue
        modules = len(assemble(settings.measured(method, PLAIN), dataset=dataset).world.modules)
        wanted = settings.stages if settings.stages is not None else tuple(range(modules))
        outside = [stage + 1 for stage in wanted if not 0 <= stage < modules]
        if outside:
            raise ConfigError(f"--stages: there is no stage {outside[0]}. {settings.preset} has stages 1 to {modules}")
        cases += [Case(method, stage) for stage in wanted]
    return tuple(cases)


def measure(
    settings: RoundsSettings,
    cases: Sequence[Case],
    dataset: Dataset | None,
    watch: Watch,
    done: Callable[[Sequence[CaseResult]], None] = lambda found: None,
) -> list[CaseResult]:
    """Measure every case on every engine; `done` gets all results so far after each of them.

    Ctrl-C ends the measurement; the results so far are returned.
    """
    found: list[CaseResult] = []
    try:
        for case, engine in itertools.product(cases, settings.engines):
            watch(f"{case}, {engine}")
            with torch_threads():  # an engine may change them
                found.append(_measure_case(settings, case, engine, dataset, watch))
            gc.collect()  # the memory of this case must not count for the next one
            if machine.has_gpu():
                torch.cuda.empty_cache()
            done(found)
    except KeyboardInterrupt:
        if not found:
            raise
    return found


def _measure_case(
    settings: RoundsSettings, case: Case, engine: str, dataset: Dataset | None, watch: Watch
) -> CaseResult:
    measured = CaseResult(case, engine)
    try:
        with (
            memory_for("its rounds were played", "Measure a smaller model or smaller batches"),
            closing(assemble(settings.measured(case.method, engine), dataset=dataset)) as session,
        ):
            _play(session, settings, measured, watch)
    except OutOfMemoryError as error:
        measured.failure = str(error)
    return measured


def _play(session: Session, settings: RoundsSettings, measured: CaseResult, watch: Watch) -> None:
    """Play the rounds, or as many as the limit allows."""
    measured.stages = len(session.world.modules)
    if measured.engine in PLAIN_SIDES and machine.has_gpu():
        # The plain loop runs on the device of the model.
        for network in (session.world.chain.model, session.normalize):
            network.to("cuda")
    state = start_of(session, measured.case)
    end = machine.now() + settings.limit
    for number in range(settings.repeat):
        watch(f"{measured.case}, {measured.engine}, round {number + 1} of {settings.repeat}")
        stopwatch = Stopwatch(session.engine, session.world.cost, short=measured.engine in PLAIN_SIDES)
        began = machine.now()
        # Every round starts from the same state: otherwise a stage might end, and weights could drift.
        _, record = play_round(session.method.round(replace(state, round=number)), stopwatch)
        measured.server.append(machine.now() - began - stopwatch.spent)
        for part, timing in stopwatch.timings.items():
            measured.parts.setdefault(part, []).append(timing)
        if "assigned" in record:
            measured.assigned.append(record["assigned"])
        if machine.now() > end:
            break


def start_of(session: Session, case: Case) -> Any:
    """Return a method's first state; for a cascade, the case's stage, with all modules before it fixed as they are."""
    state, world = session.method.initial(), session.world
    if not case.stage:
        return state
    shared = (named(state.model, world.chain.shared(m.first, m.last)) for m in world.modules[: case.stage])
    fixed = tuple(Fixed(0, 1.0, 1.0, 1.0, 1.0, world.frozen.add(tensors)) for tensors in shared)
    alpha = world.config.of(PerturbationSettings).start
    perturbation = Perturbation(magnitude=1.0, reference=1.0, alpha=alpha)
    return replace(state, stage=case.stage, fixed=fixed, perturbation=perturbation)


class Stopwatch:
    """An engine that does all work twice and times the second time.

    `short`: the first time is one local iteration, or one client's evaluation, which is enough to warm up a loop over
    clients. `spent` is the time of all work.
    """

    def __init__(self, engine: Engine, cost: ChainCost, *, short: bool) -> None:
        self._engine = engine
        self._cost = cost
        self._short = short
        self.timings: dict[str, Timing] = {}
        self.spent = 0.0

    def map(self, tasks: Iterable[Task]) -> Iterator[Answer]:
        """Carry tasks out; those that train or evaluate are timed."""
        asked = list(tasks)
        timed = [task for task in asked if isinstance(task, Train | Evaluate)]
        if not timed:
            return self._engine.map(asked)
        began = machine.now()
        training = timed[0].kind == "train"
        if training:
            self._time(WARMUP, [replace(task, threat=None) for task in timed])
        answers = self._time(TRAINING if training else EVALUATION, timed)
        self.spent += machine.now() - began
        return iter(answers)

    def _time(self, part: str, tasks: list[Train | Evaluate]) -> list[Answer]:
        first = machine.now()
        list(self._engine.map(_cut(tasks) if self._short else tasks))
        # The first time may have started workers.
        workers: Sequence[int] = getattr(self._engine, "processes", ())
        machine.forget_peak(workers)
        began = machine.now()
        answers = list(self._engine.map(tasks))
        seconds = machine.now() - began
        done = {(a.client, a.number): a.samples for a in answers if isinstance(a, Trained | Evaluated)}
        flops = sum(task_flops(self._cost, task, done[task.client, task.number]) for task in tasks)
        peak = machine.peak_bytes(workers)
        self.timings[part] = Timing(tasks[0].round, len(tasks), seconds, flops, peak, began - first)
        return answers


def _cut(tasks: list[Train | Evaluate]) -> list[Train | Evaluate]:
    """Return the least work that loads everything that the tasks need."""
    if isinstance(tasks[0], Evaluate):
        return tasks[:1]
    return [replace(t, training=replace(t.training, iterations=1)) for t in tasks if isinstance(t, Train)]
