"""The journal: one line of strict JSON for each round, the same bytes for the same run."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedprophet.errors import CheckpointError
from fedprophet.going_on import how_to_resume
from fedprophet.runs.files import RunFiles
from fedprophet.storage.files import append_synced, file_hash, parse_json, write_atomic, write_error


@dataclass(frozen=True)
class Mark:
    """How a file begins: the digest of so many bytes."""

    bytes: int
    digest: str


class Journal:
    """A file of JSON lines. A kill can only tear the last one; call `truncate` before continuing after one.

    If no result depends on it, lines that are damaged can be left out instead of being an error (`forgiving`).
    """

    def __init__(self, path: Path, forgiving: bool = False) -> None:
        self._path = path
        self._forgiving = forgiving
        self._hasher = file_hash()
        self._bytes = 0
        self._marks: dict[int, Mark] = {}

    @property
    def _advice(self) -> str:
        """What to do if the file cannot be written."""
        return (
            "The run's checkpoints are intact. Make room there or correct its permissions, then go on with: "
            f"{how_to_resume(self._path.parent)}"
        )

    def append(self, record: Mapping[str, Any]) -> None:
        """Add the line of a round (record["round"]) and wait until it is on the disk."""
        line = journal_line(record)
        try:
            append_synced(self._path, line)
        except OSError as error:
            raise write_error(self._path, error, self._advice) from error
        self._count(line, record["round"])

    def mark(self, round: int) -> Mark:
        """Return the mark behind the line of a round: the one that `truncate` ended with, or one appended since."""
        return self._marks[round]

    def begins_with(self, mark: Mark) -> bool:
        """Whether the file still begins as it did when the mark was made."""
        content = self._content()[: mark.bytes]
        return (len(content), file_hash(content).hexdigest()) == (mark.bytes, mark.digest)

    def read(self) -> list[dict[str, Any]]:
        """Return the record of every whole line; numbers that JSON lacks are "nan", "inf" or "-inf"."""
        return [record for _, record in self._lines()]

    def truncate(self, round: int, mark: Mark | None = None) -> None:
        """Keep the lines of the rounds up to `round`, which end at `mark` if that is known; drop everything else."""
        content = self._content()
        kept = content[: mark.bytes] if mark else b"".join(line for line, r in self._lines() if r["round"] <= round)
        if kept != content:
            write_atomic(self._path, kept, self._advice)
        self._hasher, self._bytes = file_hash(), 0
        self._count(kept, round)

    def _count(self, data: bytes, round: int) -> None:
        self._hasher.update(data)
        self._bytes += len(data)
        self._marks[round] = Mark(self._bytes, self._hasher.hexdigest())

    def _content(self, first: int = 0) -> bytes:
        """Return what the file holds, from a byte on."""
        try:
            with self._path.open("rb") as file:
                file.seek(first)
                return file.read()
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise CheckpointError(f"cannot read the journal {self._path}: {error.strerror}") from error

    def _lines(self) -> list[tuple[bytes, dict[str, Any]]]:
        return self._parsed(self._content())

    def _parsed(self, content: bytes, before: int = 0) -> list[tuple[bytes, dict[str, Any]]]:
        """Return whole lines and their records; `before` lines came before them."""
        lines = content.split(b"\n")[:-1]
        pairs = []
        for number, line in enumerate(lines, start=1):
            record = _decode(line)
            if record is not None:
                pairs.append((line + b"\n", record))
            elif number < len(lines) and not self._forgiving:
                raise CheckpointError(
                    f"line {before + number} of the journal {self._path} is damaged: it is not a round's record"
                )
        return pairs


class JournalTail(Journal):
    """A journal that another process writes: each look reads only what is new. A line that is half written waits."""

    def __init__(self, path: Path, forgiving: bool = False) -> None:
        super().__init__(path, forgiving)
        self.records: list[dict[str, Any]] = []
        self._known: tuple[int, ...] | None = None
        self._end, self._last = 0, b""

    def look(self) -> bool:
        """Bring `records` up to date; return whether the file has changed. Rounds that it no longer has are dropped."""
        status = self._path.stat() if self._path.exists() else None
        found = (status.st_ino, status.st_size, status.st_mtime_ns) if status else None
        if found == self._known:
            return False
        self._known = found
        content = self._content(self._end - len(self._last))
        if not content.startswith(self._last):  # the run went back, and its journal was cut
            self.records, self._end, self._last = [], 0, b""
            content = self._content()
        news = content.removeprefix(self._last)
        pairs = self._parsed(news, len(self.records))
        if pairs:
            self.records += [record for _, record in pairs]
            self._last = pairs[-1][0]
            self._end += news.rindex(self._last) + len(self._last)
        return True


def timings_of(files: RunFiles) -> Journal:
    """Return the lines of timings.jsonl; no result depends on them."""
    return Journal(files.timings, forgiving=True)


def journal_line(record: Mapping[str, Any]) -> bytes:
    """Return a record as a line: keys in their order, no blanks, floats by their shortest exact digits."""
    if type(record.get("round")) is not int:
        raise TypeError("a record needs its round")
    return (json.dumps(_strict(record), separators=(",", ":"), allow_nan=False) + "\n").encode()


def _strict(value: Any) -> Any:
    """Replace the floats that JSON lacks by their names."""
    if isinstance(value, float) and not math.isfinite(value):
        return repr(float(value))
    if isinstance(value, Mapping):
        return {key: _strict(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(part) for part in value]
    return value


def _decode(line: bytes) -> dict[str, Any] | None:
    try:
        record = parse_json(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and type(record.get("round")) is int else None
