"""The one model that anyone can load: shared parameters, and one set of norm layers for all clients."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from fedprophet.config.config import Config
from fedprophet.errors import ConfigError
from fedprophet.messages.answers import Reported
from fedprophet.methods.base import MethodState
from fedprophet.runs.asking import in_order
from fedprophet.runs.files import RunFiles, model_fits, other_model
from fedprophet.runs.run import Run
from fedprophet.runs.session import Session
from fedprophet.server.coordinator import Engine, Record
from fedprophet.storage.files import file_hash, tensors_to_bytes, write_atomic
from fedprophet.version import __version__

OTHER_FORMATS = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".onnx", ".npz", ".h5")
"""How the names of models in other formats end."""


def exported_model(
    session: Session, state: MethodState, engine: Engine, record: Record | None = None
) -> Mapping[str, Tensor]:
    """Return the whole model under its state-dict names, with the clients' averaged layers.

    Clients whose layers cannot be used are noted in `record`.
    """
    local = state.norm_layers or average_local(session, state, engine, record)
    return {**session.method.exported(state.judged, local), **state.norm_layers}


def average_local(
    session: Session, state: MethodState, engine: Engine, record: Record | None = None
) -> Mapping[str, Tensor]:
    """Return one set of norm layers: those of the clients that have trained some, joined by the run's rule."""
    if not session.world.initial_layers:
        return {}
    answers = in_order(session.method.layer_reports(state), engine, Reported)
    return session.method.joined_layers(answers, {} if record is None else record)


def write_model(run: Run, path: Path) -> None:
    """Write a run's model as one file; a run on other machines exported it when it ended."""
    expect_replaceable(path)
    if run.away:
        write_atomic(path, finished_model(run))
    else:
        write_tensors(run, exported_model(run.session, run.state, run.session.engine), path)


def expect_replaceable(path: Path) -> None:
    """Raise ConfigError where an exported model would take the place of something else, or of a run's own model.

    So it does under the name of another format, by which programs would read it.
    """
    if path.suffix.lower() in OTHER_FORMATS:
        raise ConfigError(
            f"{path}: models are exported as safetensors, and {path.suffix} is the name of another format. Give a file "
            f"such as {path.with_suffix('.safetensors')}"
        )
    beside = RunFiles(path.parent)
    if path.name == beside.model.name and beside.config.exists():
        raise ConfigError(f"{path} is a run's own file, and stays as it is. Give another file")
    if path.is_dir():
        raise ConfigError(f"{path} is a folder. Give the file to write, such as {path / 'model.safetensors'}")
    if path.is_file() and not _is_exported(path):
        raise ConfigError(f"{path} is not a model that fedprophet exported, and stays as it is. Give another file")


def _is_exported(path: Path) -> bool:
    try:
        with safe_open(path, framework="pt") as file:
            return "norm_layers" in (file.metadata() or {})
    except (SafetensorError, OSError):
        return False


def _training(config: Config) -> Iterator[tuple[str, str]]:
    """Yield what a model's user should know of its training, where it is not as in the paper."""
    if config.horizon_rounds:
        yield "averaged_rounds", f"up to {config.horizon_rounds}"  # the best round may have been an earlier one
    if config.train.calibration != "none":
        yield from (("calibration", config.train.calibration), ("smoothing", str(config.train.smoothing)))


def about_exported(path: Path) -> dict[str, Any]:
    """Return what the metadata of an exported model say, and the digest of the file."""
    with safe_open(path, framework="pt") as file:
        said = dict(file.metadata())
    del said["format"]
    numbers = {"classes": int, "rounds": int, "smoothing": float}
    documents = dict.fromkeys(("options", "normalize_mean", "normalize_std"), json.loads)
    read: Mapping[str, Callable[[str], Any]] = {"input": _shape, **numbers, **documents}
    about = {key: read[key](value) if key in read else value for key, value in said.items()}
    with path.open("rb") as content:
        return {**about, "digest": hashlib.file_digest(content, file_hash).hexdigest()}


def _shape(text: str) -> list[int]:
    return [int(side) for side in text.split("x")]


def finished_model(run: Run) -> bytes:
    """Return the file that a finished run has exported, if it is whole."""
    if not model_fits(run.files):
        raise other_model(run.files)
    return run.files.model.read_bytes()


def write_tensors(run: Run, whole: Mapping[str, Tensor], path: Path) -> str:
    """Write a model under its state-dict names, with metadata on what it is and how to feed it; return its digest."""
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
        "norm_layers": session.method.layers_of(run.state)["global"],
        "rounds": str(run.state.round),
        **dict(_training(session.config)),
    }
    content = tensors_to_bytes(whole, metadata)
    write_atomic(path, content)
    return file_hash(content).hexdigest()
