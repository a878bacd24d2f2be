"""A worker process of the workers engine, and the server's handle of it.

A worker is forked, so that population, models and data need not be sent. All that passes is jobs and their results. It
ends when it is told to, or when the server's process is gone, even in the middle of a task.
"""

import ctypes
import multiprocessing
import os
import signal
import threading
import traceback
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, NoReturn

from torch import Tensor

from fedprophet.client.features import FeatureCache
from fedprophet.engines.channel import CLOSED, Channel, Shared
from fedprophet.engines.cpu_plan import fast_plan
from fedprophet.engines.plain import PlainEngine
from fedprophet.engines.row_attacks import RowAttacks
from fedprophet.errors import FedProphetError, TrainingError
from fedprophet.messages.answers import Answer
from fedprophet.messages.tasks import ModelTask
from fedprophet.messages.values import Timeline
from fedprophet.threads import set_threads

SECONDS_TO_LEAVE = 5.0
"""A worker that has not ended by then is killed."""
SECONDS_BETWEEN_LOOKS = 2.0
"""How often a worker checks that the server's process is still there."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_FREED_BYTES, _FREED_PIECE = 2**31 - 1, 2**25
"""Freed bytes that the C library keeps: in all, and the largest piece (it accepts no more)."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_FORK = multiprocessing.get_context("fork")
Bundle = tuple[ModelTask, ...]
"""Tasks of one architecture that a worker carries out together."""
ROW_BYTES = 2**30
"""What the activations of rows that are attacked together may take in a worker."""
OwnLayers = tuple[str, int, int, Mapping[str, Tensor], Timeline]
"""A client's own layers: the arguments of `LocalLayers.put`."""


class WorkerError(RuntimeError):
    """Something unexpected happened in a worker; the text is the traceback there."""


@dataclass(frozen=True)
class WorkerJob:
    """Tasks, their clients' own layers, and those of their frozen modules that this worker has not seen yet."""

    tasks: Bundle
    own: Mapping[int, Mapping[str, Tensor] | None]
    modules: Sequence[Mapping[str, Tensor]]


@dataclass(frozen=True)
class WorkerResult:
    """The result of a job: answers and the clients' new own layers, or an error."""

    answers: Sequence[Answer] = ()
    own: Sequence[OwnLayers] = ()
    error: tuple[type[FedProphetError], str] | None = None
    trace: str = ""


# The server's side ---------------------------------------------------------------------------------------------------


class WorkerProcess:
    """A worker, as the server's process sees it. `modules` are the digests of the frozen modules that it has."""

    def __init__(self, plain: PlainEngine, workers: int) -> None:
        ours, theirs = _FORK.Pipe()
        self.tasks: Bundle = ()
        self.modules: set[str] = set()
        self.channel = Channel(ours)
        self._process = _FORK.Process(target=_work, args=(theirs, ours, plain, workers))
        with warnings.catch_warnings():
            # Python warns because another thread may hold a lock that the copy would wait for. A worker computes with
            # one thread and takes no lock of another thread.
            warnings.filterwarnings("ignore", ".*use of fork", DeprecationWarning)
            before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # until the worker ignores them
            try:
                self._process.start()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        assert self._process.pid is not None
        self.id = self._process.pid

    def send(self, job: WorkerJob, shared: Shared) -> None:
        """Give the worker a job. It must have none."""
        self.tasks = job.tasks
        try:
            self.channel.send(job, shared)
        except CLOSED:
            raise self._lost() from None

    def receive(self) -> WorkerResult:
        """Wait for the result of the job."""
        try:
            result: WorkerResult = self.channel.receive()
        except CLOSED:
            raise self._lost() from None
        self.tasks = ()
        return result

    def leave(self) -> None:
        """Tell the worker to end. `join` waits for it."""
        with suppress(OSError):  # it has ended already
            self.channel.send(None)
        self.channel.connection.close()

    def join(self) -> None:
        """Wait until the worker has ended, so that nothing is left of it."""
        self._process.join(SECONDS_TO_LEAVE)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()

    def _lost(self) -> TrainingError:
        self._process.join(SECONDS_TO_LEAVE)
        code, how = self._process.exitcode, "ended by itself"
        if code is not None and code < 0:
            how = f"was ended by {signal.Signals(-code).name}, as when the memory runs out"
        what = f" while client {self.tasks[0].client} was to {self.tasks[0].kind}" if self.tasks else ""
        return TrainingError(
            f"a worker process {how}{what}. Use fewer workers to save memory: lower threads "
            "(for an existing run, in its config.toml)"
        )


# The worker's side ---------------------------------------------------------------------------------------------------


class _TaskLayers:
    """Clients' own layers as a worker sees them: they come with the job, and what a client keeps goes back."""

    def __init__(self) -> None:
        self.given: Mapping[int, Mapping[str, Tensor] | None] = {}
        self.stored: list[OwnLayers] = []

    def get(self, architecture: str, client: int, timeline: Timeline, before: int) -> Mapping[str, Tensor] | None:
        return self.given[client]

    def put(
        self, architecture: str, client: int, round: int, tensors: Mapping[str, Tensor], timeline: Timeline
    ) -> None:
        self.stored.append((architecture, client, round, tensors, timeline))


def _work(
    connection: "Connection[Any, Any]", other_end: "Connection[Any, Any]", plain: PlainEngine, workers: int
) -> NoReturn:
    """Do jobs. The listener ends the process."""
    other_end.close()  # or a message that the server's process dies over would be waited for without end
    # Ctrl-C and SIGTERM, which the terminal sends to the whole group, are for the server's process to handle.
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    set_threads(1)
    features, layers = next(iter(plain.workspaces.values())).features.share(workers), _TaskLayers()
    failed = _prepared(plain, features, layers)
    frugal = any(workspace.frugal for workspace in plain.workspaces.values())
    if not frugal:
        _keep_memory()
    rows = RowAttacks(plain.workspaces, plain.reserve if frugal else ROW_BYTES)
    channel, jobs = Channel(connection), SimpleQueue[WorkerJob]()
    threading.Thread(target=_listen, args=(channel, jobs, features), daemon=True).start()
    while True:
        job = jobs.get()
        result = failed or _result(job, plain, rows, layers)
        with suppress(*CLOSED):  # the listener sees it too
            channel.send(result)


def _prepared(plain: PlainEngine, features: FeatureCache, layers: _TaskLayers) -> WorkerResult | None:
    """Make workspaces this process's own; return what every job is answered with where that fails."""
    try:
        for workspace in plain.workspaces.values():
            workspace.features, workspace.layers = features, layers
            if workspace.frugal:
                workspace.move_to_files()
            else:
                workspace.run_by(fast_plan)
    except FedProphetError as error:  # no room for the files
        return WorkerResult(error=(type(error), str(error)))
    return None


def _keep_memory() -> None:
    """Have the C library keep memory that is freed: the next batch needs as much, and new pages cost time."""
    with suppress(AttributeError):  # a C library other than glibc
        set_option = ctypes.CDLL(None).mallopt
        set_option(_M_MMAP_THRESHOLD, _FREED_PIECE)
        set_option(_M_TRIM_THRESHOLD, _FREED_BYTES)
        set_option(_M_ARENA_MAX, 1)  # what the listener allocates is freed by the other thread


def _listen(channel: Channel, jobs: SimpleQueue[WorkerJob], features: FeatureCache) -> None:
    """Pass jobs on until the server's process wants no more or is gone. Then end this process, whatever it is doing."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    try:
        # Workers that are forked later hold copies of the other end, so its closing alone does not tell.
        while os.getppid() == parent.pid:
            if channel.connection.poll(SECONDS_BETWEEN_LOOKS):
                job = channel.receive()
                if job is None:
                    break
                jobs.put(job)
    finally:  # also where the memory does not suffice for a job: the server must not wait in vain
        features.clear()
        os._exit(0)


def _result(job: WorkerJob, plain: PlainEngine, rows: RowAttacks, layers: _TaskLayers) -> WorkerResult:
    try:
        for module in job.modules:
            plain.workspaces[job.tasks[0].architecture].modules.add(module)
        layers.given, layers.stored = job.own, []
        answers = plain.map(job.tasks) if len(job.tasks) == 1 else rows.map(job.tasks, plain)
        return WorkerResult(list(answers), layers.stored)
    except FedProphetError as error:
        return WorkerResult(error=(type(error), str(error)))
    except Exception:
        return WorkerResult(trace=traceback.format_exc())
