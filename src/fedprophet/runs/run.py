"""A run is a folder: it is started there, and opened again at its newest checkpoint."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from fedprophet.config.config import Config
from fedprophet.config.load import load_config
from fedprophet.config.reference import to_toml
from fedprophet.data.dataset import Dataset
from fedprophet.engines import cores, make_engine
from fedprophet.engines.registry import EngineMaker
from fedprophet.errors import CheckpointError, ConfigError, TrainingError
from fedprophet.messages.modules import kinds_of
from fedprophet.methods.base import MethodState
from fedprophet.runs.beginning import check_start, starting_weights
from fedprophet.runs.checkpoint import Checkpoints
from fedprophet.runs.files import RunFiles, is_finished, model_fits, no_run, resume_hint
from fedprophet.runs.folder import FolderContents, check_folder
from fedprophet.runs.idle import doubtful_notes, idle_notes
from fedprophet.runs.recorded import recorded_modules
from fedprophet.runs.session import OwnModel, Session, assemble
from fedprophet.settings.values import CUSTOM
from fedprophet.storage.files import is_deployed, write_atomic
from fedprophet.storage.locks import LOCK

LEFT_OVER = frozenset({".config.toml.tmp", LOCK})
"""What a kill at the very start may leave: a folder with no other files counts as empty."""


class RunStoppedError(TrainingError):
    """The user stopped the run; its checkpoint is written."""


@dataclass(frozen=True)
class Run:
    """An opened run: its files, its parts and its newest state."""

    files: RunFiles
    session: Session
    state: MethodState
    notes: tuple[str, ...] = ()
    away: bool = False
    """Whether its clients are on other machines, where this process cannot ask them."""
    contents: FolderContents | None = None
    """What its folder held when the state was saved; None before the first checkpoint."""


def checkpoints_of(files: RunFiles, config: Config) -> Checkpoints:
    """Return the checkpoints in a run's folder."""
    return Checkpoints(files.checkpoints, config, keep=config.checkpoint.keep)


def start(
    config: Config,
    out: Path | None = None,
    model: OwnModel = None,
    dataset: Dataset | None = None,
    engine: EngineMaker = make_engine,
) -> Run:
    """Create a run's folder for a configuration; nothing is trained yet. `engine` makes the engine of the run."""
    config = config.model_copy(update={"threads": cores(config)})
    if model is not None:
        config = config.model_copy(update={"model": config.model.model_copy(update={"name": CUSTOM})})
    if dataset is not None:
        config = config.model_copy(update={"data": config.data.model_copy(update={"name": CUSTOM})})
    numbered = (Path("runs", f"{config.data.name}-{config.method}-{number}") for number in count(1))
    files = RunFiles(out if out is not None else next(path for path in numbered if not path.exists()))
    _expect_empty(files)
    # All mistakes in the configuration are found before anything is written.
    session = assemble(config, files.clients, model, dataset, engine)
    session.layers.expect({})
    write_atomic(files.config, to_toml(config).encode())
    notes = (*session.notes, *idle_notes(session.world), *doubtful_notes(session.world))
    return Run(files, session, session.method.initial(), notes)


def _expect_empty(files: RunFiles) -> None:
    path = files.path
    if files.config.exists():
        raise ConfigError(f"{path} already holds a run. {resume_hint(path)}, or give another folder with --out")
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{path} is a file. Give a folder with --out")
    within = next((folder for folder in path.parents if folder.exists()), path)
    if within.is_file():
        raise ConfigError(f"{within} is a file, so that {path} cannot be made. Give another folder with --out")
    if path.exists() and any(file.name not in LEFT_OVER for file in path.iterdir()):
        raise ConfigError(f"{path} is not empty. Give another folder with --out")


def reopen(
    path: Path,
    model: OwnModel = None,
    dataset: Dataset | None = None,
    engine: EngineMaker = make_engine,
    round: int | None = None,
) -> Run:
    """Open a run's folder at its newest whole checkpoint, or at that of a round."""
    expect_run(path)
    if engine is make_engine and is_deployed(path):
        raise CheckpointError(
            f"the clients of the run in {path} are on other machines, and keep layers of their own there, so it "
            f"can only be resumed through Flower, on the machine where it was started. {resume_hint(path)}"
        )
    return _opened(path, model, dataset, engine, round)


def open_to_read(path: Path, model: OwnModel = None, dataset: Dataset | None = None) -> Run:
    """Open a run's folder to look at what was trained; a run on other machines must be finished.

    Its clients cannot be asked from here: their layers are in the exported model, which is made at the end.
    """
    expect_run(path)
    away = is_deployed(path)
    files = RunFiles(path)
    if away and not is_finished(files):
        raise CheckpointError(
            f"the run in {path} is not finished, and its clients are on other machines, with layers of their own: "
            f"the model is exported when the run ends. {resume_hint(path)}"
        )
    run = _opened(path, model, dataset, make_engine, to_read=True)
    return replace(run, away=away, notes=(*run.notes, *_about_model(files)))


def _about_model(files: RunFiles) -> Iterator[str]:
    with suppress(CheckpointError):  # of damaged results, on which nothing depends here
        if is_finished(files) and not model_fits(files):
            yield f"{files.model} was altered: it is not the model that {files.results.name} is about"


def expect_run(path: Path) -> None:
    """Refuse a folder that holds no run."""
    if not RunFiles(path).config.exists():
        raise no_run(path, "Start one with: fedprophet train")


def _expect_fitting(state: MethodState, session: Session, where: str, files: RunFiles, recorded: bool) -> None:
    """Refuse a state that is whole and yet none of this run's: its model is another, or no round can begin with it.

    So is a state of other modules, which is nobody's fault where no record says how the model was cut.
    """
    method, fits, other_modules = session.method, False, False
    with suppress(LookupError, TypeError, ValueError, ArithmeticError):
        if kinds_of(state.model) == kinds_of(state.best_model) == kinds_of(method.initial().model):
            other_modules = not method.fits(state)
            if not other_modules and not method.finished(state):
                next(method.round(state))
            fits = not other_modules
    if other_modules and not recorded:
        raise CheckpointError(
            f"{where} has other modules than this version cuts, and {files.setup}, which names them, is lost or "
            "damaged. Put it back from a copy, or go on with the version that began the run"
        )
    if not fits:
        raise CheckpointError(f"{where} does not fit this run: it was changed by hand. Put it back from a copy")


def _without_checkpoints(files: RunFiles) -> Iterator[str]:
    """Refuse a finished run that has lost its checkpoints; say that one begins anew which was stopped before any."""
    if files.results.exists() or files.model.exists():
        raise CheckpointError(
            f"{files.checkpoints} is lost: the run in {files.path} is finished, and there is no state of it left. Put "
            f"the folder back from a copy. {files.model.name} can still be used as it is"
        )
    if files.journal.exists():
        yield f"there is no checkpoint in {files.checkpoints}: the run begins with its first round again"


def _opened(
    path: Path,
    model: OwnModel,
    dataset: Dataset | None,
    engine: EngineMaker,
    round: int | None = None,
    to_read: bool = False,
) -> Run:
    files = RunFiles(path)
    config = load_config(files.config)
    checkpoints = checkpoints_of(files, config)
    recorded = recorded_modules(files) if checkpoints.present() else None
    weights = starting_weights(files) if model is not None else None
    session = assemble(config, files.clients, model, dataset, engine, recorded, weights)
    if not checkpoints.present() and not round:
        session.layers.expect({})
        return Run(files, session, session.method.initial(), (*session.notes, *_without_checkpoints(files)))
    state, number, notes, known = checkpoints.load(session.method.state, round)
    _expect_fitting(state, session, f"the checkpoint of round {number} in {path}", files, recorded is not None)
    check_start(files, session, known.inputs)
    more = check_folder(files, session.layers, known, to_read)
    return Run(files, session, state, (*session.notes, *notes, *more), contents=known)
