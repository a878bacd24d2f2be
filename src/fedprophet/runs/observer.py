"""What a run tells while it is played."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedprophet.runs.session import Session
from fedprophet.server.coordinator import Record


class Observer:
    """Is told what happens in a run. It does nothing with it; displays override what they show."""

    def started(self, session: Session, path: Path, round: int) -> None:
        """The run begins, or continues after `round`."""

    def note(self, text: str) -> None:
        """There is something that the user should know."""

    def task_done(self, kind: str, done: int, total: int) -> None:
        """`done` of the `total` tasks that were sent out together are done."""

    def round_done(self, record: Record, seconds: float) -> None:
        """A round is over; `record` is its line of the journal."""

    def finishing(self) -> None:
        """The last round is over, and the closing evaluation begins."""

    def finished(self, results: Mapping[str, Any]) -> None:
        """The run is finished; `results` is its closing summary."""


class Observers(Observer):
    """Several observers, told one after the other."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def started(self, session: Session, path: Path, round: int) -> None:
        for observer in self._observers:
            observer.started(session, path, round)

    def note(self, text: str) -> None:
        for observer in self._observers:
            observer.note(text)

    def task_done(self, kind: str, done: int, total: int) -> None:
        for observer in self._observers:
            observer.task_done(kind, done, total)

    def round_done(self, record: Record, seconds: float) -> None:
        for observer in self._observers:
            observer.round_done(record, seconds)

    def finishing(self) -> None:
        for observer in self._observers:
            observer.finishing()

    def finished(self, results: Mapping[str, Any]) -> None:
        for observer in self._observers:
            observer.finished(results)
