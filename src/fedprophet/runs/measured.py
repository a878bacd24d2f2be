"""Evaluations that were done already, on disk: the same task of the same state is not done twice."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import Tensor

from fedprophet.messages.answers import Answer, Evaluated
from fedprophet.messages.codec import CodecError, decode, encode
from fedprophet.messages.modules import digest
from fedprophet.messages.tasks import Task
from fedprophet.server.coordinator import Engine
from fedprophet.storage.bounded import BoundedCache
from fedprophet.storage.files import append_synced, parse_json, write_error

AGAIN = "Make room there or correct its permissions, then give the same command again: it goes on where it stopped"
DIGESTS_KEPT = 16


class MeasuredTasks:
    """Answers by the hash of their task: lines of JSON. A kill can tear the last one.

    Several processes may add lines at the same time; two that measure the same thing write the same numbers.
    """

    def __init__(self, folder: Path, state: str) -> None:
        self._file = folder / f"{state}.jsonl"
        for stale in folder.glob("*.jsonl"):
            if stale != self._file:
                stale.unlink(missing_ok=True)
        self._known = dict(_lines(self._file.read_bytes())) if self._file.exists() else {}

    def get(self, key: str) -> Evaluated | None:
        """Return the answer to a task, if it is known."""
        return self._known.get(key)

    def add(self, key: str, answer: Evaluated) -> None:
        """Keep an answer, and wait until it is on the disk."""
        self._known[key] = answer
        # The line begins with an end of line as well: it stays whole behind one that was torn.
        record = {"task": key, **encode(answer)[0]}
        line = f"\n{json.dumps({**record, 'digest': _digest(record)}, separators=(',', ':'))}\n".encode()
        try:
            append_synced(self._file, line)
        except OSError as error:
            raise write_error(self._file, error, AGAIN) from error


def _lines(content: bytes) -> Iterator[tuple[str, Evaluated]]:
    for line in content.splitlines():
        try:
            record = parse_json(line)
            if record.pop("digest") == _digest(record):
                yield record.pop("task"), decode(Evaluated, record, {})
        except (CodecError, ValueError, KeyError, TypeError, AttributeError):
            continue  # torn or altered, and measured again


def _digest(record: Mapping[str, Any]) -> str:
    return hash_of([json.dumps(record)])


class RememberingEngine:
    """An engine that does only the evaluations that are not known yet."""

    def __init__(self, engine: Engine, measured: MeasuredTasks) -> None:
        self._engine = engine
        self._measured = measured
        self._digests: BoundedCache[tuple[tuple[str, int], ...], tuple[str, Mapping[str, Tensor]]]
        self._digests = BoundedCache(DIGESTS_KEPT)

    def map(self, tasks: Iterable[Task]) -> Iterator[Answer]:
        """Yield what is known already, then what is measured now."""
        missing = {}
        for task in tasks:
            key = self._key(task)
            known = self._measured.get(key)
            if known is None:
                missing[task.client, task.number] = key, task
            else:
                yield known
        for answer in self._engine.map([task for _, task in missing.values()]):
            key, _ = missing[answer.client, answer.number]
            if isinstance(answer, Evaluated):
                self._measured.add(key, answer)
            yield answer

    def _key(self, task: Task) -> str:
        """Return the hash of a task, its tensors included."""
        values = [getattr(task, field.name) for field in fields(task)]
        return hash_of([self._digest(value) if isinstance(value, Mapping) else repr(value) for value in values])

    def _digest(self, tensors: Mapping[str, Tensor]) -> str:
        """Return the hash of some tensors; tasks share theirs, so that most sets are read only once."""
        identity = tuple((name, id(tensor)) for name, tensor in tensors.items())
        # The tensors are held, so that no other one gets their ids.
        found = self._digests.get(identity) or self._digests.put(identity, (digest(tensors), dict(tensors)))
        return found[0]


def hash_of(parts: Sequence[str]) -> str:
    """Return the hash of several texts."""
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()
