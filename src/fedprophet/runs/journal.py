"""The journal: one line of strict JSON for each round, the same bytes for the same run."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedprophet.errors import CheckpointError
from fedprophet.storage.files import append_synced, how_to_resume, parse_json, write_atomic, write_error


class Journal:
    """A file of JSON lines. A kill can only tear the last one; call `truncate` before continuing after one."""

    def __init__(self, path: Path) -> None:
        self._path = path

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

    def read(self) -> list[dict[str, Any]]:
        """Return the record of every whole line; numbers that JSON lacks are "nan", "inf" or "-inf"."""
        return [record for _, record in self._lines()]

    def truncate(self, round: int) -> None:
        """Keep the lines of the rounds up to `round`, and drop a torn last line."""
        if self._path.exists():
            kept = b"".join(line for line, record in self._lines() if record["round"] <= round)
            if kept != self._path.read_bytes():
                write_atomic(self._path, kept, self._advice)

    def _lines(self) -> list[tuple[bytes, dict[str, Any]]]:
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(f"cannot read the journal {self._path}: {error.strerror}") from error
        lines = content.split(b"\n")[:-1]
        pairs = []
        for number, line in enumerate(lines, start=1):
            record = _decode(line)
            if record is not None:
                pairs.append((line + b"\n", record))
            elif number < len(lines):
                raise CheckpointError(
                    f"line {number} of the journal {self._path} is damaged: it is not a round's record"
                )
        return pairs


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
