"""One communication round on any engine: a method says what to ask, the engine asks it, until the round is over."""

from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from fedprophet.client.task import ClientTask, ClientUpdate

State = TypeVar("State")
Record = dict[str, Any]
Conversation = Generator[Sequence[ClientTask], Sequence[ClientUpdate], tuple[State, Record]]
"""A round as a method writes it: it yields tasks, is handed what came back, and returns the next state and a record."""


class Engine(Protocol):
    """Carries tasks to clients and brings their updates back, in any order."""

    def map(self, tasks: Iterable[ClientTask]) -> Iterator[ClientUpdate]: ...


def hold(conversation: Conversation[State], engine: Engine) -> tuple[State, Record]:
    """Play a method's round on an engine and return its new state and its line for the journal."""
    try:
        tasks = next(conversation)
        while True:
            answers = sorted(engine.map(tasks), key=lambda update: (update.client, update.number))
            tasks = conversation.send(answers)
    except StopIteration as end:
        state, record = end.value
        return state, record
