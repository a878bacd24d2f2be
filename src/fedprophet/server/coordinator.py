"""One communication round on any engine: a method says what to ask, the engine asks it, until the round is over."""

from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

from fedprophet.messages.task import ClientTask, ClientUpdate

State = TypeVar("State")
Record = dict[str, Any]
Conversation = Generator[Sequence[ClientTask], Sequence[ClientUpdate], tuple[State, Record]]
"""A round as a method writes it: it yields tasks, is handed what came back, and returns the next state and a record."""


class Engine(Protocol):
    """Carries tasks to clients and brings their updates back, in any order. Who does not answer is left out."""

    def map(self, tasks: Iterable[ClientTask]) -> Iterator[ClientUpdate]: ...


@runtime_checkable
class Accountant(Protocol):
    """An engine that keeps accounts, such as the bytes that it sent: `account` returns those since it was last asked.

    They are laid over a round's record. Known are `wire`, a table of bytes `sent` and `received` and of those that
    joint training would have moved (`jfat`), and `faults`, the reasons of the clients that failed.
    """

    def account(self) -> Record: ...


def hold(conversation: Conversation[State], engine: Engine) -> tuple[State, Record]:
    """Play a method's round on an engine and return its new state and its line for the journal.

    A method sees each answer that it asked for at most once, in client order. Where clients did not answer, or others
    did, the line says so under `missing` or `unasked`, by the kind of the task.
    """
    attendance = _Attendance()
    try:
        tasks = next(conversation)
        while True:
            tasks = conversation.send(attendance.check(tasks, engine.map(tasks)))
    except StopIteration as end:
        state, record = end.value
        accounts = engine.account() if isinstance(engine, Accountant) else {}
        return state, {**record, **attendance.record(), **accounts}


class _Attendance:
    """Who was asked in a round and did not answer, and who answered and was not asked, or had answered before."""

    def __init__(self) -> None:
        self._notes: dict[str, dict[str, set[int]]] = {"missing": {}, "unasked": {}}

    def check(self, tasks: Iterable[ClientTask], updates: Iterable[ClientUpdate]) -> list[ClientUpdate]:
        """Return the answers that were waited for, by client and number."""
        asked = {(task.client, task.number): task for task in tasks}
        answers: dict[tuple[int, int], ClientUpdate] = {}
        for update in updates:
            name = (update.client, update.number)
            task = asked.get(name)
            if task is None or name in answers or (task.kind, task.round) != (update.kind, update.round):
                self._note("unasked", update.kind, update.client)
            else:
                answers[name] = update
        for name, task in asked.items():
            if name not in answers:
                self._note("missing", task.kind, task.client)
        return [answers[name] for name in sorted(answers)]

    def record(self) -> Record:
        """Return what there is to say: nothing, where everybody answered."""
        return {
            what: {kind: sorted(clients) for kind, clients in kinds.items()}
            for what, kinds in self._notes.items()
            if kinds
        }

    def _note(self, what: str, kind: str, client: int) -> None:
        self._notes[what].setdefault(kind, set()).add(client)
