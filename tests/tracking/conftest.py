"""Very small runs that are logged, stopped and killed."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from fedprophet.config.config import Config
from fedprophet.runs.play import play
from fedprophet.runs.run import Run, reopen, start
from fedprophet.tracking import Tracker, Tracking, open_trackers

# Two modules, four rounds.
SMALL = {"rounds": 2, "memory.budget": "60%", "train.iterations": 1, "attack.steps": 1, "attack.feature_steps": 1}
SMALL |= {"population.clients": 20, "evaluate.clients": 2, "evaluate.steps": 1, "evaluate.batch": 400}
SMALL |= {"measure.clients": 2, "measure.steps": 1, "evaluate.test_samples": 40}
ROUNDS = 4


class Killed(BaseException):
    """The process is gone: nothing of ours may catch it."""


class KillAfter(Tracker):
    """Kills the process when the trackers before it have logged a round, of which there is no checkpoint yet."""

    def __init__(self, round: int) -> None:
        self.round = round

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        if step == self.round:
            raise Killed


@pytest.fixture
def small(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """The configuration of the smallest run; the current folder is the test's own."""
    monkeypatch.chdir(tmp_path)
    return tiny(SMALL)


@pytest.fixture
def logged(small: Config) -> Callable[..., Path]:
    """Return a function that trains in ./run with trackers, killed after a round, then resumed if that is asked for."""

    def train(*log: str | Tracker, killed_after: int | None = None, resumed: bool = True, **options: Any) -> Path:
        path = Path("run")
        if killed_after is not None:
            run = start(small, path)
            # A process that is gone does not close its trackers.
            with pytest.raises(Killed):
                play(run, Tracking([*open_trackers(log), KillAfter(killed_after)], print))
            run.session.close()
        if killed_after is None or resumed:
            opened: Run = start(small, path) if killed_after is None else reopen(path, **options)
            with Tracking(open_trackers(log), print) as tracking:
                play(opened, tracking)
        return path

    return train


@pytest.fixture
def journal() -> Callable[[Path], dict[int, dict[str, Any]]]:
    """Return a function that gives the records of a run by their round."""

    def read(path: Path) -> dict[int, dict[str, Any]]:
        records = map(json.loads, (path / "journal.jsonl").read_text().splitlines())
        return {record["round"]: record for record in records}

    return read
