"""What a run's folder says about the run, read with care: files may be missing, damaged or of an earlier version."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from fedprophet.config.config import Config
from fedprophet.config.load import load_config
from fedprophet.errors import CheckpointError
from fedprophet.going_on import how_to_resume
from fedprophet.report.enforced import ClientPlan, EnforcedMemory, together
from fedprophet.report.runs import (
    Amount,
    Count,
    MeasuredAccuracy,
    Memory,
    Reached,
    ReadFolder,
    RoundWire,
    RunSummary,
    Setup,
    SimulatedTime,
    Wire,
)
from fedprophet.runs.checkpoint import Checkpoints
from fedprophet.runs.engine_history import spans
from fedprophet.runs.evaluator import KINDS, Kind
from fedprophet.runs.files import RunFiles, no_run
from fedprophet.runs.journal import Journal
from fedprophet.runs.summary import fault_count, moved_bytes, simulated_seconds, training_memory
from fedprophet.server.coordinator import Record
from fedprophet.storage.files import is_deployed

EVALUATION = "evaluation.json"
"""What `fedprophet evaluate` has measured, besides the run's own summary."""
RESTORE = "Restore the file, or leave this run out"
T = TypeVar("T")


@dataclass(frozen=True)
class _ClientCost:
    """What the journal records of a client in a round."""

    computation_s: Amount
    access_s: Amount
    communication_s: Amount
    memory_bytes: Count


@dataclass(frozen=True)
class _Faults:
    """The clients of a round whose answers were lost, as the journal records them."""

    missing: dict[str, list[int]] = field(default_factory=dict)
    dropped: dict[str, Any] = field(default_factory=dict)
    faults: dict[str, Any] = field(default_factory=dict)


def _without_empty(cells: object) -> object:
    """Leave out what was measured on no samples: it is no accuracy."""
    if not isinstance(cells, dict):
        return cells
    return {name: cell for name, cell in cells.items() if not isinstance(cell, dict) or cell.get("samples") != 0}


_Cells = Annotated[dict[str, MeasuredAccuracy], BeforeValidator(_without_empty)]


@dataclass(frozen=True)
class _Measurements:
    personalised: _Cells
    whole: Annotated[_Cells, Field(validation_alias="global")]
    uncalibrated: _Cells = field(default_factory=dict, kw_only=True)

    def of(self, kind: Kind) -> dict[str, MeasuredAccuracy]:
        """Return the accuracies of a kind."""
        return {"personalised": self.personalised, "uncalibrated": self.uncalibrated, "global": self.whole}[kind]


@dataclass(frozen=True)
class _Results(_Measurements):
    rounds: Count
    version: str | None
    best: Reached | None = None
    last: Reached | None = None
    norm_layers: dict[str, str] = field(default_factory=dict)
    public_samples: Count = 0


@dataclass(frozen=True)
class _Evaluation(_Measurements):
    round: Count
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Inputs:
    dataset: str | None


def read_run(path: Path) -> RunSummary:
    """Return what a run's folder holds; raise CheckpointError if it is not a run or a file is damaged."""
    return read_folder(path).summary


def read_folder(path: Path) -> ReadFolder:
    """Return what a run's folder holds, with the records of its rounds; raise CheckpointError as `read_run` does."""
    files = RunFiles(path)
    if not files.config.is_file():
        raise no_run(path, "Give folders that fedprophet train has written")
    config = load_config(files.config)
    sound = _sound_records(files, config)
    written = _read(files.results, _Results, f"Delete it and write it again: {how_to_resume(path)}")
    if sound is None and written is None:
        raise CheckpointError(f"{files.journal} was cut or altered, and this run has no other results. {RESTORE}")
    records = sound or []
    unfinished = _Results({}, {}, len(records), None, last=_last_evaluated(records, files.journal))
    results = written or unfinished
    evaluation = _read(path / EVALUATION, _Evaluation, "Delete it and measure again: fedprophet evaluate")
    newest = results.rounds if written else Checkpoints(files.checkpoints, config).newest(results.rounds)
    evaluation, notes = _current(evaluation, results.rounds, newest)
    inputs = _read(files.inputs, _Inputs, RESTORE) or _Inputs(None)
    deployed = is_deployed(path)
    costs = _costs(records, files.journal)
    for record in records:
        of_record(_FAULTS, record, record, files.journal)
    if len(records) != results.rounds or costs is None:
        complete = len(records) == results.rounds
        what = "does not hold them" if complete else f"has {len(records)} of its {results.rounds} rounds"
        what = "was cut or altered" if sound is None else what
        notes.append(f"{'memory is' if deployed else 'time and memory are'} not known: its journal {what}")
        costs = None
    timings = _timings(files.timings)
    setup, more = _setup(files)
    summary = RunSummary(
        path=path,
        config=config,
        rounds=results.rounds,
        finished=written is not None,
        version=results.version,
        accuracies={kind: {**(evaluation.of(kind) if evaluation else {}), **results.of(kind)} for kind in KINDS},
        best=results.best,
        last=results.last,
        time=None if costs is None or deployed else _time(records, costs),
        memory=None if costs is None else _memory(records),
        enforced=together(part for record in records for part in enforced_of(record, files.journal).values()),
        wire=_wire(records, files.journal),
        wire_rounds=_wire_rounds(records),
        faults=fault_count(records),
        deployed=deployed,
        norm_layers=results.norm_layers,
        public_samples=results.public_samples,
        dataset=inputs.dataset,
        model=setup.model,
        engines=spans(timings),
        notes=(*notes, *more),
    )
    return ReadFolder(summary, records, setup, _seconds(timings, results.rounds))


def _setup(files: RunFiles) -> tuple[Setup, list[str]]:
    """Return what a run consists of, and the notes on it; runs of earlier versions say it in their results."""
    notes = []
    begun = None
    try:
        begun = _read(files.setup, Setup, "It is written again when the run is resumed")
    except CheckpointError as error:
        notes.append(str(error))
    ended = _read(files.results, Setup, RESTORE)
    setup = begun or ended or Setup()
    return replace(setup, starting_weights=ended.starting_weights if ended else None), notes


def _sound_records(files: RunFiles, config: Config) -> list[dict[str, Any]] | None:
    """Return the journal; None if it is not the one that the newest checkpoint knows."""
    journal = Journal(files.journal)
    known = Checkpoints(files.checkpoints, config).known_contents()
    return journal.read() if known is None or journal.begins_with(known.journal) else None


def _timings(timings: Path) -> list[dict[str, Any]]:
    """Return the lines of timings.jsonl; none if the file is damaged, for no result depends on it."""
    try:
        return Journal(timings).read()
    except CheckpointError:
        return []


def _seconds(timings: Sequence[Mapping[str, Any]], rounds: int) -> float | None:
    """Return what all rounds took; earlier versions timed the rounds alone, without journal and checkpoints."""
    spent = [line.get("total_seconds", line.get("seconds")) for line in timings]
    known = [float(each) for each in spent if isinstance(each, int | float)]
    return sum(known) if rounds and len(known) == rounds else None


def _read(file: Path, kind: type[T], advice: str) -> T | None:
    """Return a JSON file as a dataclass; None if there is no such file."""
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        return None
    return _checked(lambda: TypeAdapter(kind).validate_json(content), f"{file} is damaged", advice)


def _checked(parse: Callable[[], T], where: str, advice: str) -> T:
    """Parse something; raise an error that says what is wrong and where."""
    try:
        return parse()
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise CheckpointError(f"{where}: {place + ': ' if place else ''}{first['msg']}. {advice}") from None


# Accuracies ----------------------------------------------------------------------------------------------------------


def _current(evaluation: _Evaluation | None, rounds: int, newest: int | None) -> tuple[_Evaluation | None, list[str]]:
    """Return the evaluation, unless it measured another model than the `newest` that is kept, and the notes on it.

    In between a run's checkpoints its journal is further than the model that can be measured.
    """
    if evaluation is None or evaluation.round == rounds:
        return evaluation, list(evaluation.warnings) if evaluation else []
    measured = f"{EVALUATION} measured the model after round {evaluation.round}"
    if evaluation.round == newest:
        return evaluation, [measured, *evaluation.warnings]
    return None, [f"{measured}, not {rounds}, and does not count: measure again"]


def _last_evaluated(records: Sequence[Record], journal: Path) -> Reached | None:
    """Return the latest evaluation of a run that has not finished."""
    for record in reversed(records):
        if record.get("samples"):
            return of_record(TypeAdapter(Reached), record, record, journal)
    return None


# Time and memory -----------------------------------------------------------------------------------------------------

_COSTS, _FAULTS, _WIRE = TypeAdapter(dict[str, _ClientCost]), TypeAdapter(_Faults), TypeAdapter(Wire)
_PLANS = TypeAdapter(dict[Count, ClientPlan])


def _costs(records: Sequence[Record], journal: Path) -> list[list[_ClientCost]] | None:
    """Return the clients' costs in each round; None if a round has none."""
    if not all("times" in record for record in records):
        return None
    return [list(of_record(_COSTS, record["times"], record, journal).values()) for record in records]


def of_record(kind: TypeAdapter[T], value: object, record: Record, journal: Path) -> T:
    where = f"round {record['round']} of the journal {journal} is damaged"
    return _checked(lambda: kind.validate_python(value), where, RESTORE)


def _time(records: Sequence[Record], costs: Sequence[Sequence[_ClientCost]]) -> SimulatedTime:
    """Return the time of a run: a round takes as long as its slowest client; links are added up separately."""
    seconds = simulated_seconds(records)
    links = sum(max(cost.communication_s for cost in clients) for clients in costs if clients)
    return SimulatedTime(seconds["computation_s"], seconds["access_s"], links)


def _memory(records: Sequence[Record]) -> Memory | None:
    found = training_memory(records)
    return Memory(found["least_bytes"], found["peak_bytes"]) if found else None


def enforced_of(record: Record, journal: Path) -> dict[int, EnforcedMemory]:
    """Return the memory of each client's training in a round; nothing where there were no limits."""
    plans = of_record(_PLANS, record.get("plans", {}), record, journal)
    return {client: EnforcedMemory.of(plan) for client, plan in plans.items()}


def _wire(records: Sequence[Record], journal: Path) -> Wire | None:
    for record in records:
        if "wire" in record:
            of_record(_WIRE, record["wire"], record, journal)
    found = moved_bytes(records)
    return Wire(**found) if found else None


def _wire_rounds(records: Sequence[Record]) -> tuple[RoundWire, ...]:
    """Return the bytes of each round, if those of any round were counted."""
    if not any("wire" in record for record in records):
        return ()
    return tuple(
        RoundWire(record["round"], Wire(**found) if (found := moved_bytes([record])) else None, fault_count([record]))
        for record in records
    )
