"""One communication round on any engine: a method says what to ask, the engine asks it, until the round is over."""

from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

from fedprophet.messages.answers import ANSWERS, Answer
from fedprophet.messages.tasks import Task

T = TypeVar("T")
A = TypeVar("A", bound=Answer)
Record = dict[str, Any]
Conversation = Generator[Sequence[Task], Sequence[Answer], T]
"""A round, or a part of one, as a method writes it: it yields tasks, is handed the answers, and returns its result."""


def ask(tasks: Sequence[Task], kind: type[A]) -> Conversation[list[A]]:
    """Ask for the tasks and return their answers, all of one kind; clients that did not answer are left out."""
    answers = yield tasks
    return [answer for answer in answers if isinstance(answer, kind)]


class Engine(Protocol):
    """Carries tasks to clients and brings their answers back, in any order. Clients that do not answer are left out."""

    def map(self, tasks: Iterable[Task]) -> Iterator[Answer]: ...


@runtime_checkable
class Accountant(Protocol):
    """An engine that keeps accounts, such as the bytes that it sent: `account` returns those since it was last asked.

    They are added to a round's record. Known are `wire`, a table of bytes `sent` and `received` and of those that it
    takes to train the `whole_model` on as many clients, and `faults`, the reasons of the clients that failed.
    """

    def account(self) -> Record: ...


@runtime_checkable
class RemoteEngine(Protocol):
    """An engine that may be `remote`: its clients are on machines of their own, with data that only they know."""

    @property
    def remote(self) -> bool: ...


def play_round(conversation: Conversation[tuple[T, Record]], engine: Engine) -> tuple[T, Record]:
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

    def check(self, tasks: Iterable[Task], answers: Iterable[Answer]) -> list[Answer]:
        """Return the answers that were waited for, by client and number."""
        asked = {(task.client, task.number): task for task in tasks}
        found: dict[tuple[int, int], Answer] = {}
        for answer in answers:
            name = (answer.client, answer.number)
            if name in asked and name not in found and answers_to(answer, asked[name]):
                found[name] = answer
            else:
                self._note("unasked", answer.kind, answer.client)
        for name, task in asked.items():
            if name not in found:
                self._note("missing", task.kind, task.client)
        return [found[name] for name in sorted(found)]

    def record(self) -> Record:
        """Return what there is to say: nothing, where everybody answered."""
        return {
            what: {kind: sorted(clients) for kind, clients in kinds.items()}
            for what, kinds in self._notes.items()
            if kinds
        }

    def _note(self, what: str, kind: str, client: int) -> None:
        self._notes[what].setdefault(kind, set()).add(client)


def answers_to(answer: Answer, task: Task) -> bool:
    """Whether an answer is of the kind and the round of a task."""
    return type(answer) is ANSWERS[task.kind] and answer.round == task.round
