"""The workers engine: the plain engine's answers if both use one plan, and no process that outlives its use."""

import gc
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedprophet.cli.stopping import stopped_once
from fedprophet.client.workspace import Workspace
from fedprophet.engines import plain, worker_process, workers
from fedprophet.engines.channel import Channel
from fedprophet.engines.cpu_plan import fast_plan
from fedprophet.engines.worker_process import WorkerError
from fedprophet.engines.workers import WorkerEngine, _Queues, _shared
from fedprophet.errors import ConfigError, ModelError, TemporaryFileError, TrainingError
from fedprophet.messages.codec import encode
from fedprophet.messages.tasks import Distill, Report, Task, Train
from fedprophet.messages.values import SERVER, LocalTraining
from fedprophet.runs import session as sessions
from fedprophet.runs.files import RunFiles
from fedprophet.runs.observer import Observer
from fedprophet.runs.play import play
from fedprophet.runs.run import RunStoppedError, reopen, start
from fedprophet.runs.session import assemble
from fedprophet.server.coordinator import play_round
from fedprophet.threads import torch_threads

WORKERS = {"engine": "workers", "threads": 2}
SMALL = {"method": "jfat", "rounds": 3, "train.iterations": 1, "attack.steps": 1, "evaluate.clients": 2}
BRIEF = {"rounds": 1, "train.iterations": 1, "attack.steps": 1, "evaluate.steps": 1, "evaluate.clients": 2}
REFRESH = {
    "norm.refresh": "attacked",
    "norm.newcomers": "average",
    "train.calibration": "labels",
    "train.proximal": 0.1,
}
METHODS = {
    "fedprophet": {"train.warmup": 0, "memory.budget": "70%", "attack.feature_steps": 1, "measure.steps": 1},
    "feddf": {"method": "feddf", "rounds": 2, "distillation.public": 20, "distillation.iterations": 2},
    "refreshed": {**REFRESH, "method": "heterofl", "train.warmup": 0, "norm.layers": "statistics-local"},
    "jfat": {"method": "jfat", "rounds": 2, "population.cohort": 3},
    "mirrored": {"method": "jfat", "rounds": 2, "data.mirror": True, "train.calibration": "labels"},
    "moved": {"train.warmup": 0, "memory.budget": "70%", "rounds": 2, "data.shift": 1},
    "drawn back": {
        "method": "jfat",
        "rounds": 2,
        "train.warmup": 0,
        "train.calibration": "labels",
        "train.weighting": "boundary",
        "train.consistency": 1.0,
    },
    "heterofl": {"method": "heterofl", "rounds": 2, "population.cohort": 3},
    "fedrbn": {"method": "fedrbn", "rounds": 2, "population.cohort": 3, "memory.budget": "100%"},
    "refreshed after each stage": {
        **REFRESH,
        "rounds": 2,
        "norm.layers": "frozen",
        "norm.refresh_after": "stage",
        "norm.refresh_layers": "in-turn",
        "train.warmup": 0,
        "memory.budget": "70%",
        "attack.feature_steps": 1,
        "measure.steps": 1,
    },
}
PATIENCE = 600
"""Seconds after which something is stuck, on a machine with very much else to do."""
FORK = multiprocessing.get_context("fork")


@pytest.fixture
def opened(tiny):
    """Return a function that makes sessions, which are closed after the test."""
    made = []

    def make(changes=None, **options):
        made.append(assemble(tiny({**SMALL, **WORKERS, **(changes or {})}), **options))
        return made[-1]

    yield make
    for session in made:
        session.close()


@contextmanager
def within(seconds: float = PATIENCE) -> Iterator[None]:
    """Fail if it takes longer: a test must not hang."""

    def late(*_: object) -> None:
        raise AssertionError("stuck")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def alive(process: int) -> bool:
    """Whether a process runs; one that only waits to be reaped does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(process: int) -> bool:
    """Whether nothing is left of a process."""
    return not Path(f"/proc/{process}").exists()


def processor_ticks(process: int) -> int:
    """Return the processor time that a process has taken."""
    numbers = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return int(numbers[11]) + int(numbers[12])


def by_the_same_plan(engine):
    """Let the plain engine compute as workers do."""
    for workspace in engine.workspaces.values():
        workspace.run_by(fast_plan)
    return engine


STEP = LocalTraining(1, 2, 0.1, 0.0, 0.0, 0.0)


def training(session, round: int = 1) -> list[Task]:
    """Return the training tasks of a round: two."""
    method = session.method
    conversation = method.round(replace(method.initial(), round=round - 1))
    return list(conversation.send(list(session.engine.map(next(conversation)))))


def endless(session) -> list[Task]:
    """Return evaluations that take longer than any test."""
    task = session.method.evaluation_task(session.method.initial(), SERVER, session.world.image_threat(10**7))
    return [replace(task, number=number) for number in range(3)]


# The same bits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [*list(METHODS)[:1], *(pytest.param(name, marks=pytest.mark.slow) for name in list(METHODS)[1:])]
)
def test_every_method_does_the_same_as_with_one_client_after_the_other(name, tiny, play_in_memory, same_tensors):
    changes = {**BRIEF, **METHODS[name]}
    plain = play_in_memory(tiny({**changes, "engine": "plain"}), by_the_same_plan)
    spread = play_in_memory(tiny({**changes, **WORKERS}))
    spread.session.close()
    assert isinstance(spread.session.engine, WorkerEngine)
    assert spread.records == plain.records
    for ours, theirs in zip(spread.states, plain.states, strict=True):
        (values, tensors), (expected, expected_tensors) = encode(ours), encode(theirs)
        assert values == expected
        assert same_tensors(tensors, expected_tensors)
    for ours, theirs in zip(spread.layers, plain.layers, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(same_tensors(ours[client], theirs[client]) for client in ours)
    assert any(plain.layers[-1].values()) == (plain.session.config.norm.layers != "frozen")


def test_the_number_of_workers_makes_no_difference(tiny, play_in_memory, same_tensors):
    config = {**BRIEF, "method": "jfat", "population.cohort": 3, "train.warmup": 0, "engine": "workers"}
    played = [play_in_memory(tiny({**config, "threads": count})) for count in (1, 4)]
    for one in played:
        one.session.close()
    assert same_tensors(*(encode(one.states[-1])[1] for one in played))


def test_threads_that_this_process_has_used_before_do_not_matter(opened, same_tensors):
    """A forked process has none of them: waiting for one would never end."""
    plain = opened({"engine": "plain", "threads": 1})
    by_the_same_plan(plain.engine)
    expected = {update.client: update for update in plain.engine.map(training(plain))}
    with torch_threads(2):
        weight = torch.randn(64, 64, 3, 3, requires_grad=True)
        torch.conv2d(torch.randn(4, 64, 32, 32), weight).square().sum().backward()
        torch.randn(400, 400) @ torch.randn(400, 400)
        with within():
            session = opened()
            updates = {update.client: update for update in session.engine.map(training(session))}
    assert updates.keys() == expected.keys()
    assert all(same_tensors(updates[client].parameters, expected[client].parameters) for client in expected)


class Stop(Observer):
    def __init__(self, after_round: int) -> None:
        self.after_round = after_round

    def round_done(self, record, seconds):
        if record["round"] == self.after_round:
            raise KeyboardInterrupt


def contents(path):
    files = RunFiles(path)
    return {file.name: file.read_bytes() for file in (files.journal, files.model, files.results)}


@pytest.mark.slow
@pytest.mark.parametrize("engine", [WORKERS, {"engine": "plain", "threads": 1}])
def test_a_run_may_go_on_with_another_engine_or_number_of_workers(engine, tiny, tmp_path):
    play(start(tiny({**SMALL, **WORKERS}), tmp_path / "undisturbed"))
    first, then = tiny({**SMALL, **engine}), tiny({**SMALL, **WORKERS, "threads": 3})
    run = start(first, tmp_path / "run")
    with pytest.raises(RunStoppedError):
        play(run, Stop(after_round=1))
    config = tmp_path / "run" / "config.toml"
    text = config.read_text()
    for key in ("engine", "threads"):
        old, new = (f"{key} = {value!r}\n".replace("'", '"') for value in (getattr(first, key), getattr(then, key)))
        assert text.count(old) == 1
        text = text.replace(old, new)
    config.write_text(text)
    again = reopen(tmp_path / "run")
    assert len(again.session.engine.processes) == 3
    assert again.state.round == 1
    play(again)
    found, expected = contents(tmp_path / "run"), contents(tmp_path / "undisturbed")
    assert found["journal.jsonl"].count(b"\n") == expected["journal.jsonl"].count(b"\n")
    # The plain engine has rounded the first round differently.
    assert (found == expected) == (engine is WORKERS)


@pytest.mark.slow
def test_clients_are_attacked_by_autoattack_together_with_the_verdicts_that_they_have_alone(opened, monkeypatch):
    """Whoever goes together, by how many workers; also where clients keep two sets of statistics, which do not."""
    pytest.importorskip("pyautoattack")
    monkeypatch.setattr("fedprophet.engines.workers.ROWS_TOGETHER", 13)
    suites = importlib.import_module("fedprophet.attacks.autoattack")
    original = suites._suite

    def shortened(*arguments):  # workers are forked, and see it
        suite = original(*arguments)
        suite.apgd.n_iter, suite.apgd_targeted.n_iter, suite.apgd_targeted.n_target_classes = 10, 10, 3
        return suite

    monkeypatch.setattr(suites, "_suite", shortened)
    for method in ("jfat", "fedrbn"):
        changes = {"train.iterations": 12, "train.batch": 32, "rounds": 4, "model.options": {"width": 6}}
        session = opened({"method": method, **changes})
        engine, state = session.engine, session.method.initial()
        for _ in range(3):
            state, _ = play_round(session.method.round(state), engine)
        threat = replace(session.world.image_threat(1), radius=0.1)
        tasks = [
            replace(session.method.evaluation_task(state, client, threat), attack="aa-fast", samples=6)
            for client in (*range(5), SERVER)
        ]
        bundles = list(engine._bundles([*tasks, replace(tasks[0], attack="pgd")]))
        assert [len(bundle) for bundle in bundles] == [1, 2, 2, 2]
        together = {answer.client: answer for answer in engine.map(tasks)}
        alone = {answer.client: answer for answer in engine._plain.map(tasks)}
        assert together == alone
        assert any(sum(answer.broken.values()) for answer in alone.values())
        with closing(WorkerEngine(engine._plain, 1)) as single:
            assert {answer.client: answer for answer in single.map(tasks)} == together


# Who does what -------------------------------------------------------------------------------------------------------


def _tasks(*clients: int) -> list[Task]:
    return [
        Train(round=1, client=client, seed=0, number=number, training=STEP) for number, client in enumerate(clients)
    ]


def _queues(tasks: list[Task], features_at: dict[int, int], workers: int) -> _Queues:
    return _Queues([(task,) for task in tasks], features_at, workers)


def _given(queues: _Queues, *workers: int) -> list[int | None]:
    bundles = [queues.next_for(worker) for worker in workers]
    return [None if bundle is None else bundle[0].client for bundle in bundles]


def test_clients_go_to_the_worker_that_has_their_features_and_others_to_the_shortest_queue():
    queues = _queues(_tasks(1, 2, 3, 4, 5), {3: 1, 5: 1}, 2)
    # Worker 1 has 3 and 5; 1 and 2 level the queues, and 4 goes to the first of two equal ones.
    assert _given(queues, 1, 1) == [3, 5]
    assert _given(queues, 0, 0, 0) == [1, 2, 4]
    assert _given(queues, 0, 1) == [None, None]


def test_a_worker_without_work_takes_the_last_of_the_longest_queue():
    queues = _queues(_tasks(1, 2, 3), {1: 0, 2: 0, 3: 0}, 2)
    assert _given(queues, 1, 0, 1, 0) == [3, 1, 2, None]


def test_tasks_of_the_most_atoms_come_first():
    spans = {1: (2, 3), 2: (2, 3), 3: (2, 7), 4: (2, 4)}
    tasks = [replace(task, first=spans[task.client][0], last=spans[task.client][1]) for task in _tasks(1, 2, 3, 4)]
    # By length 3, 4, 1, 2, dealt in turn.
    assert _given(_queues(tasks, {}, 2), 0, 1, 1, 1, 1) == [3, 4, 2, 1, None]
    # A worker that has a client's features does not leave the longest for last either.
    assert _given(_queues(tasks, {1: 0, 3: 0}, 2), 0, 0) == [3, 1]


def test_shared_tensors_are_those_of_several_tasks():
    common, other, own = torch.zeros(1), torch.zeros(1), torch.zeros(1)
    tasks = [
        Train(round=1, client=0, seed=0, training=STEP, parameters={"a": common, "b": own}),
        Distill(round=1, client=1, seed=0, training=STEP, parameters={"a": common}, targets={"t": other}),
        Distill(round=1, client=2, seed=0, training=STEP, targets={"t": other}),
    ]
    assert _shared(tasks) == {id(common): 0, id(other): 1}


def test_reports_are_answered_by_this_process(opened):
    """Its store has all that they ask for: a client's layers need not travel there and back."""
    session = opened()
    (trained, *_) = list(session.engine.map(training(session)))
    session.close()
    report = Report(round=1, client=trained.client, seed=0, wants_local=True)
    (answer,) = session.engine.map([report])
    assert answer.local.keys() & session.world.initial_layers.keys()
    assert session.engine.processes == ()


def test_features_are_spilled_by_the_workers_and_removed(tiny, tmp_path, monkeypatch, play_in_memory):
    monkeypatch.setattr(sessions, "CACHE_MEMORY", 1)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    played = play_in_memory(tiny({**BRIEF, **METHODS["fedprophet"], **WORKERS}))
    folders = list(tmp_path.glob("fedprophet-features-*"))
    assert len(folders) == 2
    assert all(list(folder.iterdir()) for folder in folders)
    assert set(played.session.engine._features_at.values()) == {0, 1}
    played.session.close()
    assert list(tmp_path.iterdir()) == []


# Errors --------------------------------------------------------------------------------------------------------------


def test_an_error_of_the_users_comes_back_as_it_is(opened):
    messages = []
    for engine in ({"engine": "plain", "threads": 1}, WORKERS):
        session = opened(engine)
        task = training(session)[0]
        name = next(iter(task.parameters))
        wrong = replace(task, parameters={**task.parameters, name: torch.zeros(1)})
        with pytest.raises(ModelError) as error:
            list(session.engine.map([wrong]))
        messages.append(str(error.value))
        assert len(list(session.engine.map([task]))) == 1
    assert messages[0] == messages[1]
    assert "has shape (1,)" in messages[0]


def test_an_unexpected_error_comes_back_with_its_traceback(opened):
    session = opened()
    task = session.method.evaluation_task(session.method.initial(), 0, session.world.image_threat(1))
    with pytest.raises(WorkerError, match=r"(?s)Traceback.*in evaluate\n.*KeyError: 'nonsense'"):
        list(session.engine.map([replace(task, attack="nonsense"), replace(task, client=1)]))
    assert len(list(session.engine.map([task]))) == 1


@pytest.mark.parametrize("place", ["the task", "its arrival"])
def test_a_worker_out_of_memory_ends_in_a_sentence(opened, monkeypatch, place):
    def exhausted(*_):
        raise MemoryError

    with monkeypatch.context() as patch:  # for the workers, which are forked now
        patch.setattr(*((plain, "run_client") if place == "the task" else (Channel, "receive")), exhausted)
        session = opened()
    texts = {"the task": "out of memory while client . was to train", "its arrival": "a worker process ended by itself"}
    with within(), pytest.raises(TrainingError, match=rf"{texts[place]}.*threads"):
        list(session.engine.map(training(session)))


def test_a_worker_without_room_for_its_files_says_so(opened, monkeypatch):
    """The server's process has moved its own tensors to files before."""
    server, real = os.getpid(), Workspace.move_to_files

    def full(self):
        if os.getpid() != server:
            raise TemporaryFileError("cannot write 40 bytes: No space left on device. Set TMPDIR")
        real(self)

    monkeypatch.setattr(Workspace, "move_to_files", full)
    session = opened({"memory.enforce": True, "memory.budget": "100%"})
    with within(), pytest.raises(TemporaryFileError, match="No space left on device"):
        list(session.engine.map(training(session)))


def test_a_worker_that_dies_is_reported_and_replaced(opened):
    session = opened()
    victim = session.engine.processes[0]
    answers = session.engine.map(endless(session))
    os.kill(victim, signal.SIGKILL)
    with within(), pytest.raises(TrainingError, match=r"ended by SIGKILL.*while client -1 was to evaluate.*threads"):
        list(answers)
    assert session.engine.processes == ()
    assert len(list(session.engine.map(training(session)))) == 2
    assert victim not in session.engine.processes
    assert len(session.engine.processes) == 2


def test_processes_that_cannot_be_started_are_refused(opened, monkeypatch):
    real, children = os.fork, iter([True, False])

    def fork():
        if next(children):
            return real()
        raise BlockingIOError(11, "no more processes")

    monkeypatch.setattr(os, "fork", fork)
    with torch_threads(2):
        with pytest.raises(TrainingError, match="cannot start 2 worker processes: no more processes"):
            opened()
        assert multiprocessing.active_children() == []
        assert torch.get_num_threads() == 2


def test_a_daemonic_process_can_have_no_workers(opened, monkeypatch):
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)
    with pytest.raises(ConfigError, match=r"needs Linux.* and a process that is not daemonic"):
        opened()


# Processes end -------------------------------------------------------------------------------------------------------


def test_closing_ends_the_workers_and_puts_threads_back(opened):
    torch.set_num_threads(3)
    session = opened()
    processes = session.engine.processes
    assert len(processes) == len(set(processes)) == 2
    assert all(map(alive, processes))
    assert torch.get_num_threads() == 1
    session.close()
    assert all(map(gone, processes))
    assert torch.get_num_threads() == 3
    session.close()
    assert torch.get_num_threads() == 3
    # It can be used again.
    assert len(list(session.engine.map(training(session)))) == 2
    assert torch.get_num_threads() == 1


def test_threads_come_back_when_the_last_of_several_engines_is_closed(opened):
    torch.set_num_threads(2)
    first, second = opened({"threads": 1}), opened({"threads": 1})
    first.close()
    assert torch.get_num_threads() == 1
    assert len(list(second.engine.map(training(second)))) == 2
    second.close()
    assert torch.get_num_threads() == 2


def test_a_session_that_is_no_longer_used_leaves_no_process(tiny):
    session = assemble(tiny(WORKERS))
    processes = session.engine.processes
    del session
    gc.collect()
    assert all(map(gone, processes))


def test_a_refused_session_puts_threads_back(tiny):
    torch.set_num_threads(2)
    with pytest.raises(ConfigError, match=r"fleet\.pool"):
        assemble(tiny({**WORKERS, "fleet.pool": "nonsense"}))
    assert torch.get_num_threads() == 2


def test_answers_that_were_not_taken_are_not_mixed_up_with_later_ones(opened):
    session = opened()
    tasks = training(session)
    unfinished = session.engine.map([replace(task, number=9) for task in (*tasks, *tasks, *tasks)])
    assert next(unfinished).number == 9
    before = session.engine.processes
    assert sorted(update.number for update in session.engine.map(tasks)) == [0, 0]
    assert all(map(gone, before))
    with pytest.raises(RuntimeError, match="other tasks"):
        next(unfinished)


def test_stopping_in_the_middle_ends_the_workers_at_work(opened, monkeypatch):
    monkeypatch.setattr(worker_process, "SECONDS_TO_LEAVE", 2 * PATIENCE)  # none is killed
    session = opened()
    before = session.engine.processes
    answers = session.engine.map([*training(session), *endless(session)])
    next(answers)
    with within():
        answers.close()
        assert all(map(gone, before))


def test_a_signal_that_does_not_wake_the_server_is_heeded_all_the_same(opened, monkeypatch):
    """The system may give it to any thread, and one that comes just before the waiting begins does not end it."""
    session, waiting = opened(), threading.Event()
    wait = workers.wait

    def told(*arguments):
        waiting.set()
        return wait(*arguments)

    def send():
        waiting.wait()
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    monkeypatch.setattr(workers, "wait", told)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=send).start()
    try:
        with within(), pytest.raises(KeyboardInterrupt):
            list(session.engine.map(endless(session)))
    finally:
        signal.signal(signal.SIGINT, before)


class Run:
    """A process of its own that holds a session; `workers` are the processes of its engine."""

    def __init__(self, work: Callable[[Callable[[object], None]], None]) -> None:
        self._reader, writer = FORK.Pipe(duplex=False)

        def lead() -> None:
            os.setsid()
            work(writer.send)

        self.process = FORK.Process(target=lead)
        self.process.start()
        writer.close()
        self.workers = self.said()

    def said(self) -> object:
        return self._reader.recv()

    def code(self) -> int | None:
        self.process.join(PATIENCE)
        return self.process.exitcode


@pytest.mark.slow
def test_workers_leave_when_their_process_is_killed_in_the_middle_of_a_task(tiny, wait_until):
    def work(say: Callable[[object], None]) -> None:
        session = assemble(tiny(WORKERS))
        say(session.engine.processes)
        list(session.engine.map(endless(session)))

    run = Run(work)
    assert len(run.workers) == 2
    idle = {worker: processor_ticks(worker) for worker in run.workers}
    wait_until(lambda: all(processor_ticks(worker) > ticks + 10 for worker, ticks in idle.items()))
    run.process.kill()
    assert run.code() == -signal.SIGKILL
    wait_until(lambda: not any(map(alive, run.workers)))


def test_workers_leave_when_their_process_is_killed_in_the_middle_of_a_message(tiny, wait_until):
    def work(say: Callable[[object], None]) -> None:
        session = assemble(tiny(WORKERS))
        say(session.engine.processes)
        for worker in session.engine._workers:
            os.write(worker.channel.connection.fileno(), b"\0\0")  # half of a length
        say("sent")
        signal.pause()

    run = Run(work)
    assert run.said() == "sent"
    run.process.kill()
    assert run.code() == -signal.SIGKILL
    try:
        wait_until(lambda: not any(map(alive, run.workers)))
    finally:
        for process in filter(alive, run.workers):
            os.kill(process, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_of_the_whole_group_saves_the_run_and_leaves_no_process(number, again, tiny, tmp_path, capfd):
    """Ctrl-C reaches the workers as well, and may come again and again."""

    class Tell(Observer):
        def __init__(self, say: Callable[[object], None]) -> None:
            self.say = say

        def round_done(self, record, seconds):
            self.say(record["round"])

    def work(say: Callable[[object], None]) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with stopped_once():
            run = start(tiny({**SMALL, **WORKERS, "rounds": 10**4}), tmp_path / "run")
            say(run.session.engine.processes)
            with pytest.raises(RunStoppedError):
                play(run, Tell(say))

    run = Run(work)
    assert run.said() == 1
    os.killpg(run.process.pid, number)
    while again and run.process.is_alive():
        with suppress(ProcessLookupError):  # it has ended just now
            os.killpg(run.process.pid, number)
        time.sleep(0.001)
    assert run.code() == 0
    assert "Traceback" not in capfd.readouterr().err
    assert not any(map(alive, run.workers))
    assert (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.slow
def test_a_program_that_does_not_close_its_session_ends():
    """Python would wait for processes that are never told to leave."""
    program = """
from fedprophet.config.load import parse_config
from fedprophet.runs.session import assemble
session = assemble(parse_config({"engine": "workers", "threads": 2}))
print(*session.engine.processes)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert done.stderr == ""
    assert len(done.stdout.split()) == 2
    assert not any(alive(int(process)) for process in done.stdout.split())


def test_a_run_takes_all_of_torchs_threads_as_workers(opened):
    torch.set_num_threads(3)
    session = opened({"engine": "auto", "threads": 0})
    assert len(session.engine.processes) == 3
    session.close()
    assert torch.get_num_threads() == 3
