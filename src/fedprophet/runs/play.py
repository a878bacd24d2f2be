"""A run is played round by round; it can be stopped at any moment, and continues where it was."""

import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from fedprophet.errors import CheckpointError, TemporaryFileError, TrainingError
from fedprophet.going_on import how_to_resume
from fedprophet.methods.base import MethodState
from fedprophet.runs.asking import WatchedEngine
from fedprophet.runs.beginning import check_inputs
from fedprophet.runs.engine_history import EngineUse, change, engine_in_use, spans
from fedprophet.runs.export import exported_model, write_tensors
from fedprophet.runs.files import RunFiles, is_finished, model_fits, other_model, read_results, resume_hint
from fedprophet.runs.folder import FolderContents, read_identity
from fedprophet.runs.journal import Journal, timings_of
from fedprophet.runs.observer import Observer
from fedprophet.runs.run import Run, RunStoppedError, checkpoints_of
from fedprophet.runs.setup import note_setup
from fedprophet.runs.summary import closing_summary, faulty_clients
from fedprophet.server.coordinator import Record, play_round
from fedprophet.storage.beside import Beside
from fedprophet.storage.files import is_deployed, write_json
from fedprophet.storage.locks import folder_lock

FAILURES_ALLOWED = 3
"""A run stops after this many rounds in a row without a usable update."""


def play(run: Run, observer: Observer | None = None) -> Mapping[str, Any]:
    """Play rounds until the run is finished; return the closing summary."""
    observer = observer or Observer()
    path = run.files.path

    def refuse() -> None:
        raise CheckpointError(f"another process is working on {path}: wait for it, or stop it first")

    with _told_how_to_resume(path), closing(run.session), folder_lock(path, refuse):
        with closing(_Keeper(run, check_inputs(run.files, run.session))) as keeper:
            observer.started(run.session, path, run.state.round)
            for note in (*run.notes, *_engine_change(run)):
                observer.note(note)
            state = _play_rounds(run, keeper, observer)
        if not is_finished(run.files) or _model_is_another(run.files, observer):
            observer.finishing()
            _finish(replace(run, state=state), observer)
    results = read_results(path)
    observer.finished(results)
    return results


@contextmanager
def _told_how_to_resume(path: Path) -> Iterator[None]:
    """Let an error of a temporary file say how the run goes on, once there is room."""
    try:
        yield
    except TemporaryFileError as error:
        raise TemporaryFileError(f"{error}. {resume_hint(path)}") from error


def _engine_change(run: Run) -> Iterator[str]:
    """Say if the next rounds run on a different engine from the last ones, as on another machine."""
    if not run.session.method.finished(run.state):
        played = (line for line in timings_of(run.files).read() if line["round"] <= run.state.round)
        text = change(spans(played), engine_in_use(run.session, run.files.path))
        yield from [text] if text else []


def _model_is_another(files: RunFiles, observer: Observer) -> bool:
    """Whether a finished run's model has to be made again; refused if it was made with real devices."""
    if model_fits(files):
        return False
    if is_deployed(files.path):
        raise other_model(files)
    observer.note(f"{files.model} was altered: it is made again from the checkpoint")
    return True


def _play_rounds(run: Run, keeper: "_Keeper", observer: Observer) -> MethodState:
    method, path = run.session.method, run.files.path
    engine = WatchedEngine(run.session.engine, observer.task_done)
    state = run.state
    if not method.finished(state):
        keeper.forget_results()
        note_setup(run)
    try:
        while not method.finished(state):
            began = time.monotonic()
            played, record = play_round(method.round(state), engine)
            seconds = time.monotonic() - began
            use = engine_in_use(run.session, path)  # real devices are known once a task went out
            keeper.note(record, seconds, use)
            state = played  # only now: a Ctrl-C before must not save a state whose journal line is missing
            observer.round_done(record, seconds)
            if state.failures >= FAILURES_ALLOWED and not state.refreshed:
                raise _failing(state, path, record, keeper.proven(state))
            if method.finished(state) or state.round % run.session.config.checkpoint.every == 0:
                keeper.save(state)
    except TrainingError:
        keeper.save(state)
        raise
    except KeyboardInterrupt:
        keeper.save(state)
        raise _stopped(f"after round {state.round}" if state.round else "in its first round", path) from None
    return state


class _Keeper:
    """Writes what a run leaves: the lines of each round, and checkpoints beside the rounds that follow them.

    In a checkpoint's turn the clients' layers come first, then the state that refers to them.
    """

    def __init__(self, run: Run, inputs: Mapping[str, str]) -> None:
        self._files, self._inputs = run.files, inputs
        self._layers, self._checkpoints = run.session.layers, checkpoints_of(run.files, run.session.config)
        self._saved = run.state.round
        # First: a checkpoint without its journal could not be resumed, a journal that is too long can.
        self._checkpoints.drop_after(self._saved)
        self._journal, self._timings = Journal(run.files.journal), timings_of(run.files)
        self._journal.truncate(self._saved, run.contents.journal if run.contents else None)
        self._timings.truncate(self._saved)
        self._writer = Beside("checkpoints")
        self._held_up, self._ended = 0.0, time.monotonic()

    def forget_results(self) -> None:
        """Remove what a finished run made: it went back, and makes it again."""
        for file in (self._files.results, self._files.model):
            file.unlink(missing_ok=True)

    def proven(self, state: MethodState) -> int | None:
        """Return the checkpoint from which training has certainly gone on."""
        self._writer.wait()
        return self._checkpoints.newest(state.proven)

    def note(self, record: Record, seconds: float, use: EngineUse) -> None:
        """Write a round's line of the journal, and what it has cost since the end of the round before it."""
        began = time.monotonic()
        self._journal.append(record)
        now = time.monotonic()
        spent = {
            "seconds": seconds,
            "journal_seconds": now - began,
            "checkpoint_seconds": self._held_up,
            "total_seconds": now - self._ended,
        }
        self._held_up, self._ended = 0.0, now
        rounded = {name: round(value, 4) for name, value in spent.items()}
        self._timings.append({"round": record["round"], **rounded, **asdict(use)})

    def save(self, state: MethodState) -> None:
        """Begin to write a checkpoint of the state as it is now, when the one before it is written."""
        if state.round == self._saved:
            return
        began = time.monotonic()
        self._writer.wait()
        write_layers = self._layers.changes()
        contents, best = self._contents(state.round), state.best.round if state.best else None
        write_state = self._checkpoints.prepare(state, state.round, contents, state.proven, best)

        def write() -> None:
            write_layers()
            write_state()

        self._writer.begin(write)
        self._saved = state.round
        self._held_up += time.monotonic() - began

    def close(self) -> None:
        """Wait until everything is on the disk."""
        self._writer.close()

    def _contents(self, round: int) -> FolderContents:
        return FolderContents(
            clients=self._layers.digests(round),
            journal=self._journal.mark(round),
            timings=self._timings.mark(round),
            inputs=self._inputs,
            flower=read_identity(self._files),
        )


def _failing(state: MethodState, path: Path, record: Record, proven: int | None) -> TrainingError:
    reasons = "; ".join(f"client {client}: {', '.join(why)}" for client, why in faulty_clients(record).items())
    if "too_few" in record:
        few = record["too_few"]
        reasons = f"{few['usable']} of at least {few['minimum']}" + (f"; {reasons}" if reasons else "")
    back = "" if proven is None else f". If updates have spoilt the model, go back with: {how_to_resume(path, proven)}"
    return TrainingError(
        f"{state.failures} rounds in a row had no usable update ({reasons or 'no answers'}). The run is stopped "
        f"with its checkpoint of round {state.round} in {path}. A new run with a lower train.learning_rate usually "
        f"helps. {resume_hint(path)}, which tries further rounds{back}"
    )


def _finish(run: Run, observer: Observer) -> None:
    """Evaluate the trained model, write it, and write the closing summary last: it marks the run as finished."""
    engine = WatchedEngine(run.session.engine, observer.task_done)
    try:
        # Clients are asked for their layers only once: over a network these are large.
        record: Record = {}
        whole = exported_model(run.session, run.state, engine, record)
        summary = closing_summary(run, engine, whole, record)
        digest_of_model = write_tensors(run, whole, run.files.model)
        write_json(run.files.results, {**summary, "model_digest": digest_of_model})
    except KeyboardInterrupt:
        raise _stopped("in its closing evaluation", run.files.path) from None


def _stopped(when: str, path: Path) -> RunStoppedError:
    return RunStoppedError(f"stopped {when}; nothing is lost. {resume_hint(path)}")
