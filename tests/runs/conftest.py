"""Runs of as little work as possible, each played once and then copied."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from fedprophet.runs.files import RunFiles
from fedprophet.runs.folder import FolderContents
from fedprophet.runs.journal import Mark
from fedprophet.runs.observer import Observer
from fedprophet.runs.play import play
from fedprophet.runs.run import RunStoppedError, start

# Two modules, four rounds.
SMALL = {"rounds": 2, "memory.budget": "60%", "train.iterations": 1, "attack.steps": 1, "attack.feature_steps": 1}
SMALL |= {"population.clients": 20, "evaluate.clients": 2, "evaluate.steps": 1, "evaluate.batch": 400}
SMALL |= {"measure.clients": 2, "measure.steps": 1, "evaluate.test_samples": 40}

NOTHING_KNOWN = FolderContents({}, Mark(0, ""), Mark(0, ""), {}, flower="")
"""What a checkpoint says of a folder that has nothing else, where a test is about the checkpoint alone."""


@pytest.fixture(scope="session")
def small() -> Mapping[str, Any]:
    """The settings of the smallest run."""
    return SMALL


def contents_of(path: Path) -> dict[str, bytes]:
    files = RunFiles(path)
    return {file.name: file.read_bytes() for file in (files.journal, files.model, files.results)}


@pytest.fixture(scope="session")
def contents() -> Callable[[Path], dict[str, bytes]]:
    """What two runs of the same configuration have in common, to the byte."""
    return contents_of


class Killed(BaseException):
    """The process is gone: nothing of ours may catch it."""


@pytest.fixture(scope="session")
def killed() -> type[BaseException]:
    return Killed


class Stop(Observer):
    """An observer that raises something at a moment of the run."""

    def __init__(
        self,
        error: type[BaseException] = KeyboardInterrupt,
        after_round: int | None = None,
        in_task: int | None = None,
        in_finish: bool = False,
    ) -> None:
        self.error, self.after_round, self.in_task, self.in_finish = error, after_round, in_task, in_finish
        self.tasks, self.finished = 0, False

    def task_done(self, kind: str, done: int, total: int) -> None:
        self.tasks += 1
        if self.tasks == self.in_task or (self.in_finish and self.finished):
            raise self.error

    def round_done(self, record: Mapping[str, Any], seconds: float) -> None:
        if record["round"] == self.after_round:
            raise self.error

    def finishing(self) -> None:
        self.finished = True


@pytest.fixture(scope="session")
def stop() -> type[Stop]:
    return Stop


@pytest.fixture(scope="session")
def _finished(tiny, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("finished") / "run"
    play(start(tiny(SMALL), path))
    return path


@pytest.fixture(scope="session")
def undisturbed(_finished) -> dict[str, bytes]:
    """What a run leaves that nobody disturbs; how often it writes a checkpoint makes no difference."""
    return contents_of(_finished)


@pytest.fixture
def finished(_finished, tmp_path) -> Path:
    """A copy of a finished run."""
    return shutil.copytree(_finished, tmp_path / "finished")


@pytest.fixture(scope="session")
def _stopped(tiny, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.raises(RunStoppedError):
        play(start(tiny(SMALL), path), Stop(after_round=3))
    return path


@pytest.fixture
def stopped(_stopped, tmp_path) -> Path:
    """A copy of a run that was stopped after its third round of four."""
    return shutil.copytree(_stopped, tmp_path / "stopped")
