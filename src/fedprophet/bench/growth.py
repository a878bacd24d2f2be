"""What a round costs besides training, for populations of any size: it should depend on the cohort only.

Everything is real except the clients' work: the drawn cohorts, the available resources, the shards, the norm layers
that each client keeps on disk. Clients return the parameters they were sent. Each round is saved as in a run. The
clients' layers get little memory, so that nearly all of them are on disk.
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

from fedprophet import machine
from fedprophet.bench.report import Document, processor_line, range_text, source_line, spread, versions_line
from fedprophet.bench.synthetic import Sizes, sizes_of, synthetic
from fedprophet.client.layer_store import ClientStore
from fedprophet.client.workspace import Workspace
from fedprophet.config.config import Config
from fedprophet.config.load import load_config
from fedprophet.data.dataset import Dataset
from fedprophet.display.numbers import counted, digits
from fedprophet.display.tables import Column, Page, Table
from fedprophet.engines.plain import PlainEngine
from fedprophet.fleet.population import Population
from fedprophet.messages.answers import Answer, Evaluated, Measured, Trained
from fedprophet.messages.tasks import Measure, Task, Train
from fedprophet.messages.values import BACKBONE
from fedprophet.methods import METHODS
from fedprophet.runs.checkpoint import Checkpoints
from fedprophet.runs.export import average_local
from fedprophet.runs.folder import FolderContents
from fedprophet.runs.journal import Journal
from fedprophet.runs.session import Session, assemble
from fedprophet.server.coordinator import play_round
from fedprophet.sizes import format_size

SIZES = tuple(10**power for power in range(2, 7))
COHORTS = (10, 30, 100)
SAMPLES_EACH = 5
"""Images per client: one is held out."""
STORE_MEMORY = 10**6
"""Bytes of layers kept in memory."""
PHASES = ("drawing the cohort", "asking clients", "their layers", "saving", "server")
DRAWING, ASKING, LAYERS, SAVING, SERVER = PHASES
UNTIMED = 2
"""Rounds before the timed ones."""

Watch = Callable[[str], None]


@dataclass(frozen=True)
class GrowthSettings:
    """Populations, each with the first cohort size; the largest one with the other sizes too."""

    preset: str
    overrides: tuple[str, ...] = ()
    sizes: tuple[int, ...] = SIZES
    cohorts: tuple[int, ...] = COHORTS
    rounds: int = 20

    def cases(self) -> list[tuple[int, int]]:
        largest = max(self.sizes)
        return [(size, min(self.cohorts[0], size)) for size in sorted(self.sizes)] + [
            (largest, cohort) for cohort in self.cohorts[1:] if cohort <= largest
        ]

    def config(self, clients: int, cohort: int) -> Config:
        """Return the configuration of a case: a stage that does not end, with everything limited to a cohort."""
        counts = {"population.clients": clients, "population.cohort": cohort}
        counts |= {"evaluate.clients": cohort, "measure.clients": cohort, "rounds": self.rounds + UNTIMED + 1}
        steady = ("train.warmup=0", "convergence.gate=0", "evaluate.every=1", "method=fedprophet", "engine=plain")
        changed = [f"{key}={value}" for key, value in counts.items()]
        return load_config(self.preset, [*self.overrides, *steady, *changed, f"convergence.patience={self.rounds + 9}"])


class Phases:
    """Seconds of a round by phase; a phase inside another does not count for the outer one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._within = 0.0

    @contextmanager
    def of(self, phase: str) -> Iterator[None]:
        """Add the seconds of a block, or of the calls of a function that this decorates, to a phase."""
        began, outside = time.perf_counter(), self._within
        self._within = 0.0
        try:
            yield
        finally:
            spent = time.perf_counter() - began
            self.seconds[phase] = self.seconds.get(phase, 0.0) + spent - self._within
            self._within = outside + spent


class TimedPool:
    """A population that times its draws."""

    def __init__(self, population: Population, phases: Phases) -> None:
        self.draw = phases.of(DRAWING)(population.draw)
        self.eligible = population.eligible


class TimedStore(ClientStore):
    """A store of clients' layers that times reading and writing."""

    def __init__(self, directory: Path, memory_limit: int, phases: Phases) -> None:
        super().__init__(directory, memory_limit)
        for name in ("get", "put", "flush"):
            setattr(self, name, phases.of(LAYERS)(getattr(self, name)))


class InstantEngine:
    """Clients that report as usual but train, evaluate and measure in no time: they return what they were sent.

    A client that trains keeps a version of its norm layers, as a real one does.
    """

    def __init__(self, plain: PlainEngine, workspace: Workspace, phases: Phases) -> None:
        self._plain = plain
        self._workspace = workspace
        self._phases = phases

    def map(self, tasks: Iterable[Task]) -> Iterator[Answer]:
        for task in tasks:
            with self._phases.of(ASKING):
                update = next(self._plain.map([task])) if task.kind == "report" else self._answer(task)
            yield update

    def _answer(self, task: Task) -> Answer:
        layers, weight = self._workspace.layers, self._plain.client(task.client).weight
        own = layers.get(task.architecture, task.client, task.timeline, task.layers_before) or self._workspace.initial
        about: dict[str, Any] = {"round": task.round, "client": task.client, "number": task.number, "weight": weight}
        samples = int(weight)
        if isinstance(task, Train):
            layers.put(task.architecture, task.client, task.round, own, task.timeline)
            return Trained(**about, loss=1.0, samples=samples, parameters=task.parameters)
        if isinstance(task, Measure):
            return Measured(**about, samples=samples, magnitude=weight)
        return Evaluated(**about, samples=samples, clean=samples, adversarial=samples)


def measure_growth(settings: GrowthSettings, watch: Watch) -> list[Document]:
    """Return a row for each population and cohort."""
    watch("starting")
    _in_a_folder(replace(settings, rounds=1), *settings.cases()[0])  # loads what is loaded once
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
    kept = [file.stat().st_size for file in (folder / "clients").rglob("*.safetensors")]
    return {
        "clients": clients,
        "eligible": eligible,
        "cohort": cohort,
        "rounds": len(timed),
        "setup_s": setup,
        **spread([sum(row.seconds.values()) for row in timed]),
        "seconds_by_phase": {phase: statistics.median(r.seconds.get(phase, 0.0) for r in timed) for phase in PHASES},
        "setup_resident_bytes": resident,
        "resident_bytes": timed[-1].resident,
        "resident_bytes_per_round": (timed[-1].resident - played[UNTIMED - 1].resident) / len(timed),
        "clients_on_disk": len(kept),
        "disk_bytes": sum(kept),
        "export_s": export,
    }


def _shared_out(sizes: Sizes, clients: int, seed: int) -> Dataset:
    """Return as many random images as the clients need."""
    return synthetic(replace(sizes, train=max(SAMPLES_EACH * clients, sizes.classes), test=sizes.classes), seed)


def _instant(session: Session, folder: Path, phases: Phases) -> Session:
    """Return the session with timed draws, little memory for layers, and an engine that answers at once."""
    world = replace(session.world, pool=TimedPool(session.population, phases))
    layers = TimedStore(folder, STORE_MEMORY, phases)
    workspace = Workspace(
        world.chain, session.dataset.shape, session.dataset.classes, world.frozen, layers, session.features
    )
    plain = PlainEngine(session.population, {BACKBONE: workspace}, session.budget)
    method = METHODS[session.config.method].method(world)
    engine = InstantEngine(plain, workspace, phases)
    return replace(session, world=world, layers=layers, method=method, engine=engine)


@dataclass(frozen=True)
class RoundCost:
    """The seconds of a round by phase, and the resident memory after it."""

    seconds: Mapping[str, float]
    resident: int


def _play(session: Session, phases: Phases, folder: Path, rounds: int) -> tuple[Any, list[RoundCost]]:
    """Play rounds and save each as a run does; return the last state and the cost of each round."""
    journal = Journal(folder / "journal.jsonl")
    checkpoints = Checkpoints(folder / "checkpoints", session.config, keep=session.config.checkpoint.keep)
    state: Any = session.method.initial()
    played = []
    for _ in range(rounds):
        phases.seconds.clear()
        with phases.of(SERVER):
            state, record = play_round(session.method.round(state), session.engine)
        with phases.of(SAVING):
            journal.append(record)
            session.layers.flush()
            mark = journal.mark(state.round)
            known = FolderContents(
                session.layers.digests(state.round), journal=mark, timings=mark, inputs={}, flower=""
            )
            checkpoints.save(state, state.round, known)
        played.append(RoundCost(dict(phases.seconds), machine.resident_bytes()))
    return state, played


# For people ----------------------------------------------------------------------------------------------------------


def growth_document(settings: GrowthSettings, about: Document, rows: Sequence[Document]) -> Document:
    """Return everything that was measured, and the machine and settings it was measured with."""
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


def growth_page(found: Document) -> Page:
    settings, rows = found["settings"], found["measurements"]
    images = f"{settings['samples_per_client']} random images per client"
    return Page(
        "Growth",
        (_time_table(rows), _memory_table(rows)),
        lines=(
            processor_line(found["machine"]),
            versions_line(found["machine"]),
            f"{source_line(settings)}, {images}, medians of {settings['rounds']} rounds",
        ),
        notes=tuple(_notes(format_size(settings["store_memory_bytes"]))),
    )


CASE = (Column("clients", form="{:,}".format), Column("cohort"))


def _time_table(rows: Sequence[Document]) -> Table:
    columns = (*CASE, Column("round", form=_ms), Column("range"), *(Column(phase, form=_ms) for phase in PHASES))
    lines = (
        (row["clients"], row["cohort"], row["seconds"], range_text(row, 1000), *row["seconds_by_phase"].values())
        for row in rows
    )
    return Table("A round without training, milliseconds", columns, tuple(lines), labels=2)


def _memory_table(rows: Sequence[Document]) -> Table:
    columns = {
        "setup_s": Column("set-up", form=_seconds),
        "setup_resident_bytes": Column("then resident", form=format_size),
        "resident_bytes": Column("at the end", form=format_size),
        "resident_bytes_per_round": Column("added per round", form=lambda size: format_size(max(round(size), 0))),
        "clients_on_disk": Column("on disk", form=lambda clients: counted(clients, "client")),
        "disk_bytes": Column("disk", form=format_size),
        "export_s": Column("export", form=_seconds),
    }
    lines = ((row["clients"], row["cohort"], *(row[name] for name in columns)) for row in rows)
    return Table("Memory and disk", (*CASE, *columns.values()), tuple(lines), labels=2)


def _ms(seconds: float) -> str:
    return digits(1000 * seconds)


def _seconds(seconds: float) -> str:
    return f"{digits(seconds)} s"


def _notes(limit: str) -> Iterator[str]:
    yield (
        "Clients answer at once with what they were sent, so this is the cost of a round besides training. Asking "
        "clients: drawing each device's available resources and finding its samples. Their layers: reading them and "
        f"adding a version; what exceeds {limit} is on disk only. Saving: the journal and the checkpoint. Server: "
        "assigning, checking, averaging and the simulated clock."
    )
    yield (
        "Set-up, once per run: dealing out the samples and building the model. Export, once at the end: averaging the "
        "layers of all clients that have trained."
    )
