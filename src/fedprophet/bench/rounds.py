"""Rounds of jFAT and of every FedProphet stage, timed on each engine: training and evaluation apart.

Nothing is trained to get there: a stage begins with modules of random weights fixed before it. Every engine plays the
same rounds, with the same cohorts and assignments. Each piece of work is done once untimed before, so that compiling,
capturing and the features of the frozen modules are not counted; a run has them once a stage.
"""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fedprophet import machine
from fedprophet.bench.count import task_flops
from fedprophet.bench.synthetic import sizes_of, synthetic
from fedprophet.cascade.cost import ChainCost
from fedprophet.config.config import Config, load_config
from fedprophet.data.dataset import Dataset
from fedprophet.engines import ENGINES
from fedprophet.errors import ConfigError, unknown
from fedprophet.messages.task import ClientTask, ClientUpdate
from fedprophet.methods.base import named
from fedprophet.methods.fedprophet import CascadeState, FedProphet, Fixed
from fedprophet.runs.session import Session, assemble
from fedprophet.server.coordinator import Engine, hold
from fedprophet.server.perturbation import Perturbation

PLAIN, WORKERS, CUDA = "plain", "workers", "cuda"
ONE_THREAD = "plain-1"
"""The plain loop with one thread: where layers are narrow, more threads can take longer."""
PLAIN_SIDES = (PLAIN, ONE_THREAD)
TRAINING, WARMUP, EVALUATION = "training", "warm-up training", "evaluation"
PARTS = (TRAINING, WARMUP, EVALUATION)
"""What is timed: training under attack, the same without an attack (the first rounds of a stage), and evaluation."""
METHODS = ("jfat", "fedprophet")

Watch = Callable[[str], None]
"""Is told what is being measured."""


@dataclass(frozen=True)
class Settings:
    """What is measured: `stages` are counted from 0 (None: all), `limit` is in seconds, `engines` in their order."""

    preset: str
    overrides: tuple[str, ...] = ()
    methods: tuple[str, ...] = METHODS
    stages: tuple[int, ...] | None = None
    repeat: int = 3
    limit: float = 20.0
    engines: tuple[str, ...] = (PLAIN,)
    real_data: bool = False

    def config(self, method: str) -> Config:
        """Return the configuration that a run would have."""
        return load_config(self.preset, [*self.overrides, f"method={method}"])

    def measured(self, method: str, engine: str) -> Config:
        """Return the configuration of a session whose every round is attacked and evaluated, and ends no stage."""
        # A worker for each core, whatever torch takes as its own number of threads.
        threads = {WORKERS: machine.cores(), ONE_THREAD: 1}
        cores = (f"threads={threads[engine]}",) if engine in threads else ()
        steady = ("train.warmup=0", "convergence.gate=0", "evaluate.every=1", f"rounds={self.repeat + 1}")
        name = PLAIN if engine in PLAIN_SIDES else engine
        return load_config(self.preset, [*cores, *self.overrides, *steady, f"method={method}", f"engine={name}"])


@dataclass(frozen=True)
class Case:
    """A method, and for a cascade the stage, from 0."""

    method: str
    stage: int | None = None

    def __str__(self) -> str:
        return self.method if self.stage is None else f"{self.method} stage {self.stage + 1}"


@dataclass(frozen=True)
class Sample:
    """One piece of work of one round; `first` are the seconds of doing it before, all of it or (plain) a part."""

    round: int
    tasks: int
    seconds: float
    flops: float
    peak_bytes: int
    first: float


@dataclass
class Measured:
    """A case on an engine: the samples of each part, and the seconds of each round that the server itself took.

    `stages` is how many the method has.
    """

    case: Case
    engine: str
    stages: int = 0
    parts: dict[str, list[Sample]] = field(default_factory=dict)
    server: list[float] = field(default_factory=list)
    assigned: list[Mapping[str, int]] = field(default_factory=list)
    failure: str | None = None


def fast_engine() -> str | None:
    """Return the fast engine of this machine; None where there is none."""
    name = CUDA if machine.has_gpu() else WORKERS
    return name if name in ENGINES else None


def plain_sides(overrides: Sequence[str]) -> tuple[str, ...]:
    """Return the plain loops that a fast engine has to beat: with torch's threads and, on several cores, with one."""
    chosen = any(text.partition("=")[0].strip() == "threads" for text in overrides)
    return (PLAIN,) if chosen or machine.has_gpu() or torch.get_num_threads() == 1 else PLAIN_SIDES


def check_engine(name: str) -> str:
    """Return the name of an engine; ConfigError where there is none of that name."""
    if name not in ENGINES:
        raise ConfigError(f"--engine: {unknown('engine', name, ENGINES)}")
    return name


def dataset_of(settings: Settings) -> Dataset | None:
    """Return random images of the preset's shape; None where the preset's own data is to be used."""
    if settings.real_data:
        return None
    config = settings.config(settings.methods[0])
    return synthetic(sizes_of(config.data), config.seed)


def cases_of(settings: Settings, dataset: Dataset | None) -> tuple[Case, ...]:
    """Return what is measured, in order."""
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
    settings: Settings,
    cases: Sequence[Case],
    dataset: Dataset | None,
    watch: Watch,
    done: Callable[[Sequence[Measured]], None] = lambda found: None,
) -> list[Measured]:
    """Measure every case on every engine; `done` is shown all that there is after each of them.

    A Ctrl-C ends the measurement, and what was measured before is returned.
    """
    threads = torch.get_num_threads()
    found: list[Measured] = []
    try:
        for case in cases:
            for engine in settings.engines:
                watch(f"{case}, {engine}")
                found.append(_measure_case(settings, case, engine, dataset, watch))
                done(found)
                torch.set_num_threads(threads)
    except KeyboardInterrupt:
        if not found:
            raise
    finally:
        torch.set_num_threads(threads)
    return found


def _measure_case(settings: Settings, case: Case, engine: str, dataset: Dataset | None, watch: Watch) -> Measured:
    measured = Measured(case, engine)
    try:
        _play(settings, measured, dataset, watch)
    except (torch.OutOfMemoryError, MemoryError) as error:
        measured.failure = f"out of memory: {str(error).splitlines()[0] if str(error) else 'no more could be had'}"
    # What the case held must not count in the next one's memory.
    gc.collect()
    if machine.has_gpu():
        torch.cuda.empty_cache()
    return measured


def _play(settings: Settings, measured: Measured, dataset: Dataset | None, watch: Watch) -> None:
    session = assemble(settings.measured(measured.case.method, measured.engine), dataset=dataset)
    measured.stages = len(session.world.modules)
    try:
        if measured.engine in PLAIN_SIDES and machine.has_gpu():
            # The plain loop is the same on any device: it runs where the model is.
            for part in (session.world.chain.model, session.normalize):
                part.to("cuda")
        _play_rounds(session, settings, measured, watch)
    finally:
        session.close()


def _play_rounds(session: Session, settings: Settings, measured: Measured, watch: Watch) -> None:
    """Play rounds until there are enough, or until the time is up."""
    state = start_of(session, measured.case)
    end = machine.now() + settings.limit
    for number in range(settings.repeat):
        watch(f"{measured.case}, {measured.engine}, round {number + 1} of {settings.repeat}")
        stopwatch = Stopwatch(session.engine, session.world.cost, short=measured.engine in PLAIN_SIDES)
        began = machine.now()
        # Each round begins alike: a stage would end after some, and weights could drift.
        _, record = hold(session.method.round(replace(state, round=number)), stopwatch)
        measured.server.append(machine.now() - began - stopwatch.spent)
        for part, sample in stopwatch.samples.items():
            measured.parts.setdefault(part, []).append(sample)
        if "assigned" in record:
            measured.assigned.append(record["assigned"])
        if machine.now() > end:
            break


def start_of(session: Session, case: Case) -> Any:
    """Return a method's state before its first round, for a cascade at the start of the case's stage."""
    state = session.method.initial()
    return state if case.stage is None else at_stage(session, state, case.stage)


def at_stage(session: Session, state: CascadeState, stage: int) -> CascadeState:
    """Return the state with the modules before a stage fixed as they are."""
    assert isinstance(session.method, FedProphet)
    world = session.world
    alpha = world.config.perturbation.start
    fixed = tuple(
        Fixed(
            0, 1.0, 1.0, 1.0, 1.0, world.frozen.add(named(state.model, world.chain.shared(module.first, module.last)))
        )
        for module in world.modules[:stage]
    )
    perturbation = Perturbation(magnitude=1.0, reference=1.0, alpha=alpha) if stage else None
    return replace(state, stage=stage, fixed=fixed, perturbation=perturbation)


class Stopwatch:
    """An engine that does each piece of work twice, and times it the second time.

    `short`: the first time is cut short, to one local iteration or one client's evaluation, which is all that a loop
    over clients needs to have everything loaded. `spent` are the seconds of everything that was carried out.
    """

    def __init__(self, engine: Engine, cost: ChainCost, *, short: bool) -> None:
        self._engine = engine
        self._cost = cost
        self._short = short
        self.samples: dict[str, Sample] = {}
        self.spent = 0.0

    def map(self, tasks: Iterable[ClientTask]) -> Iterator[ClientUpdate]:
        """Carry tasks out; those that train or evaluate are timed."""
        tasks = list(tasks)
        kind = tasks[0].kind if tasks else None
        if kind not in ("train", "evaluate"):
            return self._engine.map(tasks)
        began = machine.now()
        if kind == "train":
            self._time(WARMUP, [replace(task, threat=None) for task in tasks])
        answers = self._time(TRAINING if kind == "train" else EVALUATION, tasks)
        self.spent += machine.now() - began
        return iter(answers)

    def _time(self, part: str, tasks: list[ClientTask]) -> list[ClientUpdate]:
        first = machine.now()
        list(self._engine.map(_cut(tasks) if self._short else tasks))
        # Workers may have been started in the meantime.
        workers: Sequence[int] = getattr(self._engine, "processes", ())
        machine.forget_peak(workers)
        began = machine.now()
        answers = list(self._engine.map(tasks))
        seconds = machine.now() - began
        samples = {(answer.client, answer.number): answer.metrics["samples"] for answer in answers}
        flops = sum(task_flops(self._cost, task, int(samples[task.client, task.number])) for task in tasks)
        peak = machine.peak_bytes(workers)
        self.samples[part] = Sample(tasks[0].round, len(tasks), seconds, flops, peak, began - first)
        return answers


def _cut(tasks: list[ClientTask]) -> list[ClientTask]:
    """Return the least work that loads everything that the tasks need."""
    if tasks[0].kind == "evaluate":
        return tasks[:1]
    return [replace(task, training=replace(task.training, iterations=1)) for task in tasks if task.training]
