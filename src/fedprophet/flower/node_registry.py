"""Which node of a federation is which client, and who gets no tasks and why.

Nodes come and go, and may say anything: what one says is held against its key where there are keys, and against what
the others said.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from flwr.app import Message

from fedprophet.errors import FedProphetError
from fedprophet.flower.protocol import (
    PROTOCOL,
    Hello,
    Lacking,
    ProtocolError,
    Refusal,
    harmless,
    hello_request,
    unpack_answer,
)
from fedprophet.flower.timeouts import Pace
from fedprophet.flower.transport import SPARE_BYTES, Ledger, Post
from fedprophet.messages.task import ClientUpdate
from fedprophet.version import __version__

log = logging.getLogger("fedprophet")

Owners = Callable[[], Mapping[int, int | None]]
"""Returns the client that each connected node's key was made for; None for a key that is no client's."""


@dataclass(frozen=True)
class _Stranger:
    """A node that gets no tasks: why, the client it is as far as one knows, and when it was heard.

    One that would be `welcome`, were its client not another node already, becomes it when that node is gone.
    """

    reason: str
    client: int | None = None
    at: float = field(default_factory=lambda: time.monotonic())
    welcome: bool = False


@dataclass(frozen=True)
class _Question:
    """A node that was asked who it is, and when, and the client that its key was made for, where keys say that."""

    node: int
    at: float
    owner: int | None


class Roster:
    """Which node is which client: every node that connects is asked. With `owners`, its key must say the same.

    Who cannot be given tasks is asked again after a while. A node starts a process for every question, so the next one
    may find a disk with room again, or another version of this program.
    """

    def __init__(self, post: Post, pace: Pace, ledger: Ledger, clients: int, owners: Owners | None = None) -> None:
        self._post, self._pace, self._ledger, self._size, self._owners = post, pace, ledger, clients, owners
        self._nodes: dict[int, int] = {}
        self._clients: dict[int, int] = {}
        """The client that each node was when it was heard last."""
        self._strangers: dict[int, _Stranger] = {}
        self._asked: dict[str, _Question] = {}
        self._unasked = 0
        self._met = False
        self._listing = True

    def node(self, client: int) -> int | None:
        """Return the node of a client; None where it has none that can be used."""
        return self._nodes.get(client)

    def why_not(self, client: int) -> str:
        """Return why a client has no node."""
        reasons = (stranger.reason for stranger in self._strangers.values() if stranger.client == client)
        return next(reasons, "not connected")

    def meet(self, clients: set[int], look: Callable[[], None]) -> None:
        """Ask those who have connected since who they are, and wait a while for nodes of these clients.

        Who cannot be used makes nobody wait longer, and who comes and goes not longer than a phase may take.
        """
        began = latest = time.monotonic()
        while True:
            self._look_around()
            heard = False
            for reply in self._post.fetch(self._asked):
                heard = True
                latest = time.monotonic() if self._greet(reply) else latest
            missing = clients - self._nodes.keys() - {stranger.client for stranger in self._strangers.values()}
            if not missing or time.monotonic() - latest >= self._limit():
                break
            if not self._pace.simulated and time.monotonic() - began >= self._pace.deadline:
                break
            if not heard:
                look()
                time.sleep(min(self._pace.interval, 0.1))
        self._met = True

    def _limit(self) -> float:
        """Return how long to wait for further nodes, from the last that said who it is.

        Nobody waits for one that has been asked before and could not be used.
        """
        pace = self._pace
        coming = self._unasked > 0 or any(asked.node not in self._strangers for asked in self._asked.values())
        if pace.simulated:  # all nodes are there from the beginning, though it takes a while until they work
            return pace.deadline if coming or not self._nodes else 0.0
        if not self._met:
            return min(pace.deadline, pace.patience) if self._nodes else pace.deadline
        return min(pace.deadline, pace.greeting) if coming else 0.0

    def _look_around(self) -> None:
        online, now = self._post.online(), time.monotonic()
        if online is None:
            return
        self._nodes = {client: node for client, node in self._nodes.items() if node in online}
        self._strangers = {node: who for node, who in self._strangers.items() if node in online and self._bars(who)}
        # A question that nobody answers in time is asked again: the node may have been started anew.
        again = 4 * self._pace.greeting
        self._asked = {name: asked for name, asked in self._asked.items() if now - asked.at < again}
        settled = {node for node, who in self._strangers.items() if who.welcome or now - who.at < self._pace.greeting}
        known = {*self._nodes.values(), *settled, *(asked.node for asked in self._asked.values())}
        room = None if self._pace.window is None else max(0, self._pace.window - len(self._asked))
        owners = self._owned(online - known)
        unknown = sorted(owners, key=lambda node: (node in self._strangers, node))
        self._unasked = len(unknown[room:]) if room is not None else 0
        for node in unknown[:room]:
            name = self._post.send(hello_request(), node, "hello")
            if name is not None:
                self._asked[name] = _Question(node, now, owners[node])

    def _owned(self, nodes: set[int]) -> dict[int, int | None]:
        """Return those of the nodes that may be asked, each with the client that its key was made for."""
        if self._owners is None or not nodes:
            return dict.fromkeys(nodes)
        try:
            owners = self._owners()
        except FedProphetError as error:
            for node in nodes:
                self._turn_away(node, _Stranger(f"nobody can say whose key it has: {error}"))
            return {}
        except Exception as error:
            if self._listing:
                log.warning("the keys of the nodes cannot be listed: %s", harmless(str(error)))
            self._listing = False
            return {}
        self._listing = True
        here = {node: owner for node, owner in owners.items() if node in nodes}
        for node in (node for node, owner in here.items() if owner is None):
            reason = "its key was made for no client. fedprophet deploy add-node makes one for a client"
            self._turn_away(node, _Stranger(reason))
        return {node: owner for node, owner in here.items() if owner is not None}

    def _bars(self, who: _Stranger) -> bool:
        """Whether the reason against a node still holds, as far as one can say without asking it."""
        return not who.welcome or who.client in self._nodes

    def _greet(self, reply: Message) -> bool:
        """Return whether the node that answers is taken for a client."""
        asked = self._asked.pop(reply.metadata.reply_to_message_id, None)
        if asked is None:
            return False
        stranger = self._judged(reply, asked)
        if stranger is None:
            self._strangers.pop(asked.node, None)
        else:
            self._turn_away(asked.node, stranger)
        return stranger is None

    def _turn_away(self, node: int, stranger: _Stranger) -> None:
        """Give a node no tasks for a while; the reason is told when it is another than before."""
        before, self._strangers[node] = self._strangers.get(node), stranger
        if before is None or before.reason != stranger.reason:
            who = f"node {node}" if stranger.client is None or stranger.welcome else stranger.client
            log.warning("%s gets no tasks: %s", who, harmless(stranger.reason))
            self._ledger.fault(who, stranger.reason)

    def _judged(self, reply: Message, asked: _Question) -> _Stranger | None:
        """Take a node for the client that it says it is; return why not, where that cannot be."""
        node, owner = asked.node, asked.owner
        hello = _said(reply, node)
        if not isinstance(hello, Hello):
            reason = hello.text if isinstance(hello, Refusal) else "it did not say who it is"
            return _Stranger(harmless(reason), self._clients.get(node))
        client = hello.client
        # The key comes first: what a node says is nothing that another client could be blamed for.
        if owner not in (None, client):
            reason = f"its node says that it is client {client}, and its key was made for client {owner}"
            return _Stranger(f"{reason}. Set client = {owner} in its node.toml", owner)
        if not 0 <= client < self._size:
            return _Stranger(f"it says that it is client {client}, and the run has 0 to {self._size - 1}")
        if hello.protocol != PROTOCOL:
            return _Stranger(harmless(_other_version(hello)), client)
        if client in self._nodes:
            reason = f"it says that it is client {client}, which node {self._nodes[client]} is already"
            return _Stranger(reason, client, welcome=True)
        self._nodes[client], self._clients[node] = node, client
        return None


def _said(reply: Message, node: int) -> ClientUpdate | Hello | Lacking | Refusal:
    """Return what a node answers to the question who it is."""
    if not reply.has_content():
        return Refusal(reply.error.reason or "it failed")
    if reply.metadata.src_node_id != node:
        return Refusal(f"node {reply.metadata.src_node_id} answered in its place")
    try:
        return unpack_answer(reply.content, SPARE_BYTES)
    except ProtocolError as error:
        return Refusal(str(error))


def _other_version(hello: Hello) -> str:
    return (
        f"its node speaks protocol {hello.protocol} (fedprophet {hello.version[:40]}), this server protocol {PROTOCOL} "
        f"(fedprophet {__version__}). Install the same version of fedprophet on both"
    )
