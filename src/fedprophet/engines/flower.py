"""The Flower engine: tasks go to the nodes of a Flower federation as messages, and their answers come back.

A node may be gone, hang, answer late, twice, something else or nonsense. None of that stops a run: its update is left
out of the round and the reason is journalled.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Protocol

from flwr.app import Message, RecordDict

from fedprophet.client.task import BACKBONE, SERVER, ClientTask, ClientUpdate
from fedprophet.engines import Parts
from fedprophet.engines.embedded import EmbeddedEngine
from fedprophet.errors import FedProphetError, TrainingError
from fedprophet.flower.protocol import (
    PROTOCOL,
    Hello,
    Lacking,
    ProtocolError,
    Refusal,
    hello_request,
    pack_task,
    unpack_answer,
    wire_bytes,
)
from fedprophet.flower.terms import Terms
from fedprophet.server.coordinator import Record
from fedprophet.version import __version__

QUERY = "query"
"""The type of all messages: a ClientApp has one handler for it."""
VALID_SECONDS = 30 * 86400.0
"""Flower throws messages away that are older. Ours are given up by the deadline."""
LONGEST_REASON = 500
MOST_LATE = 1000
"""So many messages that were given up are remembered, to know a late answer when it comes."""
log = logging.getLogger("fedprophet")


class Grid(Protocol):
    """What is used of Flower's connection to its nodes."""

    def get_node_ids(self) -> Iterable[int]: ...

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]: ...

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]: ...


@dataclass(frozen=True)
class Pace:
    """How long the engine waits, in seconds, and whether the nodes are those of a simulation.

    A phase may take `deadline`. In a simulation clients wait for each other, so there it is the time in which nobody
    answers, and no more than `window` messages are on their way. `patience` is how long the first phase waits for nodes
    that have not connected yet, `greeting` how long any phase waits for new ones to say who they are.
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
        """Note why somebody's answer is missing, each reason once."""
        text = " ".join(reason.split())
        text = text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]}…"
        reasons = self.faults.setdefault(str(who), [])
        if text not in reasons:
            reasons.append(text)

    def close(self, whole: int) -> Record:
        """Return the round's account and begin a new one; `whole` are the bytes of the model's shared parameters."""
        record: Record = {
            "wire": {"sent": self.sent, "received": self.received, "jfat": 2 * whole * len(self.trainers)},
            "faults": {who: "; ".join(reasons) for who, reasons in sorted(self.faults.items())},
        }
        self.sent, self.received, self.trainers, self.faults = 0, 0, set(), {}
        return record


class Post:
    """Sends and fetches messages, and counts their bytes. A connection that fails for a while is no end of a run."""

    def __init__(self, grid: Grid, ledger: Ledger) -> None:
        self._grid, self._ledger = grid, ledger

    def send(self, content: RecordDict, node: int, group: str) -> str | None:
        """Send a message and return its id; None where Flower did not take it."""
        message = Message(content, node, QUERY, ttl=VALID_SECONDS, group_id=group)
        try:
            ids = list(self._grid.push_messages([message]))
        except FedProphetError:
            raise
        except Exception as error:
            log.warning("a message could not be sent: %s", error)
            return None
        if not ids or not ids[0]:
            return None
        self._ledger.sent += wire_bytes(content)
        return ids[0]

    def fetch(self, ids: Iterable[str]) -> list[Message]:
        """Return the answers that have come to messages with these ids."""
        ids = list(ids)
        try:
            replies = list(self._grid.pull_messages(ids)) if ids else []
        except FedProphetError:
            raise
        except Exception as error:
            log.warning("answers could not be fetched: %s", error)
            return []
        self._ledger.received += sum(wire_bytes(reply.content) for reply in replies if reply.has_content())
        return replies

    def online(self) -> set[int] | None:
        """Return the nodes that are connected; None where Flower does not say."""
        try:
            return set(self._grid.get_node_ids())
        except FedProphetError:
            raise
        except Exception as error:
            log.warning("the nodes cannot be listed: %s", error)
            return None


class Roster:
    """Which node is which client: every node that connects is asked once."""

    def __init__(self, post: Post, pace: Pace, ledger: Ledger, clients: int) -> None:
        self._post, self._pace, self._ledger, self._size = post, pace, ledger, clients
        self._nodes: dict[int, int] = {}
        self._strangers: dict[int, int | None] = {}
        self._unfit: dict[int, str] = {}
        self._asked: dict[str, tuple[int, float]] = {}
        self._online = self._unasked = 0
        self._met = False

    def node(self, client: int) -> int | None:
        """Return the node of a client; None where it has none that can be used."""
        return self._nodes.get(client)

    def why_not(self, client: int) -> str:
        """Return why a client has no node."""
        return self._unfit.get(client, "not connected")

    def expect_everybody(self) -> None:
        """Refuse a simulation of fewer nodes than clients: in one, nobody comes later."""
        if 0 < self._online < self._size:
            raise TrainingError(
                f"the simulation has {self._online} nodes, and the run {self._size} clients. Ask for as many nodes: "
                f"flwr run … --federation-config 'num-supernodes={self._size}'"
            )

    def meet(self, clients: set[int], look: Callable[[], None]) -> None:
        """Ask those who have connected since who they are, and wait a while for nodes of these clients."""
        latest = time.monotonic()
        while True:
            self._look_around()
            replies = self._post.fetch(self._asked)
            for reply in replies:
                self._greet(reply)
            latest = time.monotonic() if replies else latest
            missing = clients - self._nodes.keys() - self._unfit.keys()
            if not missing or time.monotonic() - latest >= self._limit():
                break
            if not replies:
                look()
                time.sleep(min(self._pace.interval, 0.1))
        self._met = True

    def _limit(self) -> float:
        """Return how long to wait for further nodes, from the last that said who it is."""
        pace, coming = self._pace, bool(self._asked or self._unasked)
        if pace.simulated:  # all nodes are there from the beginning, though it takes a while until they work
            return pace.deadline if coming or not self._nodes else 0.0
        if not self._met:
            return min(pace.deadline, pace.patience) if self._nodes else pace.deadline
        return min(pace.deadline, pace.greeting) if coming else 0.0

    def _look_around(self) -> None:
        online, now = self._post.online(), time.monotonic()
        if online is None:
            return
        self._online = len(online)
        self._nodes = {client: node for client, node in self._nodes.items() if node in online}
        gone = [client for node, client in self._strangers.items() if node not in online and client is not None]
        for client in gone:
            self._unfit.pop(client, None)
        self._strangers = {node: client for node, client in self._strangers.items() if node in online}
        # A question that nobody answers in time is asked again: the node may have been started anew.
        again = 4 * self._pace.greeting
        self._asked = {name: (node, at) for name, (node, at) in self._asked.items() if now - at < again}
        known = {*self._nodes.values(), *self._strangers, *(node for node, _ in self._asked.values())}
        room = None if self._pace.window is None else max(0, self._pace.window - len(self._asked))
        unknown = sorted(online - known)
        self._unasked = len(unknown[room:]) if room is not None else 0
        for node in unknown[:room]:
            name = self._post.send(hello_request(), node, "hello")
            if name is not None:
                self._asked[name] = node, now

    def _greet(self, reply: Message) -> None:
        node, _ = self._asked.pop(reply.metadata.reply_to_message_id, (None, 0.0))
        if node is None:
            return
        who: int | str = f"node {node}"
        self._strangers[node] = None
        try:
            hello = unpack_answer(reply.content) if reply.has_content() else Refusal(reply.error.reason or "it failed")
            if not isinstance(hello, Hello):
                reason = hello.text if isinstance(hello, Refusal) else "it did not say who it is"
            elif not 0 <= hello.client < self._size:
                reason = f"it says that it is client {hello.client}, and the run has 0 to {self._size - 1}"
            elif hello.protocol != PROTOCOL:
                who, reason = hello.client, _other_version(hello)
                self._strangers[node] = hello.client
                self._unfit[hello.client] = reason
            elif hello.client in self._nodes:
                reason = f"it says that it is client {hello.client}, which node {self._nodes[hello.client]} is already"
            else:
                self._nodes[hello.client] = node
                self._unfit.pop(hello.client, None)
                del self._strangers[node]
                return
        except ProtocolError as error:
            reason = str(error)
        log.warning("%s gets no tasks: %s", who, reason)
        self._ledger.fault(who, reason)


def _other_version(hello: Hello) -> str:
    return (
        f"its node speaks protocol {hello.protocol} (fedprophet {hello.version[:40]}), this server protocol {PROTOCOL} "
        f"(fedprophet {__version__}). Install the same version of fedprophet on both"
    )


@dataclass(frozen=True)
class _Sent:
    """A task on its way, and the digests of the fixed modules that are attached to it."""

    task: ClientTask
    node: int
    modules: frozenset[str] = frozenset()


class FlowerEngine:
    """Sends each task to the node of its client. Tasks of the server itself are carried out here."""

    def __init__(
        self,
        grid: Grid,
        parts: Parts,
        run: Callable[[], str],
        terms: Terms,
        pace: Pace,
        ledger: Ledger | None = None,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        """Make the engine of a run.

        `run` returns the run's id, and is called when the first task goes out. `look` is called while the engine waits,
        and may raise where waiting has become vain.
        """
        self._pace, self._look = pace, look
        self._run, self._terms = cache(run), terms.to_text()
        self._plain = EmbeddedEngine(parts.population, parts.workspaces, parts.reserve)
        self._modules = parts.workspaces[BACKBONE].modules
        self._whole = shared_bytes(parts)
        self._ledger = ledger or Ledger()
        self._post = Post(grid, self._ledger)
        self._roster = Roster(self._post, pace, self._ledger, parts.config.population.clients)
        self._pending: dict[str, _Sent] = {}
        self._late: dict[str, _Sent] = {}
        self._done: dict[str, _Sent] = {}
        self.failed = False
        """Whether Flower itself has reported a failure, such as a process that died."""

    @property
    def busy(self) -> bool:
        """Whether somebody is working on a task."""
        return bool(self._pending)

    def map(self, tasks: Iterable[ClientTask]) -> Iterator[ClientUpdate]:
        """Carry out the tasks; updates come in the order in which they arrive, and some may be missing."""
        tasks = list(tasks)
        yield from self._plain.map(task for task in tasks if task.client == SERVER)
        away = [task for task in tasks if task.client != SERVER]
        if away:
            self._ledger.trainers |= {task.client for task in away if task.kind == "train"}
            yield from self._carry_out(away)

    def account(self) -> Record:
        """Return the bytes that went over the wire since the last call, and whose answers were left out, and why."""
        return self._ledger.close(self._whole)

    def _carry_out(self, tasks: Sequence[ClientTask]) -> Iterator[ClientUpdate]:
        self._give_up()  # where somebody did not take all updates of the phase before
        self._done.clear()
        self._roster.meet({task.client for task in tasks}, self._look)
        if self._pace.simulated:
            self._roster.expect_everybody()
        waiting, refusals, updates = deque(tasks), list[str](), 0
        end = time.monotonic() + self._pace.deadline
        while waiting or self._pending:
            while waiting and (self._pace.window is None or len(self._pending) < self._pace.window):
                self._hand_out(waiting.popleft())
            replies = self._post.fetch([*self._pending, *self._late])
            for reply in replies:
                update = self._accept(reply, refusals)
                if update is not None:
                    updates += 1
                    yield update
            if replies and self._pace.simulated:
                end = time.monotonic() + self._pace.deadline
            if time.monotonic() >= end:
                break
            if not replies and self._pending:
                self._look()
                time.sleep(self._pace.interval)
        for task in (*waiting, *(sent.task for sent in self._pending.values())):
            self._ledger.fault(task.client, f"no answer within {self._pace.deadline:g} s")
        self._give_up()
        if self._pace.simulated and refusals and not updates:
            # Nodes of a simulation are this very program: what all of them say is no fault of the nodes.
            raise TrainingError(refusals[0])

    def _give_up(self) -> None:
        self._late |= self._pending
        self._late = dict(list(self._late.items())[-MOST_LATE:])
        self._pending = {}

    def _hand_out(self, task: ClientTask, lacking: Iterable[str] = ()) -> None:
        node = self._roster.node(task.client)
        if node is None:
            self._ledger.fault(task.client, self._roster.why_not(task.client))
            return
        modules = {name: self._modules[name] for name in lacking}
        content = pack_task(task, run=self._run(), config=self._terms, modules=modules)
        name = self._post.send(content, node, str(task.round))
        if name is None:
            self._ledger.fault(task.client, "the task could not be sent")
        else:
            self._pending[name] = _Sent(task, node, frozenset(modules))

    def _accept(self, reply: Message, refusals: list[str]) -> ClientUpdate | None:
        """Return the update of an answer; None where it has none, which is noted."""
        name = reply.metadata.reply_to_message_id
        sent = self._pending.pop(name, None)
        if sent is None:
            self._note_unexpected(name, reply)
            return None
        self._done[name] = sent
        try:
            return self._update(reply, sent)
        except _NotUsableError as error:
            refusals.append(str(error))
            self._ledger.fault(sent.task.client, str(error))
            return None

    def _update(self, reply: Message, sent: _Sent) -> ClientUpdate | None:
        if not reply.has_content():
            self.failed = True
            raise _NotUsableError(f"its node failed: {reply.error.reason or f'error {reply.error.code}'}")
        if reply.metadata.src_node_id != sent.node:
            raise _NotUsableError(f"node {reply.metadata.src_node_id} answered in place of node {sent.node}")
        try:
            answer = unpack_answer(reply.content)
        except ProtocolError as error:
            raise _NotUsableError(str(error)) from None
        match answer:
            case ClientUpdate():
                return _expected(answer, sent.task)
            case Lacking():
                self._send_modules(answer, sent)
                return None
            case Refusal():
                raise _NotUsableError(answer.text)
            case _:
                raise _NotUsableError("it said who it is in place of an answer")

    def _send_modules(self, answer: Lacking, sent: _Sent) -> None:
        """Send a task again, with the fixed modules that the node does not have.

        What it had a moment ago another task may have displaced from its cache, so the second time it gets all.
        """
        known = {module.digest for module in sent.task.frozen}
        if not answer.digests or not known.issuperset(answer.digests):
            raise _NotUsableError("it asks for modules that its task does not need")
        if sent.modules == known:
            raise _NotUsableError("it asks again for modules that it was sent")
        self._hand_out(sent.task, known if sent.modules else answer.digests)

    def _note_unexpected(self, name: str, reply: Message) -> None:
        if name in self._late:
            task = self._late.pop(name).task
            if reply.has_content():
                self._ledger.fault(task.client, f"its answer of round {task.round} ({task.kind}) came too late")
        elif name in self._done:
            self._ledger.fault(self._done[name].task.client, "it answered twice")
        else:
            self._ledger.fault(f"node {reply.metadata.src_node_id}", "it answered what nobody had asked")


class _NotUsableError(Exception):
    """An answer without an update; the text is what is journalled."""


def _expected(update: ClientUpdate, task: ClientTask) -> ClientUpdate:
    """Return an update of the task that was given; one of another task would spoil the round."""
    ours, theirs = ((what.kind, what.round, what.client, what.number) for what in (task, update))
    if ours != theirs:
        raise _NotUsableError("it answered for another task: {} of round {}, client {}, number {}".format(*theirs))
    return update


def shared_bytes(parts: Parts) -> int:
    """Return the bytes of the whole model's shared parameters: what jFAT sends each way."""
    chain = parts.workspaces[BACKBONE].chain
    return sum(chain.tensors[name].nbytes for name in chain.shared())
