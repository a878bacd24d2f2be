"""The workers engine: clients run side by side in worker processes, one thread in each.

A second thread hardly helps the small layers of one client; a second client does. Every draw is named by what it is
for, so the answers are the same, bit for bit, for any number of workers, whichever of them runs a client. Workers
compute by the fast plan (`engines.cpu_plan`), which rounds differently from the plain engine; given the same plan and
one thread, the plain engine gives the same answers.

AutoAttack is carried out for several clients at once (`engines.row_attacks`), so that a batch is worth its overhead.

The server's store of frozen modules and the clients' own layers stay in this process: a module goes to a worker when a
task first needs it there, a client's layers go with its task, and what the client wants to keep comes back.
"""

import multiprocessing.util
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from multiprocessing.connection import wait

from fedprophet.client.measure import evaluated_positions
from fedprophet.engines.channel import Shared
from fedprophet.engines.plain import PlainEngine, make_plain
from fedprophet.engines.registry import EngineParts, can_fork, cores, engine
from fedprophet.engines.row_attacks import is_for_rows, packed
from fedprophet.engines.worker_process import Bundle, WorkerError, WorkerJob, WorkerProcess, WorkerResult
from fedprophet.errors import ConfigError, TrainingError
from fedprophet.interrupts import SECONDS_BETWEEN_LOOKS
from fedprophet.messages.answers import Answer
from fedprophet.messages.tasks import Distill, Evaluate, Measure, ModelTask, Task, Train
from fedprophet.threads import ONE_THREAD

ROWS_TOGETHER = 32
"""How many samples a worker attacks together with AutoAttack: more hardly take less time for each."""


@engine("workers", "clients side by side in worker processes, one CPU core each", single_threaded=True)
def make_workers(parts: EngineParts) -> "WorkerEngine":
    """Make the engine with a worker for each core."""
    return WorkerEngine(make_plain(parts), cores(parts.config))


class WorkerEngine:
    """Gives each worker one task at a time. Workers start with the engine, and anew after they had to be stopped."""

    def __init__(self, plain: PlainEngine, workers: int) -> None:
        if not can_fork():
            raise ConfigError(
                'engine = "workers" needs Linux, where processes can be forked, and a process that is not daemonic. '
                'Use "auto" or "plain"'
            )
        self._plain = plain
        self._count = workers
        self._workers: list[WorkerProcess] = []
        self._features_at: dict[int, int] = {}
        self._turn = 0
        self._end: multiprocessing.util.Finalize[None] | None = None
        self._start()

    def map(self, tasks: Iterable[Task]) -> Iterator[Answer]:
        """Carry out the tasks, side by side; answers come in the order in which they are done.

        Tasks that need no model are done here, where the clients' own layers are.
        """
        tasks = list(tasks)
        yield from self._plain.map(task for task in tasks if not isinstance(task, ModelTask))
        model_tasks = [task for task in tasks if isinstance(task, ModelTask)]
        if model_tasks:
            yield from self._spread(model_tasks)

    def close(self) -> None:
        """End the workers. The engine can still be used: it starts others."""
        self._turn += 1
        if self._end is not None:
            self._end()
            self._end = None

    @property
    def processes(self) -> tuple[int, ...]:
        """The ids of the worker processes."""
        return tuple(worker.id for worker in self._workers)

    def _start(self) -> None:
        # The server's own sums, too, are those of a run with one thread.
        ONE_THREAD.__enter__()
        self._workers = []
        self._features_at.clear()
        # Not weakref.finalize: at exit, multiprocessing waits for its processes, perhaps before that would run.
        self._end = multiprocessing.util.Finalize(self, _end, (self._workers,), exitpriority=1)
        try:
            for _ in range(self._count):
                self._workers.append(WorkerProcess(self._plain, self._count))
        except OSError as error:
            self.close()
            raise TrainingError(
                f"cannot start {self._count} worker processes: {error.strerror}. Set threads to a smaller number"
            ) from error

    @property
    def _busy(self) -> bool:
        return any(worker.tasks for worker in self._workers)

    def _spread(self, tasks: Sequence[ModelTask]) -> Iterator[Answer]:
        if self._busy:
            self.close()  # the answers that the last caller did not take must not be mistaken for new ones
        if not self._workers:
            self._start()
        self._turn += 1
        turn = self._turn
        try:
            queues = _Queues(self._bundles(tasks), self._features_at, self._count)
            yield from self._carry_out(queues, _shared(tasks), turn)
        finally:
            if turn == self._turn and self._busy:
                self.close()

    def _bundles(self, tasks: Sequence[ModelTask]) -> Iterator[Bundle]:
        """Yield tasks as workers are given them: evaluations under AutoAttack several at once, others one by one.

        What goes together does not depend on the number of workers.
        """
        attacked: dict[str, list[ModelTask]] = {}
        for task in tasks:
            if is_for_rows(task):
                attacked.setdefault(task.architecture, []).append(task)
            else:
                yield (task,)
        for some in attacked.values():
            yield from map(tuple, packed(some, self._samples, ROWS_TOGETHER))

    def _samples(self, task: ModelTask) -> int:
        assert isinstance(task, Evaluate)
        return len(evaluated_positions(task, len(self._plain.client(task.client).data.validation)))

    def _carry_out(self, queues: "_Queues", shared: Shared, turn: int) -> Iterator[Answer]:
        """Keep every worker busy. One that is given a task is waiting for it, so neither side blocks the other."""
        for number, worker in enumerate(self._workers):
            worker.channel.forget()
            self._give(number, queues, shared)
        while self._busy:
            ready = wait([worker.channel.connection for worker in self._workers], SECONDS_BETWEEN_LOOKS)
            for number, worker in enumerate(self._workers):
                if worker.channel.connection not in ready:
                    continue
                result = worker.receive()
                self._give(number, queues, shared)
                for answer in self._accept(result):
                    yield answer
                    if turn != self._turn:
                        raise RuntimeError("the workers engine was given other tasks before it was through with these")

    def _give(self, number: int, queues: "_Queues", shared: Shared) -> None:
        worker, bundle = self._workers[number], queues.next_for(number)
        if bundle is None:
            return
        first = bundle[0]
        if first.frozen and isinstance(first, Train | Measure):  # the worker caches the client's features
            self._features_at[first.client] = number
        workspace = self._plain.workspaces[first.architecture]
        layers = workspace.layers
        own = {t.client: layers.get(t.architecture, t.client, t.timeline, t.layers_before) for t in bundle}
        unseen = {module.digest for task in bundle for module in task.frozen} - worker.modules
        worker.modules |= unseen
        worker.send(WorkerJob(bundle, own, [workspace.modules[name] for name in sorted(unseen)]), shared)

    def _accept(self, result: WorkerResult) -> Sequence[Answer]:
        if result.error is not None:
            kind, text = result.error
            raise kind(text)
        if result.trace:
            raise WorkerError(f"in a worker process:\n{result.trace}")
        for own in result.own:
            self._plain.workspaces[own[0]].layers.put(*own)
        return result.answers


class _Queues:
    """Which worker does which task: the one that has the client's features, else the one with the shortest queue.

    The longest tasks come first, those of the most atoms, so that no worker is left with one when the others are done.
    A worker whose queue is empty takes over from the longest: computing features again is quicker than waiting.
    """

    def __init__(self, bundles: Iterable[Bundle], features_at: Mapping[int, int], workers: int) -> None:
        self._queues: list[deque[Bundle]] = [deque() for _ in range(workers)]
        bundles = sorted(bundles, key=lambda bundle: bundle[0].first - bundle[0].last)
        for bundle in bundles:
            if bundle[0].client in features_at:
                self._queues[features_at[bundle[0].client]].append(bundle)
        for bundle in bundles:
            if bundle[0].client not in features_at:
                min(self._queues, key=len).append(bundle)

    def next_for(self, worker: int) -> Bundle | None:
        """Return what a worker does next; None if no task is left."""
        if self._queues[worker]:
            return self._queues[worker].popleft()
        longest = max(self._queues, key=len)
        return longest.pop() if longest else None


def _shared(tasks: Sequence[ModelTask]) -> Shared:
    """Number the tensors that several tasks have in common, such as the model that a round starts from."""
    tables = [task.parameters for task in tasks] + [task.targets for task in tasks if isinstance(task, Distill)]
    counts = Counter(id(tensor) for table in tables for tensor in table.values())
    return {name: number for number, name in enumerate(name for name, count in counts.items() if count > 1)}


def _end(workers: list[WorkerProcess]) -> None:
    for worker in workers:
        worker.leave()
    for worker in workers:
        worker.join()
    workers.clear()
    ONE_THREAD.__exit__()
