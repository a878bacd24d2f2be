"""The Flower engine: tasks go to the nodes of a Flower federation as messages, and their answers come back.

A node may be gone, hang, answer late, twice, something else or nonsense. None of that stops a run: its update is left
out of the round and the reason is journalled.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Protocol

from flwr.app import Message, RecordDict
from torch import Tensor

from fedprophet.client.task import BACKBONE, SERVER, ClientTask, ClientUpdate
from fedprophet.engines import Parts, cores
from fedprophet.engines.embedded import EmbeddedEngine
from fedprophet.errors import FedProphetError, TrainingError
from fedprophet.flower.protocol import (
    PROTOCOL,
    Hello,
    Lacking,
    ProtocolError,
    Refusal,
    harmless,
    hello_request,
    pack_task,
    unpack_answer,
    wire_bytes,
)
from fedprophet.flower.terms import Terms, run_id
from fedprophet.server.coordinator import Record
from fedprophet.version import __version__

QUERY = "query"
"""The type of all messages: a ClientApp has one handler for it."""
VALID_SECONDS = 30 * 86400.0
"""Flower throws messages away that are older. Ours are given up by the deadline."""
MOST_LATE = 1000
"""So many messages that were given up are remembered, to know a late answer when it comes."""
MOST_AT_ONCE = 8
"""So many answers are fetched at a time: each may hold a whole model, and all of them would fill the memory."""
WINDOW = 32
"""Messages on their way at a time in a simulation: enough to keep its actors busy, and few enough for the memory."""
SIMULATED_INTERVAL = 0.02
"""Seconds between two looks for answers in a simulation, where looking costs next to nothing."""
SPARE_BYTES = 2**20
"""What an answer may have beside tensors, and all that a node may say when it is asked who it is."""
log = logging.getLogger("fedprophet")

Owners = Callable[[], Mapping[int, int | None]]
"""Returns the client that each connected node's key was made for; None for a key that is no client's."""


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
        text = harmless(reason)
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
            log.warning("a message could not be sent: %s", harmless(str(error)))
            return None
        if not ids or not ids[0]:
            return None
        self._ledger.sent += wire_bytes(content)
        return ids[0]

    def fetch(self, ids: Iterable[str]) -> Iterator[Message]:
        """Yield the answers that have come to messages with these ids, a few at a time in memory."""
        for some in _batches(list(ids), MOST_AT_ONCE):
            try:
                replies = deque(self._grid.pull_messages(some))
            except FedProphetError:
                raise
            except Exception as error:
                log.warning("answers could not be fetched: %s", harmless(str(error)))
                return
            self._ledger.received += sum(wire_bytes(reply.content) for reply in replies if reply.has_content())
            while replies:
                yield replies.popleft()

    def online(self) -> set[int] | None:
        """Return the nodes that are connected; None where Flower does not say."""
        try:
            return set(self._grid.get_node_ids())
        except FedProphetError:
            raise
        except Exception as error:
            log.warning("the nodes cannot be listed: %s", harmless(str(error)))
            return None


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
            log.warning("the keys of the nodes cannot be listed: %s", harmless(str(error)))
            return {}
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
        owners: Owners | None = None,
    ) -> None:
        """Make the engine of a run.

        `run` returns the run's id, and is called when the first task goes out. `look` is called while the engine waits,
        and may raise where waiting has become vain. Without `owners` a node is the client that it says it is.
        """
        self._pace, self._look = pace, look
        self._run, self._terms = cache(run), terms.to_text()
        self._plain = EmbeddedEngine(parts.population, parts.workspaces, parts.reserve)
        self._modules = parts.workspaces[BACKBONE].modules
        self._workspaces = parts.workspaces
        self._whole = shared_bytes(parts)
        self._ledger = ledger or Ledger()
        self._post = Post(grid, self._ledger)
        self._roster = Roster(self._post, pace, self._ledger, parts.config.population.clients, owners)
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
        waiting, refusals, updates = deque(tasks), list[str](), 0
        end = time.monotonic() + self._pace.deadline
        while waiting or self._pending:
            while waiting and (self._pace.window is None or len(self._pending) < self._pace.window):
                self._hand_out(waiting.popleft())
            heard = False
            for reply in self._post.fetch([*self._pending, *self._some_late()]):
                heard = True
                update = self._accept(reply, refusals)
                if update is not None:
                    updates += 1
                    yield update
            if heard and self._pace.simulated:
                end = time.monotonic() + self._pace.deadline
            if time.monotonic() >= end:
                break
            if not heard and self._pending:
                self._look()
                time.sleep(self._pace.interval)
        for task in (*waiting, *(sent.task for sent in self._pending.values())):
            self._ledger.fault(task.client, f"no answer within {self._pace.deadline:g} s")
        self._give_up()
        if self._pace.simulated and refusals and not updates:
            # Nodes of a simulation are this very program: what all of them say is no fault of the nodes.
            raise TrainingError(harmless(refusals[0]))

    def _give_up(self) -> None:
        self._late |= self._pending
        self._late = dict(list(self._late.items())[-MOST_LATE:])
        self._pending = {}

    def _some_late(self) -> list[str]:
        """Return a few of the messages that were given up, in turn: there may be many, and nobody waits for them."""
        some = list(self._late)[:MOST_AT_ONCE]
        for name in some:
            self._late[name] = self._late.pop(name)
        return some

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
            answer = unpack_answer(reply.content, self._most(sent.task))
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

    def _most(self, task: ClientTask) -> int:
        """Return how many bytes an answer may have: twice what the task's parameters and the client's own layers have.

        Those layers come only where they were asked for, and norm layers may have a second set of statistics.
        """
        layers = 2 * _bytes(self._workspaces[task.architecture].initial) if task.wants_local else 0
        return 2 * (_bytes(task.parameters) + layers) + SPARE_BYTES

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


def _bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _batches(ids: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    return (ids[start : start + size] for start in range(0, len(ids), size))


def shared_bytes(parts: Parts) -> int:
    """Return the bytes of the whole model's shared parameters: what jFAT sends each way."""
    chain = parts.workspaces[BACKBONE].chain
    return sum(chain.tensors[name].nbytes for name in chain.shared())


def engine_of_devices(grid: Grid, parts: Parts, owners: Owners | None) -> FlowerEngine:
    """Return the engine of a run whose clients are on machines of their own, each with a key if there are `owners`."""
    home = parts.clients.parent.absolute() if parts.clients else None
    run = partial(run_id, home, deployed=True)
    return FlowerEngine(grid, parts, run, Terms.of(parts), Pace(parts.config.flower.deadline), owners=owners)


def engine_of_simulation(
    grid: Grid, parts: Parts, home: Path, ledger: Ledger | None = None, look: Callable[[], None] = lambda: None
) -> FlowerEngine:
    """Return the engine of a run in Flower's simulation, whose clients keep their files in `home`."""
    flower = parts.config.flower
    pace = Pace(flower.deadline, simulated=True, window=WINDOW, interval=SIMULATED_INTERVAL)
    together = max(1, cores(parts.config) // flower.cpus)
    terms = Terms.of(parts, home=str(home), threads=flower.cpus, together=together)
    return FlowerEngine(grid, parts, partial(run_id, home, deployed=False), terms, pace, ledger, look)
