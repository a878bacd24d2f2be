"""The observer that tells trackers what happens in a run."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from fedprophet.config.compare import flat
from fedprophet.errors import ConfigError
from fedprophet.runs.files import resume_hint
from fedprophet.runs.observer import Observer
from fedprophet.runs.session import Session
from fedprophet.server.coordinator import Record, RemoteEngine
from fedprophet.tracking.registry import TrackedRun, Tracker
from fedprophet.tracking.scalars import closing_scalars, round_scalars


class Tracking(Observer):
    """Tells trackers what happens. One that fails is told nothing more, and the user is told once (`say`)."""

    def __init__(self, trackers: Sequence[Tracker], say: Callable[[str], object]) -> None:
        self._waiting, self._say = trackers, say
        self._told: list[Tracker] = []
        self._simulated = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._finish(None)

    def started(self, session: Session, path: Path, round: int) -> None:
        self._simulated = not (isinstance(session.engine, RemoteEngine) and session.engine.remote)
        run = TrackedRun(path.absolute().name, path, dict(flat(session.config)), round)
        for tracker in self._waiting:
            try:
                place = tracker.start(run)
            except Exception as error:
                raise ConfigError(
                    f"{_name(tracker)} cannot begin to log: {_reason(error)}. Nothing was trained. Correct that, or "
                    f"log without it. {resume_hint(path)}"
                ) from error
            self._told.append(tracker)
            if place:
                self._say(f"{_name(tracker)}: {place}")

    def round_done(self, record: Record, seconds: float) -> None:
        values = round_scalars(record, seconds, self._simulated)
        self._tell(lambda tracker: tracker.scalars(record["round"], values))

    def finished(self, results: Mapping[str, Any]) -> None:
        self._finish(closing_scalars(results))

    def _finish(self, results: Mapping[str, float] | None) -> None:
        self._tell(lambda tracker: tracker.finish(results))
        self._told.clear()

    def _tell(self, what: Callable[[Tracker], None]) -> None:
        for tracker in tuple(self._told):
            try:
                what(tracker)
            except Exception as error:
                self._told.remove(tracker)
                self._say(f"{_name(tracker)} failed, and nothing more is logged there: {_reason(error)}")


def _name(tracker: Tracker) -> str:
    return type(tracker).__name__


def _reason(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0].rstrip('.')}" if text else type(error).__name__
