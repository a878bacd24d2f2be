"""The Flower engine: tasks go to the nodes of a Flower federation as messages, and answers come back.

A node may be gone, hang, or answer late, twice, for another task or with nonsense. None of that stops a run: its answer
is left out of the round and the reason is journalled.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from flwr.app import Message
from flwr.serverapp import Grid

from fedprophet.engines.plain import PlainEngine
from fedprophet.engines.registry import EngineParts, cores
from fedprophet.errors import TrainingError
from fedprophet.fleet.network import payload_bytes
from fedprophet.flower.manifest import RunManifest, run_id
from fedprophet.flower.node_registry import KeyedClients, NodeRegistry
from fedprophet.flower.protocol import Hello, Lacking, ProtocolError, harmless, pack_task
from fedprophet.flower.settings import FlowerSettings
from fedprophet.flower.transport import MOST_AT_ONCE, SPARE_BYTES, Ledger, Timeouts, Transport, open_reply
from fedprophet.messages.answers import Answer
from fedprophet.messages.tasks import ModelTask, Report, Task, Train
from fedprophet.messages.values import BACKBONE, SERVER
from fedprophet.server.coordinator import Record

MOST_LATE = 1000
"""How many unanswered messages are remembered, to recognise late answers."""


@dataclass(frozen=True)
class _Sent:
    """A task on its way, and the digests of the frozen modules that are attached to it."""

    task: Task
    node: int
    modules: frozenset[str] = frozenset()


class FlowerEngine:
    """Sends each task to the node of its client. Tasks of the server itself are carried out here."""

    def __init__(
        self,
        grid: Callable[[], Grid],
        parts: EngineParts,
        run: Callable[[], str],
        manifest: RunManifest,
        timeouts: Timeouts,
        ledger: Ledger | None = None,
        look: Callable[[], None] = lambda: None,
        keys: KeyedClients | None = None,
        lend: Callable[[Task], None] = lambda task: None,
    ) -> None:
        """Make the engine of a run.

        `grid` returns Flower's connection and `run` the run's id; neither is called before the first task goes out.
        `look` is called while the engine waits, and raises if nothing can come any more. Without `keys` a node is the
        client that it says it is. `lend` is called with each task before any goes out. It raises if the client's own
        layers are in the run's folder and are not as they were left.
        """
        self._timeouts, self._look, self._lend = timeouts, look, lend
        self._run, self._manifest = cache(run), manifest.to_text()
        self._plain = PlainEngine(parts.population, parts.workspaces, parts.reserve)
        self._workspaces = parts.workspaces
        self._whole = shared_bytes(parts)
        self._ledger = ledger or Ledger()
        self._transport = Transport(grid, self._ledger)
        self._registry = NodeRegistry(self._transport, timeouts, self._ledger, parts.config.population.clients, keys)
        self._pending: dict[str, _Sent] = {}
        self._late: dict[str, _Sent] = {}
        self._done: dict[str, _Sent] = {}
        self.failed = False
        """Whether Flower has reported a failure, such as a process that died."""

    @property
    def remote(self) -> bool:
        """Whether the nodes are real devices, whose data the server does not know."""
        return not self._timeouts.simulated

    @property
    def busy(self) -> bool:
        """Whether a task is on its way."""
        return bool(self._pending)

    def map(self, tasks: Iterable[Task]) -> Iterator[Answer]:
        """Carry out the tasks; answers come in the order in which they arrive, and some may be missing."""
        tasks = list(tasks)
        yield from self._plain.map(task for task in tasks if task.client == SERVER)
        away = [task for task in tasks if task.client != SERVER]
        if away:
            for task in away:
                self._lend(task)
            self._ledger.trainers |= {task.client for task in away if isinstance(task, Train)}
            yield from self._carry_out(away)

    def account(self) -> Record:
        """Return the bytes of tasks and answers since the last call, and which clients were left out and why."""
        return self._ledger.close(self._whole)

    def _carry_out(self, tasks: Sequence[Task]) -> Iterator[Answer]:
        self._give_up()  # on an earlier phase whose answers were not all taken
        self._done.clear()
        self._registry.meet({task.client for task in tasks}, self._look)
        waiting, refusals, answers = deque(tasks), list[str](), 0
        end = time.monotonic() + self._timeouts.deadline
        while waiting or self._pending:
            while waiting and (self._timeouts.window is None or len(self._pending) < self._timeouts.window):
                self._hand_out(waiting.popleft())
            heard = False
            for reply in self._transport.fetch([*self._pending, *self._some_late()]):
                heard = True
                answer = self._accept(reply, refusals)
                if answer is not None:
                    answers += 1
                    yield answer
            if heard and self._timeouts.simulated:
                end = time.monotonic() + self._timeouts.deadline
            if time.monotonic() >= end:
                break
            if not heard and self._pending:
                self._look()
                time.sleep(self._timeouts.interval)
        for task in (*waiting, *(sent.task for sent in self._pending.values())):
            self._ledger.fault(task.client, f"no answer within {self._timeouts.deadline:g} s")
        self._give_up()
        if self._timeouts.simulated and refusals and not answers:
            # The nodes of a simulation run this same program: if none succeeds, the fault is not theirs.
            raise TrainingError(harmless(refusals[0]))

    def _give_up(self) -> None:
        self._late |= self._pending
        self._late = dict(list(self._late.items())[-MOST_LATE:])
        self._pending = {}

    def _some_late(self) -> list[str]:
        """Return a few of the messages that were given up, in turn: there may be many, and they are not urgent."""
        some = list(self._late)[:MOST_AT_ONCE]
        for name in some:
            self._late[name] = self._late.pop(name)
        return some

    def _hand_out(self, task: Task, lacking: Iterable[str] = ()) -> None:
        node = self._registry.node(task.client)
        if node is None:
            self._ledger.fault(task.client, self._registry.why_not(task.client))
            return
        modules = {name: self._workspaces[BACKBONE].modules[name] for name in lacking}
        content = pack_task(task, run=self._run(), manifest=self._manifest, modules=modules)
        name = self._transport.send(content, node, str(task.round))
        if name is None:
            self._ledger.fault(task.client, "the task could not be sent")
        else:
            self._pending[name] = _Sent(task, node, frozenset(modules))

    def _accept(self, reply: Message, refusals: list[str]) -> Answer | None:
        """Return a usable answer; None if there is none, which is noted."""
        name = reply.metadata.reply_to_message_id
        sent = self._pending.pop(name, None)
        if sent is None:
            self._note_unexpected(name, reply)
            return None
        self._done[name] = sent
        self.failed |= not reply.has_content()
        try:
            answer = open_reply(reply, sent.node, self._most(sent.task))
            if not isinstance(answer, Lacking):
                return _expected(answer, sent.task)
            self._send_modules(answer, sent)
        except ProtocolError as error:
            refusals.append(str(error))
            self._ledger.fault(sent.task.client, str(error))
        return None

    def _most(self, task: Task) -> int:
        """Return how many bytes an answer may have: twice the task's parameters and the client's own layers.

        Those layers come only where they were asked for. They may have a second set of statistics.
        """
        parameters = payload_bytes(task.parameters) if isinstance(task, ModelTask) else 0
        wants_local = isinstance(task, Report | Train) and task.wants_local
        layers = 2 * payload_bytes(self._workspaces[task.architecture].initial) if wants_local else 0
        return 2 * (parameters + layers) + SPARE_BYTES

    def _send_modules(self, answer: Lacking, sent: _Sent) -> None:
        """Send a task again, with the frozen modules that the node does not have.

        Another task may have displaced those that it had a moment ago, so the second time it gets all.
        """
        known = {module.digest for module in sent.task.frozen} if isinstance(sent.task, ModelTask) else set()
        if not answer.digests or not known.issuperset(answer.digests):
            raise ProtocolError("it asks for modules that its task does not need")
        if sent.modules == known:
            raise ProtocolError("it asks again for modules that it was sent")
        self._hand_out(sent.task, known if sent.modules else answer.digests)

    def _note_unexpected(self, name: str, reply: Message) -> None:
        if name in self._late:
            task = self._late.pop(name).task
            if reply.has_content():
                self._ledger.fault(task.client, f"its answer of round {task.round} ({task.kind}) came too late")
        elif name in self._done:
            self._ledger.fault(self._done[name].task.client, "it answered twice")
        else:
            self._ledger.fault(f"node {reply.metadata.src_node_id}", "it answered a question that was not asked")


def _expected(answer: Answer | Hello, task: Task) -> Answer:
    """Return an answer to the task that was sent; refuse one to another task."""
    if isinstance(answer, Hello):
        raise ProtocolError("it sent a hello instead of an answer")
    ours, theirs = ((each.kind, each.round, each.client, each.number) for each in (task, answer))
    if ours != theirs:
        raise ProtocolError("it answered for another task: {} of round {}, client {}, number {}".format(*theirs))
    return answer


def shared_bytes(parts: EngineParts) -> int:
    """Return the bytes of the whole model's shared parameters: what joint training sends each way."""
    chain = parts.workspaces[BACKBONE].chain
    return sum(chain.tensors[name].nbytes for name in chain.shared())


def engine_of_devices(grid: Grid, parts: EngineParts, keys: KeyedClients | None) -> FlowerEngine:
    """Return the engine of a run whose clients are on machines of their own, each with a key if there are `keys`."""
    home = parts.clients.parent.absolute() if parts.clients else None
    run = partial(run_id, home, deployed=True)
    timeouts = Timeouts(parts.config.of(FlowerSettings).deadline)
    return FlowerEngine(lambda: grid, parts, run, RunManifest.of(parts), timeouts, keys=keys)


def engine_of_simulation(
    grid: Callable[[], Grid],
    parts: EngineParts,
    home: Path,
    ledger: Ledger | None = None,
    look: Callable[[], None] = lambda: None,
) -> FlowerEngine:
    """Return the engine of a run in Flower's simulation, whose clients keep their files in `home`."""
    flower = parts.config.of(FlowerSettings)
    # The window keeps the actors busy without filling the memory. Looking for answers costs next to nothing.
    timeouts = Timeouts(flower.deadline, simulated=True, window=32, interval=0.02)
    together = max(1, cores(parts.config) // flower.cpus)
    manifest = RunManifest.of(parts, home=str(home), threads=flower.cpus, together=together)

    def lend(task: Task) -> None:
        parts.layers.lend(task.architecture, task.client, task.timeline, task.layers_before)

    run = partial(run_id, home, deployed=False)
    return FlowerEngine(grid, parts, run, manifest, timeouts, ledger, look, lend=lend)
