"""What a tracker is, and the table of them."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fedprophet.errors import CheckpointError, ConfigError, unknown
from fedprophet.runs.files import RunFiles, read_json
from fedprophet.storage.files import write_json


@dataclass(frozen=True)
class TrackedRun:
    """A run as a tracker is told of it: its name, its folder, and its configuration by flat keys (`train.batch`)."""

    name: str
    path: Path
    config: Mapping[str, Any]
    round: int
    """The round that it goes on after, 0 at its beginning: what was logged of later rounds is played again."""

    def recall(self, tracker: str) -> Mapping[str, Any]:
        """Return what a tracker has remembered; nothing if the file is lost or damaged."""
        return self._remembered().get(tracker, {})

    def remember(self, tracker: str, **ids: Any) -> None:
        """Keep what a tracker needs to go on with its log when the run is resumed."""
        write_json(RunFiles(self.path).tracking, {**self._remembered(), tracker: ids})

    def _remembered(self) -> dict[str, Mapping[str, Any]]:
        with suppress(OSError, CheckpointError):
            found = read_json(RunFiles(self.path).tracking)
            return {name: ids for name, ids in found.items() if isinstance(ids, dict)}
        return {}


class Tracker:
    """Is told the numbers of a run, to log them somewhere. It does nothing with them; trackers override what they need.

    An error of `start` is said before anything is trained. One that comes later does not stop the training: the tracker
    is told nothing more.
    """

    def start(self, run: TrackedRun) -> str | None:
        """The run begins, or goes on. Return where people can look at the log, if anywhere."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """The numbers of a round are known; `step` is the round."""

    def finish(self, results: Mapping[str, float] | None) -> None:
        """The run is finished, with its closing accuracies; None: it was stopped, and can be resumed."""


@dataclass(frozen=True)
class TrackerEntry:
    """A tracker, its line of help, and the extra of the package that installs what it needs."""

    make: Callable[[], Tracker]
    help: str
    extra: str


T = TypeVar("T", bound=type[Tracker])
TRACKERS: dict[str, TrackerEntry] = {}
"""Every tracker by its name on the command line."""


def tracker(name: str, help: str, extra: str) -> Callable[[T], T]:
    """Make a class a tracker that `--log` can name. Its constructor imports what may not be installed."""

    def register(kind: T) -> T:
        TRACKERS[name] = TrackerEntry(kind, help, extra)
        return kind

    return register


def open_trackers(wanted: str | Tracker | Iterable[str | Tracker], said: str = "log") -> list[Tracker]:
    """Return the trackers of some names, and those that are given; raise ConfigError if one is not installed.

    `said` is how they were asked for, in errors.
    """
    several = [wanted] if isinstance(wanted, str | Tracker) or not isinstance(wanted, Iterable) else wanted
    once = {each if isinstance(each, str) else id(each): each for each in several}
    return [_open(each, said) for each in once.values()]


def _open(wanted: object, said: str) -> Tracker:
    if isinstance(wanted, Tracker):
        return wanted
    if not isinstance(wanted, str):
        raise ConfigError(f"{said}: {wanted!r} is neither a name, such as 'tensorboard', nor a fedprophet.Tracker")
    return _named(wanted, said)


def _named(name: str, said: str) -> Tracker:
    if name not in TRACKERS:
        raise ConfigError(f"{said}: {unknown('tracker', name, TRACKERS)}")
    entry = TRACKERS[name]
    try:
        return entry.make()
    except ImportError as error:
        install = f"pip install 'fedprophet[{entry.extra}]'"
        raise ConfigError(f"{said} {name}: what it needs is not installed ({error}): {install}") from None
