"""What a round costs beside training, for populations of any size: a round should cost what its cohort costs.

The clients are real in everything but their work: who is drawn, what a device can spare, whose samples are whose, the
norm layers that each keeps on disk. What they are asked to train comes back as it was sent. Each round is saved as a
run saves it. The store of the clients' layers is given little memory, so that nearly all of them live on disk.
"""

import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from fedprophet import machine
from fedprophet.bench.report import Document, TextTable, processor_line, short
from fedprophet.bench.synthetic import Sizes, sizes_of, synthetic
from fedprophet.client.layer_store import ClientStore
from fedprophet.client.run import shard_weight
from fedprophet.client.workspace import Workspace
from fedprophet.config.config import Config, load_config
from fedprophet.data.dataset import Dataset
from fedprophet.engines.plain import EmbeddedEngine
from fedprophet.fleet.population import Population
from fedprophet.messages.task import BACKBONE, ClientTask, ClientUpdate, Timeline
from fedprophet.methods import find_method
from fedprophet.runs.checkpoint import Checkpoints
from fedprophet.runs.journal import Journal
from fedprophet.runs.results import average_local
from fedprophet.runs.session import Session, assemble
from fedprophet.server.coordinator import hold
from fedprophet.sizes import format_size

SIZES = tuple(10**power for power in range(2, 7))
COHORTS = (10, 30, 100)
SAMPLES_EACH = 5
"""Images of a client: one is held out."""
STORE_MEMORY = 10**6
"""Bytes of layers that stay in memory."""
PHASES = ("drawing the cohort", "asking clients", "their layers", "saving", "server")
DRAWING, ASKING, LAYERS, SAVING, SERVER = PHASES
UNTIMED = 2
"""Rounds before the timed ones."""

Watch = Callable[[str], None]


@dataclass(frozen=True)
class GrowthSettings:
    """Populations, each with the first of the cohorts; the largest one with the other cohorts too."""

    preset: str
    overrides: tuple[str, ...] = ()
    sizes: tuple[int, ...] = SIZES
    cohorts: tuple[int, ...] = COHORTS
    rounds: int = 20

    def cases(self) -> list[tuple[int, int]]:
        """Return pairs of population and cohort."""
        largest = max(self.sizes)
        return [(size, min(self.cohorts[0], size)) for size in sorted(self.sizes)] + [
            (largest, cohort) for cohort in self.cohorts[1:] if cohort <= largest
        ]

    def config(self, clients: int, cohort: int) -> Config:
        """Return the configuration of a case: one stage that goes on, everything limited to a cohort."""
        counts = {"population.clients": clients, "population.cohort": cohort}
        counts |= {"evaluate.clients": cohort, "measure.clients": cohort, "rounds": self.rounds + UNTIMED + 1}
        steady = ("train.warmup=0", "convergence.gate=0", "evaluate.every=1", "method=fedprophet", "engine=plain")
        changed = [f"{key}={value}" for key, value in counts.items()]
        return load_config(self.preset, [*self.overrides, *steady, *changed, f"convergence.patience={self.rounds + 9}"])


class Phases:
    """Seconds of a round by what they were spent on; a phase within another counts for itself alone."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._within = 0.0

    @contextmanager
    def of(self, phase: str) -> Iterator[None]:
        """Add the block's seconds to a phase."""
        began, outside = time.perf_counter(), self._within
        self._within = 0.0
        try:
            yield
        finally:
            spent = time.perf_counter() - began
            self.seconds[phase] = self.seconds.get(phase, 0.0) + spent - self._within
            self._within = outside + spent


@dataclass(frozen=True)
class TimedRoster:
    """A population that notes how long drawing takes."""

    population: Population
    phases: Phases

    def draw(self, round: int, count: int, seed: int, purpose: str) -> tuple[int, ...]:
        """Draw as the population does."""
        with self.phases.of(DRAWING):
            return self.population.draw(round, count, seed, purpose)

    @property
    def eligible(self) -> npt.NDArray[np.int64]:
        """Everyone who owns a sample."""
        return self.population.eligible


class TimedStore(ClientStore):
    """A store of clients' layers that notes how long reading and writing them takes."""

    def __init__(self, directory: Path, memory_limit: int, phases: Phases) -> None:
        super().__init__(directory, memory_limit)
        self._phases = phases

    def get(self, architecture: str, client: int, timeline: Timeline, before: int) -> Mapping[str, Tensor] | None:
        """Return a client's layers."""
        with self._phases.of(LAYERS):
            return super().get(architecture, client, timeline, before)

    def put(
        self, architecture: str, client: int, round: int, tensors: Mapping[str, Tensor], timeline: Timeline
    ) -> None:
        """Keep a version of a client's layers."""
        with self._phases.of(LAYERS):
            super().put(architecture, client, round, tensors, timeline)

    def flush(self) -> None:
        """Write what has changed."""
        with self._phases.of(LAYERS):
            super().flush()


class InstantEngine:
    """Clients that report as ever, but train, evaluate and measure in no time: what they were sent comes back.

    A client that trains keeps a version of its norm layers, as a real one does.
    """

    def __init__(self, plain: EmbeddedEngine, workspace: Workspace, phases: Phases) -> None:
        self._plain = plain
        self._workspace = workspace
        self._phases = phases

    def map(self, tasks: Iterable[ClientTask]) -> Iterator[ClientUpdate]:
        """Answer every task."""
        for task in tasks:
            with self._phases.of(ASKING):
                update = next(self._plain.map([task])) if task.kind == "report" else self._answer(task)
            yield update

    def _answer(self, task: ClientTask) -> ClientUpdate:
        layers, weight = self._workspace.layers, shard_weight(self._plain.client(task.client))
        before = task.round if task.kind == "train" else task.round + 1
        own = layers.get(task.architecture, task.client, task.timeline, before) or self._workspace.initial
        update = ClientUpdate(task.kind, task.round, task.client, weight, number=task.number)
        if task.kind == "train":
            layers.put(task.architecture, task.client, task.round, own, task.timeline)
            return replace(update, metrics={"loss": 1.0, "samples": weight}, parameters=task.parameters)
        return replace(update, metrics=dict.fromkeys(("samples", "clean", "adversarial", "magnitude"), weight))


def measure_growth(settings: GrowthSettings, watch: Watch) -> list[Document]:
    """Return a row for each population and cohort."""
    watch("starting")
    _in_a_folder(replace(settings, rounds=1), *settings.cases()[0])  # what is loaded once is no part of any case
    rows = []
    for clients, cohort in settings.cases():
        watch(f"{clients:,} clients, cohorts of {cohort}")
        rows.append(_in_a_folder(settings, clients, cohort))
    return rows


def _in_a_folder(settings: GrowthSettings, clients: int, cohort: int) -> Document:
    gc.collect()
    with tempfile.TemporaryDirectory(prefix="fedprophet-growth-") as folder:
        return _measure_case(settings, clients, cohort, Path(folder))


def _measure_case(settings: GrowthSettings, clients: int, cohort: int, folder: Path) -> Document:
    config, phases = settings.config(clients, cohort), Phases()
    dataset = _shared_out(sizes_of(config.data), clients, config.seed)
    began = time.perf_counter()
    session = _instant(assemble(config, dataset=dataset), folder / "clients", phases)
    eligible = len(session.population.eligible)
    setup = time.perf_counter() - began
    resident = machine.resident_bytes()
    state, played = _play(session, phases, folder, settings.rounds + UNTIMED)
    timed = played[UNTIMED:]
    began = time.perf_counter()
    average_local(session, state, session.engine)
    export = time.perf_counter() - began
    totals = [sum(row.seconds.values()) for row in timed]
    kept = [file.stat().st_size for file in (folder / "clients").rglob("*.safetensors")]
    return {
        "clients": clients,
        "eligible": eligible,
        "cohort": cohort,
        "rounds": len(timed),
        "setup_s": setup,
        "seconds": statistics.median(totals),
        "seconds_least": min(totals),
        "seconds_most": max(totals),
        "seconds_by_phase": {phase: statistics.median(r.seconds.get(phase, 0.0) for r in timed) for phase in PHASES},
        "setup_resident_bytes": resident,
        "resident_bytes": timed[-1].resident,
        "resident_bytes_per_round": (timed[-1].resident - played[UNTIMED - 1].resident) / len(timed),
        "clients_on_disk": len(kept),
        "disk_bytes": sum(kept),
        "export_s": export,
    }


def _shared_out(sizes: Sizes, clients: int, seed: int) -> Dataset:
    """Return random images, as many as the clients need."""
    return synthetic(replace(sizes, train=max(SAMPLES_EACH * clients, sizes.classes), test=sizes.classes), seed)


def _instant(session: Session, folder: Path, phases: Phases) -> Session:
    """Return the session with timed draws, little memory for layers, and an engine that answers at once."""
    world = replace(session.world, roster=TimedRoster(session.population, phases))
    layers = TimedStore(folder, STORE_MEMORY, phases)
    workspace = Workspace(
        world.chain, session.dataset.shape, session.dataset.classes, world.frozen, layers, session.features
    )
    plain = EmbeddedEngine(session.population, {BACKBONE: workspace}, session.budget)
    method = find_method(session.config.method).method(world)
    engine = InstantEngine(plain, workspace, phases)
    return replace(session, world=world, layers=layers, method=method, engine=engine)


@dataclass(frozen=True)
class Played:
    """The seconds of a round by phase, and the resident memory after it."""

    seconds: Mapping[str, float]
    resident: int


def _play(session: Session, phases: Phases, folder: Path, rounds: int) -> tuple[Any, list[Played]]:
    """Play rounds and save each as a run does; return the last state and what each took."""
    journal = Journal(folder / "journal.jsonl")
    checkpoints = Checkpoints(folder / "checkpoints", session.config, keep=session.config.checkpoint.keep)
    state: Any = session.method.initial()
    played = []
    for _ in range(rounds):
        phases.seconds.clear()
        with phases.of(SERVER):
            state, record = hold(session.method.round(state), session.engine)
        with phases.of(SAVING):
            journal.append(record)
            session.layers.flush()
            checkpoints.save(state, state.round)
        played.append(Played(dict(phases.seconds), machine.resident_bytes()))
    return state, played


# For people ----------------------------------------------------------------------------------------------------------


def growth_document(settings: GrowthSettings, about: Document, rows: Sequence[Document]) -> Document:
    """Return everything that was measured, and on what."""
    return {
        "benchmark": "growth",
        "machine": about,
        "settings": {
            "preset": settings.preset,
            "overrides": list(settings.overrides),
            "rounds": settings.rounds,
            "samples_per_client": SAMPLES_EACH,
            "store_memory_bytes": STORE_MEMORY,
            "config": settings.config(*settings.cases()[0]).model_dump(),
        },
        "measurements": list(rows),
    }


def growth_headline(found: Document) -> list[str]:
    """Return the lines above the tables."""
    about, settings = found["machine"], found["settings"]
    changed = "".join(f" --set {text}" for text in settings["overrides"])
    return [
        processor_line(about),
        f"Python {about['python']}, torch {about['torch']}, fedprophet {about['fedprophet']}, {about['date']}",
        f"{settings['preset']}{changed}, {settings['samples_per_client']} random images a client, medians of "
        f"{settings['rounds']} rounds",
    ]


def growth_tables(found: Document) -> list[TextTable]:
    """Return where a round's milliseconds go, and what memory and disk hold."""
    rows = found["measurements"]
    times = ("clients", "cohort", "round", "range", *PHASES)
    kept = ("clients", "cohort", "set-up", "resident then", "at the end", "a round adds", "on disk", "disk", "export")
    return [
        TextTable("a round without training, milliseconds", times, tuple(_time_line(row) for row in rows)),
        TextTable("memory and disk", kept, tuple(_memory_line(row) for row in rows)),
    ]


def _time_line(row: Document) -> tuple[str, ...]:
    spread = f"{_ms(row['seconds_least'])}–{_ms(row['seconds_most'])}"
    phases = [_ms(row["seconds_by_phase"][phase]) for phase in PHASES]
    return f"{row['clients']:,}", str(row["cohort"]), _ms(row["seconds"]), spread, *phases


def _memory_line(row: Document) -> tuple[str, ...]:
    return (
        f"{row['clients']:,}",
        str(row["cohort"]),
        f"{short(row['setup_s'])} s",
        format_size(row["setup_resident_bytes"]),
        format_size(row["resident_bytes"]),
        format_size(max(round(row["resident_bytes_per_round"]), 0)),
        f"{row['clients_on_disk']} clients",
        format_size(row["disk_bytes"]),
        f"{short(row['export_s'])} s",
    )


def _ms(seconds: float) -> str:
    return short(1000 * seconds)


def growth_notes(found: Document) -> list[str]:
    """Return what a reader must know to read the tables."""
    limit = format_size(found["settings"]["store_memory_bytes"])
    return [
        "Clients answer at once with what they were sent: this is everything a round costs beside training. Asking "
        "clients is drawing what each device can spare and finding its samples; their layers are read, a version is "
        f"added, and what exceeds {limit} lives on disk alone; saving is the journal and the checkpoint; server is "
        "assigning, checking, averaging and the simulated clock.",
        "Set-up deals the samples out and makes the model, once a run. Export averages the layers of all clients that "
        "have trained, once at its end.",
    ]
