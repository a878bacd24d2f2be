"""Messages to the nodes of a federation and their answers, and the record that is kept of a round.

It says how many bytes went over the wire, which answers were left out, and why.
"""

import logging
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from flwr.app import Message, RecordDict

from fedprophet.errors import FedProphetError
from fedprophet.flower.protocol import harmless, wire_bytes
from fedprophet.server.coordinator import Record

QUERY = "query"
"""The type of all messages: the ClientApp has one handler for it."""
VALID_SECONDS = 30 * 86400.0
"""Flower discards older messages. The engine gives up at its deadline, long before."""
MOST_AT_ONCE = 8
"""Answers that are fetched at a time: each may hold a whole model, and all at once would fill the memory."""
SPARE_BYTES = 2**20
"""What an answer may have besides tensors, and the most that a hello may have."""
log = logging.getLogger("fedprophet")


class Grid(Protocol):
    """The part of Flower's connection to its nodes that is used."""

    def get_node_ids(self) -> Iterable[int]: ...

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]: ...

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]: ...


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
            "wire": {"sent": self.sent, "received": self.received, "jfat": 2 * whole * len(self.trainers)},
            "faults": {who: "; ".join(reasons) for who, reasons in sorted(self.faults.items())},
        }
        self.sent, self.received, self.trainers, self.faults = 0, 0, set(), {}
        return record


class Transport:
    """Sends and fetches messages, and counts their bytes. A run survives a connection that fails for a while."""

    def __init__(self, grid: Grid, ledger: Ledger) -> None:
        self._grid, self._ledger = grid, ledger
        self._listing = True

    def send(self, content: RecordDict, node: int, group: str) -> str | None:
        """Send a message and return its id; None where Flower did not take it."""
        message = Message(content, node, QUERY, ttl=VALID_SECONDS, group_id=group)
        try:
            ids = list(self._grid.push_messages([message]))
        except FedProphetError:
            raise
        except Exception as error:
            log.warning("a message could not be sent: %s", harmless(str(error)))
            return None
        if not ids or not ids[0]:
            return None
        self._ledger.sent += wire_bytes(content)
        return ids[0]

    def fetch(self, ids: Iterable[str]) -> Iterator[Message]:
        """Yield the answers that have come to messages with these ids, a few at a time in memory."""
        waiting = list(ids)
        for start in range(0, len(waiting), MOST_AT_ONCE):
            try:
                replies = deque(self._grid.pull_messages(waiting[start : start + MOST_AT_ONCE]))
            except FedProphetError:
                raise
            except Exception as error:
                log.warning("answers could not be fetched: %s", harmless(str(error)))
                return
            self._ledger.received += sum(wire_bytes(reply.content) for reply in replies if reply.has_content())
            while replies:
                yield replies.popleft()

    def online(self) -> set[int] | None:
        """Return the nodes that are connected; None where Flower cannot list them."""
        try:
            found = set(self._grid.get_node_ids())
        except FedProphetError:
            raise
        except Exception as error:
            if self._listing:  # this is called often: a failure is logged once, until it works again
                log.warning("the nodes cannot be listed: %s", harmless(str(error)))
            self._listing = False
            return None
        self._listing = True
        return found
