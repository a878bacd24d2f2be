"""Messages to the nodes of a federation and their answers, how long to wait for them, and the record of a round.

The record says how many bytes of tasks and answers went over the wire, which answers were left out, and why.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedprophet.errors import FedProphetError
from fedprophet.flower.protocol import Hello, Lacking, ProtocolError, Refusal, harmless, unpack_answer, wire_bytes
from fedprophet.messages.answers import Answer
from fedprophet.server.coordinator import Record

VALID_SECONDS = 30 * 86400.0
"""Flower discards older messages. The engine gives up at its deadline, long before."""
MOST_AT_ONCE = 8
"""Answers that are fetched at a time: each may hold a whole model, and all at once would fill the memory."""
SPARE_BYTES = 2**20
"""Bytes that an answer may have besides tensors, and the most that a hello may have."""
T = TypeVar("T")
log = logging.getLogger("fedprophet")


@dataclass(frozen=True)
class Timeouts:
    """How long the engine waits, in seconds, and whether the nodes are simulated.

    A phase may take `deadline`. In a simulation clients wait for each other, so there it is the time without any
    answer, and at most `window` messages are on their way. `patience` is how long the first phase waits for nodes that
    have not connected yet, `greeting` how long any phase waits for new ones to say which client they are.
    """

    deadline: float
    simulated: bool = False
    window: int | None = None
    interval: float = 0.5
    patience: float = 60.0
    greeting: float = 30.0


@dataclass
class Ledger:
    """What happened since the round began."""

    sent: int = 0
    received: int = 0
    trainers: set[int] = field(default_factory=set)
    faults: dict[str, list[str]] = field(default_factory=dict)

    def fault(self, who: int | str, reason: str) -> None:
        """Note why an answer is missing, each reason once."""
        reasons = self.faults.setdefault(str(who), [])
        if (text := harmless(reason)) not in reasons:
            reasons.append(text)

    def close(self, whole: int) -> Record:
        """Return the round's record and begin a new one; `whole` is the size of the model's shared parameters."""
        record: Record = {
            "wire": {"sent": self.sent, "received": self.received, "whole_model": 2 * whole * len(self.trainers)},
            "faults": {who: "; ".join(reasons) for who, reasons in sorted(self.faults.items())},
        }
        self.sent, self.received, self.trainers, self.faults = 0, 0, set(), {}
        return record


class Transport:
    """Sends and fetches messages, and counts their bytes. A run survives a connection that fails for a while.

    What is not `counted` is about the federation, such as the question which client a node is. Its answer comes at any
    time, in this round or the next, and again when a run is resumed: with it, no two runs would have the same journal.
    """

    def __init__(self, grid: Callable[[], Grid], ledger: Ledger) -> None:
        """Make a transport; `grid` returns Flower's connection, and is called at each use, not before."""
        self._grid, self._ledger = grid, ledger
        self._failing: set[str] = set()

    def attempt(self, failure: str, request: Callable[..., Iterable[T]], *arguments: object) -> list[T] | None:
        """Return what Flower answers to a request; None if it fails, which is logged once until it works again."""
        try:
            found = list(request(*arguments))
        except FedProphetError:
            raise
        except Exception as error:
            if failure not in self._failing:
                log.warning("%s: %s", failure, harmless(str(error)))
            self._failing.add(failure)
            return None
        self._failing.discard(failure)
        return found

    def send(self, content: RecordDict, node: int, group: str, counted: bool = True) -> str | None:
        """Send a message and return its id; None if Flower did not accept it."""
        message = Message(content, node, "query", ttl=VALID_SECONDS, group_id=group)
        ids = self.attempt("a message could not be sent", self._grid().push_messages, [message])
        if not ids or not ids[0]:
            return None
        self._ledger.sent += wire_bytes(content) if counted else 0
        return ids[0]

    def fetch(self, ids: Iterable[str], counted: bool = True) -> Iterator[Message]:
        """Yield the answers that have come to messages with these ids, a few at a time in memory."""
        waiting = list(ids)
        for start in range(0, len(waiting), MOST_AT_ONCE):
            some = waiting[start : start + MOST_AT_ONCE]
            replies = self.attempt("answers could not be fetched", self._grid().pull_messages, some)
            if replies is None:
                return
            contents = (reply.content for reply in replies if counted and reply.has_content())
            self._ledger.received += sum(map(wire_bytes, contents))
            while replies:
                yield replies.pop(0)

    def online(self) -> set[int] | None:
        """Return the nodes that are connected; None if Flower cannot list them."""
        found = self.attempt("the nodes cannot be listed", self._grid().get_node_ids)
        return None if found is None else set(found)


def open_reply(reply: Message, node: int, most: float) -> Answer | Hello | Lacking:
    """Return what a node answered, of at most so many bytes; ProtocolError with the reason if it cannot be used."""
    if not reply.has_content():
        raise ProtocolError(f"its node failed: {reply.error.reason or f'error {reply.error.code}'}")
    if reply.metadata.src_node_id != node:
        raise ProtocolError(f"node {reply.metadata.src_node_id} answered in place of node {node}")
    answer = unpack_answer(reply.content, most)
    if isinstance(answer, Refusal):
        raise ProtocolError(answer.text)
    return answer
