"""Runs as one document of plain values, which a page, or a program, makes pictures of.

It holds what a picture needs and no more: of a long run every n-th evaluation, and sums over rounds in a row. The same
folders give the same document, but for whether a process is working on them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fedprophet.attacks.names import CLEAN, attack_label, is_stepwise
from fedprophet.display.summary import MEASURED_ON
from fedprophet.methods import METHODS
from fedprophet.report.compare import each_once
from fedprophet.report.enforced import MeasuredPart, measured_parts
from fedprophet.report.facts import Fact, machine_facts, run_facts
from fedprophet.report.folders import read_folder
from fedprophet.report.rounds import (
    Assignment,
    Curve,
    Perturbation,
    Stage,
    assignment_of,
    curve_of,
    drawn_rounds,
    perturbation_of,
    stages_of,
    trainings_of,
)
from fedprophet.report.runs import Memory, ReadFolder
from fedprophet.report.sums import Faults, Time, Traffic, faults_of, time_of, traffic_of
from fedprophet.runs.evaluator import KINDS
from fedprophet.runs.files import RunFiles, resume_hint
from fedprophet.storage.locks import is_locked
from fedprophet.version import __version__

FORMAT = 1
"""Of the document; a page of another version does not read it."""


@dataclass(frozen=True)
class Accuracy:
    """An accuracy at the end of a run: what of (`kind`), under which attack, and what it was measured on."""

    kind: str
    attack: str
    label: str
    accuracy: float
    interval: tuple[float, float] | None
    samples: int
    precision: str | None


@dataclass(frozen=True)
class Cascade:
    """The modules and the memory that the training of each takes, beside the budget and the whole model.

    `counted` is how: by the paper's model, or by the most economical plan (`memory.model`).
    """

    modules: tuple[Mapping[str, Any], ...]
    budget: int
    whole: int
    counted: str


@dataclass(frozen=True)
class RunDocument:
    """A run; what its folder does not hold is None or empty."""

    label: str
    name: str
    path: str
    method: str
    finished: bool
    working: bool | None
    """Whether a process is working on it; None if that cannot be told."""
    rounds: int
    deployed: bool
    cascading: bool
    """Whether its method trains module after module."""
    attack: str
    memory: Memory | None
    enforced: tuple[MeasuredPart, ...]
    facts: tuple[Fact, ...]
    hardware: tuple[Fact, ...]
    accuracies: tuple[Accuracy, ...]
    cascade: Cascade | None
    curve: Curve
    stages: tuple[Stage, ...]
    perturbation: Perturbation | None
    assignment: Assignment | None
    time: Time | None
    traffic: Traffic | None
    faults: Faults
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """The document of one run or several."""

    runs: tuple[RunDocument, ...]
    notes: tuple[str, ...] = ()
    kinds: Mapping[str, str] = field(default_factory=lambda: dict(MEASURED_ON))
    version: str = __version__
    format: int = FORMAT

    def to_json(self) -> dict[str, Any]:
        """Return it for files."""
        return asdict(self)


def report_of(paths: Sequence[Path]) -> Report:
    """Return the document of the runs in these folders; CheckpointError if one is not a run, or damaged."""
    once, notes = each_once(paths)
    folders = [read_folder(path) for path in once]
    labels = _labels(folders)
    return Report(tuple(_run(folder, label) for folder, label in zip(folders, labels, strict=True)), tuple(notes))


def _labels(folders: Sequence[ReadFolder]) -> list[str]:
    """Name each run by its method and, where several are of one method, by what tells those apart: seed or folder."""
    ways: list[Callable[[ReadFolder], str]] = [
        lambda folder: METHODS[folder.summary.config.method].paper,
        lambda folder: f"{ways[0](folder)}, seed {folder.summary.config.seed}",
        lambda folder: f"{ways[0](folder)}, {_name(folder.summary.path)}",
        lambda folder: f"{ways[0](folder)}, {folder.summary.path}",
    ]
    found = []
    for folder in folders:
        alike = [other for other in folders if other.summary.config.method == folder.summary.config.method]
        telling = (way for way in ways if len(set(map(way, alike))) == len(alike))
        found.append(next(telling, ways[-1])(folder))
    return found


def _name(path: Path) -> str:
    return path.name if path.name.strip(".") else path.resolve().name


def _run(folder: ReadFolder, label: str) -> RunDocument:
    summary, records = folder.summary, folder.records
    config, journal = summary.config, RunFiles(summary.path).journal
    rounds = drawn_rounds(records, journal)
    stages = tuple(stages_of(rounds, records, summary.time is not None))
    working = False if summary.finished else is_locked(summary.path)
    stopped = () if summary.finished or working else (f"It is not finished. {resume_hint(summary.path)}",)
    return RunDocument(
        label=label,
        name=_name(summary.path),
        path=str(summary.path),
        method=METHODS[config.method].paper,
        finished=summary.finished,
        working=working,
        rounds=summary.rounds,
        deployed=summary.deployed,
        cascading=METHODS[config.method].cascade,
        attack=attack_label(f"pgd{config.evaluate.steps}"),
        memory=summary.memory,
        enforced=tuple(measured_parts(trainings_of(rounds, records, journal))),
        facts=tuple(run_facts(folder)),
        hardware=tuple(machine_facts(folder)),
        accuracies=tuple(_accuracies(folder)),
        cascade=_cascade(folder),
        curve=curve_of(rounds, records if summary.time else None, stages),
        stages=stages,
        perturbation=perturbation_of(rounds) if stages else None,
        assignment=assignment_of(rounds, config.population.clients, len(folder.setup.modules)),
        time=time_of(folder),
        traffic=traffic_of(folder),
        faults=faults_of(records),
        notes=(*stopped, *summary.notes),
    )


def _accuracies(folder: ReadFolder) -> Iterator[Accuracy]:
    """Yield what was measured at the end and later: clean, then attacks of so many steps, then others."""
    for kind in KINDS:
        cells = folder.summary.accuracies.get(kind, {})
        for attack, cell in sorted(cells.items(), key=lambda item: (item[0] != CLEAN, not is_stepwise(item[0]))):
            yield Accuracy(
                kind, attack, attack_label(attack), cell.accuracy, cell.interval, cell.samples, cell.precision
            )


def _cascade(folder: ReadFolder) -> Cascade | None:
    setup = folder.setup
    if not setup.modules or not setup.whole_model_bytes:
        return None
    modules = tuple(
        {"index": module.index, "layers": module.layers, "memory": module.memory_bytes} for module in setup.modules
    )
    return Cascade(modules, setup.budget_bytes, setup.whole_model_bytes, folder.summary.config.memory.model)
