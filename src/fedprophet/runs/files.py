"""The files of a run's folder."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedprophet.errors import CheckpointError
from fedprophet.going_on import how_to_resume
from fedprophet.storage.files import CONFIG, IDENTITY, file_hash, parse_json

NAMED = 3
"""The most runs in a folder that are named."""


class RunFiles:
    """Where a run keeps its files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / CONFIG
        """The resolved configuration."""
        self.inputs = path / "inputs.json"
        """Fingerprints of the data and the model that the run was started with."""
        self.start = path / "start.safetensors"
        """The weights that a model passed in from Python began with; models that are named draw the same again."""
        self.setup = path / "setup.json"
        """What the run consists of, and the machines it was played on; a run goes on with the modules that it names."""
        self.journal = path / "journal.jsonl"
        """One JSON line for each round; the same configuration gives the same bytes."""
        self.timings = path / "timings.jsonl"
        """Wall-clock seconds of each round, and the engine that it ran on."""
        self.tracking = path / "tracking.json"
        """The ids under which trackers go on with their logs of the run; without `--log` there is none."""
        self.checkpoints = path / "checkpoints"
        """The newest states of the server."""
        self.flower = path / IDENTITY
        """The id under which Flower's nodes know the run; other engines write none."""
        self.clients = path / "clients"
        """The clients' own layers."""
        self.model = path / "model.safetensors"
        """The trained model."""
        self.results = path / "results.json"
        """The closing summary."""
        self.report = path / "report.html"
        """The page that `fedprophet train` makes of a finished run."""


def no_run(path: Path, advice: str) -> CheckpointError:
    """Return the error of a folder that holds no run; one that holds folders of runs names some of them."""
    what = f"there is no run in {path}: it has no config.toml"
    within = sorted(file.parent for file in path.glob("*/config.toml"))
    if not within:
        return CheckpointError(f"{what}. {advice}")
    more = f" and {len(within) - NAMED} more" if len(within) > NAMED else ""
    named = ", ".join(map(str, within[:NAMED]))
    return CheckpointError(f"{what}. It is a folder of runs: {named}{more}. Give the folder of a run")


def read_results(path: Path) -> Mapping[str, Any]:
    """Return the closing summary of a finished run."""
    return read_json(RunFiles(path).results)


def is_finished(files: RunFiles) -> bool:
    """Whether a run has its results and its model."""
    return files.results.exists() and files.model.exists()


def model_fits(files: RunFiles) -> bool:
    """Whether a finished run's model is the one that its results are about."""
    recorded = read_results(files.path).get("model_digest")
    with files.model.open("rb") as file:
        return hashlib.file_digest(file, file_hash).hexdigest() == recorded


def other_model(files: RunFiles) -> CheckpointError:
    """Return the error of a finished run on real devices whose model was altered: it cannot be made again exactly."""
    return CheckpointError(
        f"{files.model} was altered: it is not the model that {files.results.name} is about. Put it back from a copy, "
        f"or delete {files.results.name} and let the devices be asked again. {resume_hint(files.path)}"
    )


def read_json(file: Path) -> Mapping[str, Any]:
    """Return the content of one of a run's JSON files; CheckpointError if it is damaged."""
    try:
        table = parse_json(file.read_bytes())
    except ValueError:
        table = None
    if not isinstance(table, dict):
        raise damaged(file)
    return table


def damaged(file: Path) -> CheckpointError:
    """Return the error of a JSON file that is not as it was written."""
    return CheckpointError(f"{file} is damaged. Delete it: it is made again. {resume_hint(file.parent)}")


def resume_hint(path: Path) -> str:
    """Return the sentence that tells how to resume a run."""
    return f"Resume it with: {how_to_resume(path)}"
