"""What a run tells while it is played."""

from pathlib import Path

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
