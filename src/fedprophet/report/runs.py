"""What one run's folder says of the run: its accuracies, its memory and its simulated time."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from fedprophet.config.config import Config, load_config
from fedprophet.errors import CheckpointError
from fedprophet.runs.engine_history import Span, spans
from fedprophet.runs.journal import Journal
from fedprophet.runs.results import fault_count, simulated_seconds, training_memory, wire_bytes
from fedprophet.runs.run import RunFiles
from fedprophet.server.coordinator import Record
from fedprophet.storage.files import how_to_resume, is_deployed

Kind = Literal["personalised", "global"]
KINDS: tuple[Kind, ...] = ("personalised", "global")
EVALUATION = "evaluation.json"
"""What `fedprophet evaluate` has measured of a run, beside its closing summary."""
DEPLOYED = "Flower, real devices"
"""The engine of a run whose clients were no simulation."""

Share = Annotated[float, Field(ge=0, le=1)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]
T = TypeVar("T")


@dataclass(frozen=True)
class Measured:
    """An accuracy, and over how many samples; the interval holds it with 95 % where one was computed."""

    accuracy: Share
    samples: Count
    interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class Reached:
    """What a round reached in training, personalised."""

    round: Count
    clean: Share
    adversarial: Share


@dataclass(frozen=True)
class Time:
    """Simulated seconds of a whole run; communication is not part of the total, as in the paper."""

    computation: float
    access: float
    communication: float

    @property
    def total(self) -> float:
        """The training time that the paper reports."""
        return self.computation + self.access


@dataclass(frozen=True)
class Memory:
    """Bytes that training takes in the cost model: what the smallest task of every round fits, and the largest."""

    least: int
    peak: int


@dataclass(frozen=True)
class Wire:
    """Bytes that went over the network in rounds, as the server saw them, and those of jFAT's training in as many."""

    sent: Count
    received: Count
    jfat: Count

    @property
    def total(self) -> int:
        """Both ways together."""
        return self.sent + self.received


@dataclass(frozen=True)
class RoundWire:
    """The bytes of one round, None where nobody counted them, and how many clients' answers were lost in it."""

    round: int
    wire: Wire | None
    faults: int


@dataclass(frozen=True)
class RunSummary:
    """A run as a comparison sees it; what its folder does not hold is None or empty.

    The clients of a `deployed` run were real devices, so that it has no simulated time.
    """

    path: Path
    config: Config
    rounds: int
    finished: bool
    version: str | None = None
    accuracies: Mapping[Kind, Mapping[str, Measured]] = field(default_factory=dict)
    best: Reached | None = None
    last: Reached | None = None
    time: Time | None = None
    memory: Memory | None = None
    wire: Wire | None = None
    wire_rounds: tuple[RoundWire, ...] = ()
    faults: int = 0
    deployed: bool = False
    norm_layers: Mapping[str, str] = field(default_factory=dict)
    public_samples: int = 0
    dataset: str | None = None
    engines: tuple[Span, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def engine(self) -> str:
        """What carried the run out: as it is recorded, else what the configuration says; a deployment is neither."""
        if self.deployed:
            return DEPLOYED
        return ", ".join(dict.fromkeys(span.carrier.engine for span in self.engines)) or self.config.engine


@dataclass(frozen=True)
class _ClientCost:
    """What the journal keeps of a client in a round. Journals of earlier versions lack the memory."""

    computation_s: Amount
    access_s: Amount
    communication_s: Amount
    memory_bytes: Count | None = None


@dataclass(frozen=True)
class _Measurements:
    personalised: dict[str, Measured]
    whole: Annotated[dict[str, Measured], Field(validation_alias="global")]

    def by_kind(self) -> dict[Kind, dict[str, Measured]]:
        """Return what was measured; an accuracy over no samples is none."""
        pairs: tuple[tuple[Kind, dict[str, Measured]], ...] = (
            ("personalised", self.personalised),
            ("global", self.whole),
        )
        return {kind: {name: cell for name, cell in cells.items() if cell.samples} for kind, cells in pairs}


@dataclass(frozen=True)
class _Results(_Measurements):
    rounds: Count
    version: str
    best: Reached | None = None
    last: Reached | None = None
    norm_layers: dict[str, str] = field(default_factory=dict)
    public_samples: Count = 0


@dataclass(frozen=True)
class _Evaluation(_Measurements):
    round: Count
    warnings: tuple[str, ...] = ()


def read_run(path: Path) -> RunSummary:
    """Return what a run's folder holds; raise CheckpointError where it is no run or a file of it is damaged."""
    files = RunFiles(path)
    if not files.config.is_file():
        raise CheckpointError(
            f"there is no run in {path}: it has no config.toml. Give the folders of runs that fedprophet train has made"
        )
    config = load_config(files.config)
    records = Journal(files.journal).read()
    results = _read(files.results, _Results, f"Delete it: it is made again. Go on with: {how_to_resume(path)}")
    evaluation = _read(path / EVALUATION, _Evaluation, "Delete it, then measure again with fedprophet evaluate")
    deployed = is_deployed(path)
    costs = _costs(records, files.journal)
    rounds = results.rounds if results else len(records)
    notes = list(_evaluation_notes(evaluation, results, rounds))
    if len(records) != rounds or costs is None:
        costs = None
        what = f"has {len(records)} of its {rounds} rounds" if len(records) != rounds else "does not hold them"
        notes.append(f"{'memory is' if deployed else 'time and memory are'} not known: its journal {what}")
    return RunSummary(
        path=path,
        config=config,
        rounds=rounds,
        finished=results is not None,
        version=results.version if results else None,
        accuracies=_accuracies(results, evaluation),
        best=results.best if results else None,
        last=results.last if results else _last_evaluated(records, files.journal),
        time=None if costs is None or deployed else _time(records, costs),
        memory=None if costs is None else _memory(records),
        wire=_wire(records, files.journal),
        wire_rounds=_wire_rounds(records),
        faults=fault_count(records),
        deployed=deployed,
        norm_layers=results.norm_layers if results else {},
        public_samples=results.public_samples if results else 0,
        dataset=_dataset(files.inputs),
        engines=_engines(files.timings),
        notes=tuple(notes),
    )


def _engines(timings: Path) -> tuple[Span, ...]:
    """Return which engines carried a run out; none are known where the file is damaged: no result depends on it."""
    try:
        return spans(Journal(timings).read())
    except CheckpointError:
        return ()


def _read(file: Path, kind: type[T], advice: str) -> T | None:
    """Return a JSON file as a dataclass; None where there is no such file."""
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        return None
    return _checked(lambda: TypeAdapter(kind).validate_json(content), f"{file} is damaged", advice)


def _checked(parse: Callable[[], T], where: str, advice: str) -> T:
    """Return what is parsed; where it does not fit, say what and where."""
    try:
        return parse()
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise CheckpointError(f"{where}: {place + ': ' if place else ''}{first['msg']}. {advice}") from None


def _dataset(file: Path) -> str | None:
    """Return the fingerprint of the data that the run was played with."""
    try:
        return str(json.loads(file.read_bytes())["dataset"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        raise CheckpointError(f"{file} is damaged: it is not the record of a run's dataset and model") from None


# Accuracies ----------------------------------------------------------------------------------------------------------


def _evaluation_notes(evaluation: _Evaluation | None, results: _Results | None, rounds: int) -> list[str]:
    """Return what the evaluation warned of; one of another round is named, and of a finished run it does not count."""
    if evaluation is None or evaluation.round == rounds:
        return list(evaluation.warnings) if evaluation else []
    measured = f"{EVALUATION} is of its model after round {evaluation.round}"
    if results:
        return [f"{measured}, not {rounds}, and does not count: measure again"]
    return [measured, *evaluation.warnings]


def _accuracies(results: _Results | None, evaluation: _Evaluation | None) -> dict[Kind, dict[str, Measured]]:
    """Return all that was measured: the closing summary, and beside it what was evaluated later of the same model."""
    current = evaluation is not None and (results is None or evaluation.round == results.rounds)
    found: dict[Kind, dict[str, Measured]] = {kind: {} for kind in KINDS}
    for source in (evaluation if current else None, results):
        for kind, cells in source.by_kind().items() if source else ():
            found[kind] |= cells
    return found


def _last_evaluated(records: Sequence[Record], journal: Path) -> Reached | None:
    """Return the latest evaluation of a run that is not finished."""
    for record in reversed(records):
        if record.get("samples"):
            return _of_record(TypeAdapter(Reached), record, record, journal)
    return None


# Time and memory -----------------------------------------------------------------------------------------------------

_COSTS = TypeAdapter(dict[str, _ClientCost])


def _costs(records: Sequence[Record], journal: Path) -> list[list[_ClientCost]] | None:
    """Return the clients' costs, round by round; None where a round has no record of them."""
    if not all("times" in record for record in records):
        return None
    return [list(_of_record(_COSTS, record["times"], record, journal).values()) for record in records]


def _of_record(kind: TypeAdapter[T], value: object, record: Record, journal: Path) -> T:
    """Return a part of a round's record."""
    where = f"round {record['round']} of the journal {journal} is damaged"
    return _checked(lambda: kind.validate_python(value), where, "Restore the file, or leave this run out")


def _time(records: Sequence[Record], costs: Sequence[Sequence[_ClientCost]]) -> Time:
    """Return the time of a run: a round lasts as long as its slowest client, and its slowest link on its own."""
    seconds = simulated_seconds(records)
    links = sum(max(cost.communication_s for cost in clients) for clients in costs if clients)
    return Time(seconds["computation_s"], seconds["access_s"], links)


def _memory(records: Sequence[Record]) -> Memory | None:
    found = training_memory(records)
    return Memory(int(found["least_bytes"]), int(found["peak_bytes"])) if found else None


def _wire(records: Sequence[Record], journal: Path) -> Wire | None:
    counted = [record for record in records if "wire" in record]
    for record in counted:
        _of_record(TypeAdapter(Wire), record["wire"], record, journal)
    found = wire_bytes(counted)
    return Wire(**found) if found else None


def _wire_rounds(records: Sequence[Record]) -> tuple[RoundWire, ...]:
    """Return the rounds one by one, where the bytes of any were counted."""
    if not any("wire" in record for record in records):
        return ()
    return tuple(
        RoundWire(record["round"], Wire(**found) if (found := wire_bytes([record])) else None, fault_count([record]))
        for record in records
    )
