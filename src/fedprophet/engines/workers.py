"""The workers engine: clients run side by side in worker processes, one thread in each.

A second thread hardly helps the small layers of one client; a second client does. Every draw is named by what it is
for, so the updates are the same, bit for bit, whatever the number of workers and whoever runs which client. Workers
compute by the fast plan (`engines.cpu_plan`), which rounds differently from the plain engine; given the same
plan and one thread, that one makes the same updates.

Workers are forked, so that population, models and data need not be sent. All that passes is tasks and updates. The
server's store of fixed modules and the clients' own layers stay in this process: a module goes to a worker when a task
first needs it there, a client's layers go with its task, and what the client wants to keep comes back.
"""

import ctypes
import os
import select
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NoReturn

import torch
from torch import Tensor

from fedprophet.client.run import layers_before, run_client
from fedprophet.client.workspace import Workspace
from fedprophet.engines.channel import Channel, ClosedError, Shared
from fedprophet.engines.cpu_plan import fast_plan
from fedprophet.engines.plain import EmbeddedEngine
from fedprophet.errors import ConfigError, FedProphetError, TrainingError
from fedprophet.fleet.population import Population
from fedprophet.messages.task import ClientTask, ClientUpdate, TaskKind, Timeline

AT_HOME: frozenset[TaskKind] = frozenset({"report", "adopt"})
"""Kinds of task that need no model: they are done here, where the clients' own layers are."""
CACHING: frozenset[TaskKind] = frozenset({"train", "measure"})
"""Kinds of task that cache a client's features behind frozen modules."""
SECONDS_TO_LEAVE = 5.0
"""A worker that has not ended by then is killed."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT, _KEPT_PIECE = 2**31 - 1, 2**25
"""Bytes that the C library keeps: in all, and the largest piece, of which it takes no more."""
SECONDS_BETWEEN_LOOKS = 2.0
"""How often a worker looks whether the process that it works for is still there."""


class WorkerError(RuntimeError):
    """Something unexpected happened in a worker; the text is the traceback there."""


@dataclass(frozen=True)
class _Job:
    """A task, the client's own layers, and those fixed modules that this worker has not seen yet."""

    task: ClientTask
    own: Mapping[str, Tensor] | None
    modules: Sequence[Mapping[str, Tensor]]


@dataclass(frozen=True)
class _Put:
    """What a client wants to keep: the arguments of `LocalLayers.put`."""

    architecture: str
    client: int
    round: int
    tensors: Mapping[str, Tensor]
    timeline: Timeline


@dataclass(frozen=True)
class _Outcome:
    """What came of a job: an update and what the client keeps, or the error that took its place."""

    update: ClientUpdate | None = None
    puts: Sequence[_Put] = ()
    error: tuple[type[FedProphetError], str] | None = None
    trace: str = ""


@dataclass
class _Worker:
    """A worker process, seen from this one. `modules` are the fixed modules that it has."""

    process: int
    channel: Channel
    modules: set[str] = field(default_factory=set)
    task: ClientTask | None = None


class WorkerEngine:
    """Gives each worker one task at a time. Workers start with the engine, and anew where they had to be stopped."""

    def __init__(self, population: Population, workspaces: Mapping[str, Workspace], reserve: int, workers: int) -> None:
        if not sys.platform.startswith("linux"):
            raise ConfigError('engine = "workers" needs Linux, where processes can be forked. Use "auto" or "plain"')
        self._plain = EmbeddedEngine(population, workspaces, reserve)
        self._workspaces = workspaces
        self._count = workers
        self._crew: list[_Worker] = []
        self._homes: dict[int, int] = {}
        self._turn = 0
        self._finalizer: weakref.finalize[..., WorkerEngine] | None = None
        self._hire()

    def map(self, tasks: Iterable[ClientTask]) -> Iterator[ClientUpdate]:
        """Carry out the tasks, side by side; updates come in the order in which they are done."""
        tasks = list(tasks)
        yield from self._plain.map(task for task in tasks if task.kind in AT_HOME)
        away = [task for task in tasks if task.kind not in AT_HOME]
        if away:
            yield from self._spread(away)

    def close(self) -> None:
        """End the workers. The engine can still be used: it hires others."""
        self._turn += 1
        if self._finalizer is not None:
            self._finalizer()
            self._finalizer = None

    @property
    def processes(self) -> tuple[int, ...]:
        """The ids of the worker processes."""
        return tuple(worker.process for worker in self._crew)

    def _hire(self) -> None:
        # The server's own sums, too, are those of a run with one thread.
        ONE_THREAD.__enter__()
        self._crew = []
        self._homes.clear()
        self._finalizer = weakref.finalize(self, _dismiss, self._crew)
        try:
            for _ in range(self._count):
                self._crew.append(_fork(self._plain, self._workspaces, self._count))
        except OSError as error:
            self.close()
            raise TrainingError(
                f"cannot start {self._count} worker processes: {error.strerror}. Set threads to a smaller number"
            ) from error

    def _spread(self, tasks: Sequence[ClientTask]) -> Iterator[ClientUpdate]:
        if any(worker.task for worker in self._crew):
            self.close()  # somebody did not take all updates; those that are left must not be taken for new ones
        if not self._crew:
            self._hire()
        self._turn += 1
        turn = self._turn
        try:
            yield from self._carry_out(_Queues(tasks, self._homes, self._count), _shared(tasks), turn)
        finally:
            if turn == self._turn and any(worker.task for worker in self._crew):
                self.close()

    def _carry_out(self, queues: "_Queues", shared: Shared, turn: int) -> Iterator[ClientUpdate]:
        """Keep every worker busy. One that is given a task is waiting for it, so neither side waits for the other."""
        with selectors.DefaultSelector() as ready:
            for number, worker in enumerate(self._crew):
                worker.channel.forget()
                ready.register(worker.channel, selectors.EVENT_READ, number)
                self._give(number, queues, shared)
            while any(worker.task for worker in self._crew):
                for key, _ in ready.select():
                    outcome = _receive(self._crew[key.data])
                    self._give(key.data, queues, shared)
                    yield self._accept(outcome)
                    if turn != self._turn:
                        raise RuntimeError("the workers engine was given other tasks before it was through with these")

    def _give(self, number: int, queues: "_Queues", shared: Shared) -> None:
        worker, task = self._crew[number], queues.next_for(number)
        worker.task = task
        if task is None:
            return
        if task.frozen and task.kind in CACHING:
            self._homes[task.client] = number
        workspace = self._workspaces[task.architecture]
        own = workspace.layers.get(task.architecture, task.client, task.timeline, layers_before(task))
        unseen = {module.digest for module in task.frozen} - worker.modules
        worker.modules |= unseen
        try:
            worker.channel.send(_Job(task, own, [workspace.modules[name] for name in sorted(unseen)]), shared)
        except ClosedError:
            raise _lost(worker) from None

    def _accept(self, outcome: _Outcome) -> ClientUpdate:
        if outcome.error is not None:
            kind, text = outcome.error
            raise kind(text)
        if outcome.update is None:
            raise WorkerError(f"in a worker process:\n{outcome.trace}")
        for put in outcome.puts:
            layers = self._workspaces[put.architecture].layers
            layers.put(put.architecture, put.client, put.round, put.tensors, put.timeline)
        return outcome.update


class _Queues:
    """Who carries out what: a client goes to the worker that has its features, any other where least is waiting.

    The longest tasks come first, those of the most atoms, so that no worker is left with one when the others are done.
    A worker that has nothing left takes over from the one with most: computing features again is less than waiting.
    """

    def __init__(self, tasks: Sequence[ClientTask], homes: Mapping[int, int], workers: int) -> None:
        self._queues: list[deque[ClientTask]] = [deque() for _ in range(workers)]
        tasks = sorted(tasks, key=lambda task: task.first - task.last)
        for task in tasks:
            if task.client in homes:
                self._queues[homes[task.client]].append(task)
        for task in tasks:
            if task.client not in homes:
                min(self._queues, key=len).append(task)

    def next_for(self, worker: int) -> ClientTask | None:
        """Return what a worker does next; None where everything is given away."""
        if self._queues[worker]:
            return self._queues[worker].popleft()
        longest = max(self._queues, key=len)
        return longest.pop() if longest else None


def _shared(tasks: Sequence[ClientTask]) -> dict[int, int]:
    """Number the tensors that several tasks have in common, such as the model that a round starts from."""
    counts = Counter(id(tensor) for task in tasks for tensor in (*task.parameters.values(), *task.targets.values()))
    return {name: number for number, name in enumerate(name for name, count in counts.items() if count > 1)}


def _receive(worker: _Worker) -> _Outcome:
    try:
        outcome: _Outcome = worker.channel.receive()
    except ClosedError:
        raise _lost(worker) from None
    return outcome


def _lost(worker: _Worker) -> TrainingError:
    """Say how a worker ended that should not have."""
    how = "ended by itself"
    with suppress(ChildProcessError):
        _, status = os.waitpid(worker.process, 0)
        if os.WIFSIGNALED(status):
            how = f"was ended by {signal.Signals(os.WTERMSIG(status)).name}, as when the memory runs out"
    what = f" while client {worker.task.client} was to {worker.task.kind}" if worker.task else ""
    return TrainingError(
        f"a worker process {how}{what}. Fewer workers need less memory: set threads to their number "
        "(to go on with a run, in its config.toml)"
    )


# The server's side of starting and ending workers.

_open: set[Channel] = set()
"""This process's ends of all connections: a forked worker closes the copies that it gets, or nobody would hang up."""


class OneThread:
    """Lets torch use one thread while anybody needs that; afterwards it has as many as before."""

    def __init__(self) -> None:
        self._holders = 0
        self._before = 1

    def __enter__(self) -> None:
        if not self._holders:
            self._before = torch.get_num_threads()
        self._holders += 1
        torch.set_num_threads(1)

    def __exit__(self, *_: object) -> None:
        self._holders -= 1
        if not self._holders:
            torch.set_num_threads(self._before)


ONE_THREAD = OneThread()


def _dismiss(crew: list[_Worker]) -> None:
    """End workers: they notice that the connection is closed, even in the middle of a task."""
    for worker in crew:
        _open.discard(worker.channel)
        worker.channel.close()
    for worker in crew:
        _reap(worker.process)
    crew.clear()
    ONE_THREAD.__exit__()


def _reap(process: int) -> None:
    """Wait for a worker's end, so that nothing is left of it."""
    end = time.monotonic() + SECONDS_TO_LEAVE
    with suppress(ChildProcessError):  # somebody else has waited for it
        while os.waitpid(process, os.WNOHANG) == (0, 0):
            if time.monotonic() > end:
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
                return
            time.sleep(0.001)


def _fork(plain: EmbeddedEngine, workspaces: Mapping[str, Workspace], workers: int) -> _Worker:
    ours, theirs = socket.socketpair()
    parent = os.getpid()
    with warnings.catch_warnings():
        # A worker uses one thread and takes no lock that another thread of this process could hold.
        warnings.simplefilter("ignore", DeprecationWarning)
        process = os.fork()
    if process == 0:
        try:
            ours.close()
            _work(Channel(theirs), plain, workspaces, workers, parent)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)  # whatever happens, a worker never returns into the program that it is a copy of
    theirs.close()
    worker = _Worker(process, Channel(ours))
    _open.add(worker.channel)
    return worker


# The worker's side.


class _Desk:
    """A client's own layers as a worker sees them: those that came with the task; what is stored goes back with it."""

    def __init__(self) -> None:
        self.given: Mapping[str, Tensor] | None = None
        self.puts: list[_Put] = []

    def get(self, architecture: str, client: int, timeline: Timeline, before: int) -> Mapping[str, Tensor] | None:
        """Return the layers that came with the task."""
        return self.given

    def put(
        self, architecture: str, client: int, round: int, tensors: Mapping[str, Tensor], timeline: Timeline
    ) -> None:
        """Have the layers stored by the server's process."""
        self.puts.append(_Put(architecture, client, round, tensors, timeline))


def _work(
    channel: Channel, plain: EmbeddedEngine, workspaces: Mapping[str, Workspace], workers: int, parent: int
) -> NoReturn:
    """Be a worker: carry out jobs until nobody is there to give any."""
    torch.set_num_threads(1)
    _keep_memory()
    # Ctrl-C and polite kills are for the process that the workers work for; they end with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for other in _open:
        other.drop()
    features, desk = next(iter(workspaces.values())).features.share(workers), _Desk()
    for workspace in workspaces.values():
        workspace.features, workspace.layers = features, desk
        workspace.run_by(fast_plan)
    leaving = threading.Lock()

    def leave() -> NoReturn:
        leaving.acquire()
        features.clear()
        os._exit(0)

    threading.Thread(target=_watch, args=(channel, parent, leave), daemon=True).start()
    while True:
        try:
            job = channel.receive()
            channel.send(_outcome(job, plain, workspaces, desk))
        except ClosedError:
            leave()


def _keep_memory() -> None:
    """Have the C library keep memory that is freed: the next batch needs as much, and new pages cost time."""
    with suppress(AttributeError):  # another C library than glibc
        options = ctypes.CDLL(None).mallopt
        options(_M_MMAP_THRESHOLD, _KEPT_PIECE)
        options(_M_TRIM_THRESHOLD, _KEPT)


def _watch(channel: Channel, parent: int, leave: Callable[[], NoReturn]) -> None:
    """Leave at once when the connection is closed or the process behind it is gone, even in the middle of a task."""
    hangup = select.poll()
    hangup.register(channel, select.POLLRDHUP)
    while not hangup.poll(1000 * SECONDS_BETWEEN_LOOKS):
        if os.getppid() != parent:
            break
    leave()


def _outcome(job: _Job, plain: EmbeddedEngine, workspaces: Mapping[str, Workspace], desk: _Desk) -> _Outcome:
    task = job.task
    try:
        workspace = workspaces[task.architecture]
        for module in job.modules:
            workspace.modules.add(module)
        desk.given, desk.puts = job.own, []
        return _Outcome(run_client(task, plain.client(task.client), workspace), desk.puts)
    except FedProphetError as error:
        return _Outcome(error=(type(error), str(error)))
    except Exception:
        return _Outcome(trace=traceback.format_exc())
