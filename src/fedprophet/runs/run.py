"""A run is a directory. This is its life: started, played round by round, stopped at any moment, resumed, finished."""

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fedprophet.cascade.atoms import Chain
from fedprophet.config.config import Config, load_config, to_toml
from fedprophet.data.dataset import Dataset
from fedprophet.engines import make_engine
from fedprophet.errors import CheckpointError, ConfigError, TrainingError
from fedprophet.messages.modules import digest
from fedprophet.messages.task import TaskKind
from fedprophet.methods.base import MethodState
from fedprophet.runs.checkpoint import Checkpoints
from fedprophet.runs.engine_history import carrier_of, change, spans
from fedprophet.runs.journal import Journal
from fedprophet.runs.results import (
    Evaluator,
    Watched,
    cells,
    conditions,
    exported_model,
    fault_count,
    faulty_clients,
    simulated_seconds,
    training_memory,
    wire_bytes,
)
from fedprophet.runs.session import CUSTOM, EngineMaker, Session, assemble
from fedprophet.server.coordinator import Record, hold
from fedprophet.storage.files import IDENTITY, how_to_resume, is_deployed, tensors_to_bytes, write_atomic
from fedprophet.version import __version__

FAILURES_ALLOWED = 3
"""So many rounds in a row without a usable update stop a run."""


class Observer(Protocol):
    """Who watches a run: a live display, plain lines, or nobody."""

    def started(self, session: Session, path: Path, round: int) -> None: ...

    def note(self, text: str) -> None: ...

    def task_done(self, kind: TaskKind, done: int, total: int) -> None: ...

    def round_done(self, record: Record, seconds: float) -> None: ...

    def finishing(self) -> None: ...


class Silent:
    """Nobody watches."""

    def started(self, session: Session, path: Path, round: int) -> None:
        """Say nothing."""

    def note(self, text: str) -> None:
        """Say nothing."""

    def task_done(self, kind: TaskKind, done: int, total: int) -> None:
        """Say nothing."""

    def round_done(self, record: Record, seconds: float) -> None:
        """Say nothing."""

    def finishing(self) -> None:
        """Say nothing."""


class RunStoppedError(TrainingError):
    """The user stopped the run; its checkpoint is written."""


@dataclass(frozen=True)
class RunFiles:
    """Where a run keeps what."""

    path: Path

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.toml"

    @property
    def inputs(self) -> Path:
        """Fingerprints of the data and the model that the run was started with."""
        return self.path / "inputs.json"

    @property
    def journal(self) -> Path:
        """One JSON line for each round; the same configuration gives the same bytes."""
        return self.path / "journal.jsonl"

    @property
    def timings(self) -> Path:
        """Wall-clock seconds of each round, and which engine carried it out."""
        return self.path / "timings.jsonl"

    @property
    def checkpoints(self) -> Path:
        """The newest states of the server."""
        return self.path / "checkpoints"

    @property
    def flower(self) -> Path:
        """By which id the nodes of Flower know the run; other engines make none."""
        return self.path / IDENTITY

    @property
    def clients(self) -> Path:
        """The clients' own layers."""
        return self.path / "clients"

    @property
    def model(self) -> Path:
        """The trained model."""
        return self.path / "model.safetensors"

    @property
    def results(self) -> Path:
        """The closing summary."""
        return self.path / "results.json"


@dataclass(frozen=True)
class Run:
    """An opened run: its files, its parts and its newest state."""

    files: RunFiles
    session: Session
    state: Any
    notes: tuple[str, ...] = ()
    away: bool = False
    """Whether its clients are on other machines, where this process cannot ask them."""


def start(
    config: Config,
    out: Path | None = None,
    model: nn.Module | Chain | None = None,
    dataset: Dataset | None = None,
    engine: EngineMaker = make_engine,
) -> Run:
    """Create a run directory for a configuration; nothing is trained yet. `engine` makes the engine of the run."""
    config = config.model_copy(update={"threads": config.threads or torch.get_num_threads()})
    if model is not None:
        config = config.model_copy(update={"model": config.model.model_copy(update={"name": CUSTOM})})
    if dataset is not None:
        config = config.model_copy(update={"data": config.data.model_copy(update={"name": CUSTOM})})
    path = out if out is not None else _free_name(Path("runs"), f"{config.data.name}-{config.method}")
    files = RunFiles(path)
    if files.config.exists():
        raise ConfigError(f"{path} already holds a run. {_resume(path)}, or give another folder with --out")
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{path} is a file. Give a folder with --out")
    # What a kill at the very start leaves is nothing to lose.
    if path.exists() and any(file.name != ".config.toml.tmp" for file in path.iterdir()):
        raise ConfigError(f"{path} is not empty. Give another folder with --out")
    # Everything the user may have got wrong is found before anything is written.
    session = assemble(config, files.clients, model, dataset, engine)
    write_atomic(files.config, to_toml(config).encode())
    return Run(files, session, session.method.initial(), session.notes)


def reopen(
    path: Path,
    model: nn.Module | Chain | None = None,
    dataset: Dataset | None = None,
    engine: EngineMaker = make_engine,
) -> Run:
    """Open a run directory at its newest whole checkpoint."""
    _check_folder(path)
    if engine is make_engine and is_deployed(path):
        raise CheckpointError(
            f"the clients of the run in {path} are on other machines, with what they have learnt of their own. "
            f"{_resume(path)}, with Flower, where it was started"
        )
    return _opened(path, model, dataset, engine)


def open_to_read(path: Path, model: nn.Module | Chain | None = None, dataset: Dataset | None = None) -> Run:
    """Open a run directory to look at what was trained; of a run on other machines it must be finished.

    Its clients cannot be asked from here, and until they have been, at the end, there is no model for everybody.
    """
    _check_folder(path)
    away = is_deployed(path)
    files = RunFiles(path)
    if away and not (files.results.exists() and files.model.exists()):
        raise CheckpointError(
            f"the run in {path} is not finished, and its clients are on other machines, with layers of their own: "
            f"there is a model when it has ended. {_resume(path)}"
        )
    return replace(_opened(path, model, dataset, make_engine), away=away)


def _check_folder(path: Path) -> None:
    if not RunFiles(path).config.exists():
        raise CheckpointError(f"there is no run in {path}: it has no config.toml. Start one with: fedprophet train")


def _opened(path: Path, model: nn.Module | Chain | None, dataset: Dataset | None, engine: EngineMaker) -> Run:
    files = RunFiles(path)
    session = assemble(load_config(files.config), files.clients, model, dataset, engine)
    checkpoints = _checkpoints(files, session)
    if not checkpoints.present():
        return Run(files, session, session.method.initial(), session.notes)
    state, _, notes = checkpoints.load(session.method.state)
    return Run(files, session, state, (*session.notes, *notes))


def play(run: Run, observer: Observer | None = None) -> Mapping[str, Any]:
    """Play rounds until the run is finished; return the closing summary."""
    observer = observer or Silent()
    with closing(run.session), _alone(run.files.path):
        _check_inputs(run)
        observer.started(run.session, run.files.path, run.state.round)
        for note in (*run.notes, *_engine_change(run)):
            observer.note(note)
        state = _play_rounds(run, observer)
        if not (run.files.results.exists() and run.files.model.exists()):
            observer.finishing()
            _finish(Run(run.files, run.session, state), observer)
    return read_results(run.files.path)


def _engine_change(run: Run) -> Iterator[str]:
    """Say that the rounds to come have another engine than those before, as on another machine."""
    if not run.session.method.finished(run.state):
        played = (line for line in Journal(run.files.timings).read() if line["round"] <= run.state.round)
        text = change(spans(played), carrier_of(run.session, run.files.path))
        yield from [text] if text else []


def _check_inputs(run: Run) -> None:
    """Refuse to go on with other data or another model to start from; who plays first writes their fingerprints down.

    The configuration knows no more than a name of what was handed over.
    """
    file, session = run.files.inputs, run.session
    ours = {
        "dataset": session.dataset.digest(),
        "model": digest({**session.world.initial_model(), **session.initial_local}),
    }
    if not file.exists():
        write_atomic(file, (json.dumps(ours, indent=2) + "\n").encode())
    theirs = _read_json(file)
    different = [name for name in ours if ours[name] != theirs.get(name)]
    if different:
        raise CheckpointError(
            f"{run.files.path} was started with another {' and another '.join(different)}: "
            "hand over the same again, or start a new run"
        )


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Keep a second process off a run's folder; the lock goes with the process, however that ends."""
    folder = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(f"another process is working on {path}: wait for it, or stop it first") from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(folder)


def _play_rounds(run: Run, observer: Observer) -> Any:
    session, method = run.session, run.session.method
    engine = Watched(session.engine, observer.task_done)
    journal, timings = Journal(run.files.journal), Journal(run.files.timings)
    journal.truncate(run.state.round)
    timings.truncate(run.state.round)
    keeper = _Keeper(_checkpoints(run.files, session), session, saved=run.state.round)
    state = run.state
    try:
        while not method.finished(state):
            began = time.monotonic()
            played, record = hold(method.round(state), engine)
            seconds = time.monotonic() - began
            journal.append(record)
            carrier = carrier_of(session, run.files.path)  # real devices are known once a task went out
            timings.append({"round": played.round, "seconds": round(seconds, 4), **asdict(carrier)})
            state = played  # only now: a Ctrl-C before must not save a state whose journal line is missing
            observer.round_done(record, seconds)
            _stop_if_failing(state, keeper, run.files.path, record)
            keeper.round_done(state, finished=method.finished(state))
    except TrainingError:
        keeper.save(state)
        raise
    except KeyboardInterrupt:
        keeper.save(state)
        raise _stopped(f"after round {state.round}" if state.round else "in its first round", run.files.path) from None
    return state


class _Keeper:
    """Writes a checkpoint when one is due: the clients' layers first, then the state that refers to them."""

    def __init__(self, checkpoints: Checkpoints, session: Session, saved: int) -> None:
        self._checkpoints = checkpoints
        self._session = session
        self._saved = saved

    def round_done(self, state: MethodState, finished: bool) -> None:
        if finished or state.round % self._session.config.checkpoint.every == 0:
            self.save(state)

    def save(self, state: MethodState) -> None:
        if state.round == self._saved:
            return
        self._session.layers.flush()
        self._checkpoints.save(state, state.round)
        self._saved = state.round


def _stop_if_failing(state: MethodState, keeper: _Keeper, path: Path, record: Record) -> None:
    if state.failures < FAILURES_ALLOWED:
        return
    keeper.save(state)
    reasons = "; ".join(f"client {client}: {', '.join(why)}" for client, why in faulty_clients(record).items())
    if "too_few" in record:
        few = record["too_few"]
        reasons = f"{few['usable']} of at least {few['minimum']}" + (f"; {reasons}" if reasons else "")
    raise TrainingError(
        f"{state.failures} rounds in a row had no usable update ({reasons or 'nobody answered'}). The run is stopped "
        f"with its checkpoint of round {state.round} in {path}. A new run with a lower train.learning_rate usually "
        f"helps. {_resume(path)}, which tries further rounds"
    )


def _finish(run: Run, observer: Observer) -> None:
    """Evaluate the trained model, write it, and write the closing summary last: it marks the run as finished."""
    engine = Watched(run.session.engine, observer.task_done)
    try:
        # Clients are asked for their layers once; over a network that is the whole of them.
        whole = exported_model(run.session, run.state, engine)
        summary = _summary(run, engine, whole)
        _write_tensors(run, whole, run.files.model)
        write_atomic(run.files.results, (json.dumps(summary, indent=2) + "\n").encode())
    except KeyboardInterrupt:
        raise _stopped("in its closing evaluation", run.files.path) from None


def _summary(run: Run, engine: Watched, whole: Mapping[str, Tensor]) -> dict[str, Any]:
    session, state = run.session, run.state
    attacks = ("clean", f"pgd{session.config.evaluate.steps}")
    records = Journal(run.files.journal).read()
    accuracies = cells(Evaluator(session, state, whole, engine).measure(attacks))
    closing_account = engine.account()
    return {
        "version": __version__,
        "method": session.config.method,
        "seed": session.config.seed,
        "rounds": state.round,
        "budget_bytes": session.budget,
        "whole_model_bytes": session.world.cost.total_memory,
        "modules": _module_rows(session),
        "memory": training_memory(records),
        "simulated": simulated_seconds(records),
        "engines": [span.to_json() for span in spans(Journal(run.files.timings).read())],
        **_wire(records),
        **({"closing": closing_account} if closing_account else {}),
        **session.method.results(state),
        **conditions(session),
        **accuracies,
    }


def _wire(records: Sequence[Record]) -> dict[str, Any]:
    """Return what the rounds moved over the wire, and how often an answer was missing, where an engine has counted.

    What the closing evaluation moved is no part of it, as in the journal: training of any kind ends with the same.
    """
    moved = wire_bytes(records)
    return {} if moved is None else {"wire": moved, "faults": fault_count(records)}


def _module_rows(session: Session) -> list[dict[str, Any]]:
    atoms = session.world.cost.atoms
    return [
        {
            "index": module.index + 1,
            "atoms": [atom.name for atom in atoms[module.first : module.last]],
            "layers": [layer for atom in atoms[module.first : module.last] for layer in atom.layers],
            "memory_bytes": module.memory,
        }
        for module in session.world.modules
    ]


def write_model(run: Run, path: Path) -> None:
    """Write the one model that everybody can load: state-dict names, one set of norm layers, how to feed it."""
    if run.away:
        write_atomic(path, run.files.model.read_bytes())
    else:
        _write_tensors(run, exported_model(run.session, run.state, run.session.engine), path)


def _write_tensors(run: Run, whole: Mapping[str, Tensor], path: Path) -> None:
    session, dataset = run.session, run.session.dataset
    mean, std = session.normalize.numbers
    metadata = {
        "format": "pt",
        "fedprophet": __version__,
        "model": session.config.model.name,
        "options": json.dumps(session.config.model.options),
        "input": "x".join(map(str, dataset.shape)),
        "classes": str(dataset.classes),
        "normalize_mean": json.dumps(mean),
        "normalize_std": json.dumps(std),
        "norm_layers": session.method.norm_layers,
        "rounds": str(run.state.round),
    }
    tensors = {name: value.contiguous() for name, value in whole.items()}
    write_atomic(path, tensors_to_bytes(tensors, metadata))


def read_results(path: Path) -> Mapping[str, Any]:
    """Return the closing summary of a finished run."""
    return _read_json(RunFiles(path).results)


def _read_json(file: Path) -> Mapping[str, Any]:
    try:
        table: Mapping[str, Any] = json.loads(file.read_bytes())
    except ValueError:
        raise CheckpointError(f"{file} is damaged. Delete it: it is made again. {_resume(file.parent)}") from None
    return table


def _checkpoints(files: RunFiles, session: Session) -> Checkpoints:
    return Checkpoints(files.checkpoints, session.config, keep=session.config.checkpoint.keep)


def _free_name(parent: Path, stem: str) -> Path:
    number = 1
    while (parent / f"{stem}-{number}").exists():
        number += 1
    return parent / f"{stem}-{number}"


def _stopped(when: str, path: Path) -> RunStoppedError:
    return RunStoppedError(f"stopped {when}; nothing is lost. {_resume(path)}")


def _resume(path: Path) -> str:
    return f"Go on with: {how_to_resume(path)}"
