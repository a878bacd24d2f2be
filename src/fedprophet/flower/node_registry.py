"""Which node of a federation is which client, and which nodes get no tasks and why.

Nodes come and go, and may claim anything: a claim is checked against the node's key where there are keys, and against
the claims of the others.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from flwr.app import Message

from fedprophet.errors import FedProphetError
from fedprophet.flower.protocol import PROTOCOL, Hello, ProtocolError, harmless, hello_request, other_protocol
from fedprophet.flower.transport import SPARE_BYTES, Ledger, Timeouts, Transport, open_reply

log = logging.getLogger("fedprophet")

KeyedClients = Callable[[], Mapping[int, int | None]]
"""Returns the client that each connected node's key was made for; None for a key of no client."""


@dataclass(frozen=True)
class _Rejected:
    """A node that gets no tasks: why, its client if known, and when it answered.

    A `duplicate` claims a client that another node is already; it takes over when that node is gone.
    """

    reason: str
    client: int | None = None
    at: float = field(default_factory=lambda: time.monotonic())
    duplicate: bool = False


@dataclass(frozen=True)
class _Question:
    """A node that was asked which client it is, when, and the client that its key was made for, if any."""

    node: int
    at: float
    owner: int | None


class NodeRegistry:
    """Which node is which client: every node that connects is asked. With `keys`, its key must say the same.

    A rejected node is asked again after a while. It starts a process for every question, and by then it may have room
    on its disk again, or another version of this program.
    """

    def __init__(
        self, transport: Transport, timeouts: Timeouts, ledger: Ledger, clients: int, keys: KeyedClients | None = None
    ) -> None:
        self._transport, self._timeouts, self._ledger = transport, timeouts, ledger
        self._size, self._keys = clients, keys
        self._nodes: dict[int, int] = {}
        self._clients: dict[int, int] = {}
        """The client that each node was at its last answer."""
        self._rejected: dict[int, _Rejected] = {}
        self._asked: dict[str, _Question] = {}
        self._unasked = 0
        self._met = False

    def node(self, client: int) -> int | None:
        """Return the node of a client; None if it has none that can be used."""
        return self._nodes.get(client)

    def why_not(self, client: int) -> str:
        """Return why a client has no node."""
        reasons = (rejected.reason for rejected in self._rejected.values() if rejected.client == client)
        return next(reasons, "not connected")

    def meet(self, clients: set[int], look: Callable[[], None]) -> None:
        """Ask new nodes which client they are, and wait a while for nodes of these clients.

        Rejected nodes are not waited for. Nodes that come and go do not extend the wait beyond the deadline of a phase.
        """
        began = latest = time.monotonic()
        while True:
            self._ask_new_nodes()
            heard = False
            for reply in self._transport.fetch(self._asked, counted=False):
                heard = True
                latest = time.monotonic() if self._hear(reply) else latest
            missing = clients - self._nodes.keys() - {rejected.client for rejected in self._rejected.values()}
            if not missing or time.monotonic() - latest >= self._limit():
                break
            if not self._timeouts.simulated and time.monotonic() - began >= self._timeouts.deadline:
                break
            if not heard:
                look()
                time.sleep(min(self._timeouts.interval, 0.1))
        self._met = True

    def _limit(self) -> float:
        """Return how long to wait for further nodes, from the last one that was admitted."""
        timeouts = self._timeouts
        coming = self._unasked > 0 or any(asked.node not in self._rejected for asked in self._asked.values())
        if timeouts.simulated:  # all nodes exist from the start, but take a while to answer
            return timeouts.deadline if coming or not self._nodes else 0.0
        if not self._met:
            return min(timeouts.deadline, timeouts.patience) if self._nodes else timeouts.deadline
        return min(timeouts.deadline, timeouts.greeting) if coming else 0.0

    def _ask_new_nodes(self) -> None:
        online, now = self._transport.online(), time.monotonic()
        if online is None:
            return
        self._nodes = {client: node for client, node in self._nodes.items() if node in online}
        rejected = {node: who for node, who in self._rejected.items() if node in online}
        # A duplicate of a node that is gone takes over.
        self._rejected = {node: who for node, who in rejected.items() if not who.duplicate or who.client in self._nodes}
        # A question without an answer is asked again: the node may have been restarted.
        again = 4 * self._timeouts.greeting
        self._asked = {name: asked for name, asked in self._asked.items() if now - asked.at < again}
        recent = now - self._timeouts.greeting
        settled = {node for node, who in self._rejected.items() if who.duplicate or who.at > recent}
        known = {*self._nodes.values(), *settled, *(asked.node for asked in self._asked.values())}
        room = None if self._timeouts.window is None else max(0, self._timeouts.window - len(self._asked))
        owners = self._owned(online - known)
        unknown = sorted(owners, key=lambda node: (node in self._rejected, node))
        self._unasked = len(unknown[room:]) if room is not None else 0
        for node in unknown[:room]:
            name = self._transport.send(hello_request(), node, "hello", counted=False)
            if name is not None:
                self._asked[name] = _Question(node, now, owners[node])

    def _owned(self, nodes: set[int]) -> dict[int, int | None]:
        """Return the nodes that may be asked, each with the client that its key was made for."""
        keys = self._keys
        if keys is None or not nodes:
            return dict.fromkeys(nodes)
        try:
            owners = self._transport.attempt("the keys of the nodes cannot be listed", lambda: keys().items())
        except FedProphetError as error:
            for node in nodes:
                self._reject(node, _Rejected(f"its key cannot be checked: {error}"))
            return {}
        here = {node: owner for node, owner in owners or () if node in nodes}
        for node in (node for node, owner in here.items() if owner is None):
            reason = "its key was made for no client. fedprophet deploy add-node makes one for a client"
            self._reject(node, _Rejected(reason))
        return {node: owner for node, owner in here.items() if owner is not None}

    def _hear(self, reply: Message) -> bool:
        """Return whether the node that answers is admitted."""
        asked = self._asked.pop(reply.metadata.reply_to_message_id, None)
        if asked is None:
            return False
        rejected = self._admit(reply, asked)
        if rejected is None:
            self._rejected.pop(asked.node, None)
        else:
            self._reject(asked.node, rejected)
        return rejected is None

    def _reject(self, node: int, rejected: _Rejected) -> None:
        """Give a node no tasks for a while; a new reason is logged and noted."""
        before, self._rejected[node] = self._rejected.get(node), rejected
        if before is None or before.reason != rejected.reason:
            who = f"node {node}" if rejected.client is None or rejected.duplicate else rejected.client
            log.warning("%s gets no tasks: %s", who, harmless(rejected.reason))
            self._ledger.fault(who, rejected.reason)

    def _admit(self, reply: Message, asked: _Question) -> _Rejected | None:
        """Admit a node as the client it claims to be, or return why not."""
        node, owner = asked.node, asked.owner
        try:
            hello = open_reply(reply, node, SPARE_BYTES)
        except ProtocolError as error:
            return _Rejected(harmless(str(error)), self._clients.get(node))
        if not isinstance(hello, Hello):
            return _Rejected("it did not say which client it is", self._clients.get(node))
        client = hello.client
        # The key comes first: no client may be blamed for what another one's node claims.
        if owner not in (None, client):
            reason = f"its node says that it is client {client}, and its key was made for client {owner}"
            return _Rejected(f"{reason}. Set client = {owner} in its node.toml", owner)
        if not 0 <= client < self._size:
            return _Rejected(f"it says that it is client {client}, and the run has 0 to {self._size - 1}")
        if hello.protocol != PROTOCOL:
            return _Rejected(harmless(other_protocol(hello.protocol, hello.version)), client)
        if client in self._nodes:
            reason = f"it says that it is client {client}, which node {self._nodes[client]} is already"
            return _Rejected(reason, client, duplicate=True)
        self._nodes[client], self._clients[node] = node, client
        return None
