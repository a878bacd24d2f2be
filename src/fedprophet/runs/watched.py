"""A run's folder while another process writes it: read again and again, never written, without data or model."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fedprophet.runs.files import RunFiles, is_finished
from fedprophet.runs.journal import JournalTail
from fedprophet.runs.outline import Outline, read_outline
from fedprophet.runs.run import expect_run
from fedprophet.server.coordinator import Record
from fedprophet.storage.files import is_deployed
from fedprophet.storage.locks import is_locked

State = Literal["working", "finishing", "stopped", "unknown", "finished"]
"""Whether a process is working on a run, on its rounds or on the closing evaluation; unknown: that cannot be seen."""
STILL_SECONDS, STILL_ROUNDS = 2.0, 3
"""Without a lock, a run stands still if nothing has come for so many seconds: a process that just begins has none yet.
Where rounds come although no lock is seen, as from another machine, nothing must have come for so many rounds' time."""


@dataclass(frozen=True)
class Look:
    """A run as its folder shows it now."""

    state: State
    outline: Outline
    records: Sequence[Record]
    seconds: Mapping[int, float]
    """How long rounds took, by their number, as far as that is known."""
    since: float
    """Seconds since the last round came, or since the run was begun."""
    deployed: bool

    @property
    def round(self) -> int:
        """The newest round; 0 before the first."""
        return int(self.records[-1]["round"]) if self.records else 0


class WatchedRun:
    """A run's folder to look at; CheckpointError if it holds no run."""

    def __init__(self, path: Path) -> None:
        expect_run(path)
        self.files = RunFiles(path)
        self._journal, self._timings = JournalTail(self.files.journal), JournalTail(self.files.timings, forgiving=True)
        self._outline = read_outline(self.files)
        newest = self.files.journal if self.files.journal.exists() else self.files.config
        # Another machine's clock may be ahead.
        self._changed = time.monotonic() - max(0.0, time.time() - newest.stat().st_mtime)
        self._lock_seen = self._grew_unlocked = False
        self._journal.look()

    def look(self) -> Look:
        """Return the run as it is now; of its journal only what is new is read."""
        locked = is_locked(self.files.path)  # first: when the lock is free, all that its holder wrote is there
        if self._journal.look():
            self._changed = time.monotonic()
            self._grew_unlocked |= not locked
        self._lock_seen |= bool(locked)
        self._timings.look()
        if self._outline.whole is None and self.files.setup.exists():
            self._outline = read_outline(self.files)
        lines = ((line["round"], line.get("seconds")) for line in self._timings.records)
        seconds = {number: float(value) for number, value in lines if isinstance(value, int | float)}
        records = self._journal.records
        # The time of a round is written just behind its line: the newest waits for it.
        if locked and records and records[-1]["round"] not in seconds:
            records = records[:-1]
        since = time.monotonic() - self._changed
        state = self._state(locked, since > self._patience(seconds), records)
        return Look(state, self._outline, tuple(records), seconds, since, is_deployed(self.files.path))

    def _patience(self, seconds: Mapping[int, float]) -> float:
        """Return for how long nothing may come without a lock."""
        if self._lock_seen:
            return 0.0  # it is seen here, and it is free
        rounds = STILL_ROUNDS * max(list(seconds.values())[-STILL_ROUNDS:], default=0.0)
        return max(STILL_SECONDS, rounds if self._grew_unlocked else 0.0)

    def _state(self, locked: bool | None, still: bool, records: Sequence[Record]) -> State:
        if is_finished(self.files):
            return "finished"
        if not locked and still:
            return "stopped" if locked is False else "unknown"
        return "finishing" if records and self._outline.place(records[-1]) == self._outline.total else "working"
