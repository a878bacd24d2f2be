"""Asking clients outside of a round: answers in the order of their tasks, and progress on the way."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from fedprophet.messages.answers import Answer
from fedprophet.messages.tasks import Task
from fedprophet.server.coordinator import Accountant, Engine, Record

A = TypeVar("A", bound=Answer)


class WatchedEngine:
    """An engine that reports each task that is done: its kind, how many are done, and how many there are."""

    def __init__(self, engine: Engine, done: Callable[[str, int, int], None]) -> None:
        self._engine = engine
        self._done = done

    def map(self, tasks: Iterable[Task]) -> Iterator[Answer]:
        """Pass the tasks on and report each answer."""
        tasks = list(tasks)
        for number, answer in enumerate(self._engine.map(tasks), start=1):
            self._done(answer.kind, number, len(tasks))
            yield answer

    def account(self) -> Record:
        """Return the engine's accounts, if it keeps any."""
        return self._engine.account() if isinstance(self._engine, Accountant) else {}


def in_order(tasks: Sequence[Task], engine: Engine, kind: type[A]) -> Iterator[A]:
    """Yield the answers in the order of their tasks, whatever order the engine brings them in.

    So a sum over clients has the same bits on every engine. Only answers that came too early are held. Unrequested and
    repeated answers are dropped, and missing ones are skipped.
    """
    early: dict[tuple[int, int], A] = {}
    order = [(task.client, task.number) for task in tasks]
    waiting = set(order)
    turn = 0
    for answer in engine.map(tasks):
        name = (answer.client, answer.number)
        if not isinstance(answer, kind) or name not in waiting:
            continue
        waiting.remove(name)
        early[name] = answer
        while turn < len(order) and order[turn] in early:
            yield early.pop(order[turn])
            turn += 1
    yield from (early[name] for name in order if name in early)
