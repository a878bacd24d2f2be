"""Rounds on an engine: which work is done, which of it is timed, and where a stage begins."""

from dataclasses import replace

import pytest
import torch

from fedprophet.bench import rounds
from fedprophet.bench.rounds import EVALUATION, PARTS, TRAINING, WARMUP, Case, Stopwatch, cases_of, measure, start_of
from fedprophet.engines import ENGINES
from fedprophet.engines.plain import PlainEngine
from fedprophet.errors import ConfigError
from fedprophet.messages.answers import Evaluated, Reported, Trained
from fedprophet.messages.tasks import Report
from fedprophet.runs.session import assemble
from fedprophet.server.coordinator import play_round
from fedprophet.threads import torch_threads


def ignore(text):
    """Nobody watches."""


@pytest.fixture
def session(settings, dataset):
    return assemble(settings.measured("fedprophet", "plain"), dataset=dataset)


class Slow:
    """An engine that notes its tasks and takes as many seconds of a false clock as it is given tasks' iterations."""

    def __init__(self, clock):
        self.clock, self.asked = clock, []

    def map(self, tasks):
        self.asked.append(list(tasks))
        for task in self.asked[-1]:
            about = {"round": task.round, "client": task.client, "weight": 1.0}
            self.clock[0] += task.training.iterations if task.kind == "train" else 1
            if task.kind == "report":
                yield Reported(**about)
            elif task.kind == "train":
                yield Trained(**about, loss=1.0, samples=10)
            else:
                yield Evaluated(**about, samples=10)


@pytest.fixture
def clock(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("fedprophet.machine.now", lambda: clock[0])
    return clock


def tasks_of(session, kind, stage=0):
    found = {}

    class Taking:
        def map(self, tasks):
            found[tasks[0].kind] = list(tasks)
            return session.engine.map(tasks)

    play_round(session.method.round(start_of(session, Case("fedprophet", stage))), Taking())
    return found[kind]


def test_training_is_timed_after_it_was_done_once_with_and_without_the_attack(session, clock):
    tasks = tasks_of(session, "train")
    engine = Slow(clock)
    watch = Stopwatch(engine, session.world.cost, short=False)
    answers = list(watch.map(tasks))
    assert [answer.client for answer in answers] == [task.client for task in tasks]
    clean = [replace(task, threat=None) for task in tasks]
    assert engine.asked == [clean, clean, tasks, tasks]
    assert tasks[0].threat is not None
    # Two clients, two iterations each.
    assert (watch.timings[TRAINING].seconds, watch.timings[TRAINING].first) == (4, 4)
    assert watch.timings[WARMUP].seconds == 4
    assert watch.spent == 16
    # PGD-2: 7 forwards against 3.
    assert watch.timings[TRAINING].flops == pytest.approx(watch.timings[WARMUP].flops * 7 / 3)
    assert watch.timings[TRAINING].tasks == 2


def test_the_plain_loop_is_warmed_by_one_iteration_and_one_evaluation(session, clock):
    train, evaluate = tasks_of(session, "train"), tasks_of(session, "evaluate")
    engine = Slow(clock)
    watch = Stopwatch(engine, session.world.cost, short=True)
    list(watch.map(train))
    list(watch.map(evaluate))
    assert [[t.training.iterations for t in asked] for asked in engine.asked[:4]] == [[1, 1], [2, 2]] * 2
    assert engine.asked[4:] == [evaluate[:1], evaluate]
    assert len(evaluate) == 6
    assert (watch.timings[TRAINING].seconds, watch.timings[TRAINING].first) == (4, 2)
    assert (watch.timings[EVALUATION].seconds, watch.timings[EVALUATION].first) == (6, 1)


def test_what_neither_trains_nor_evaluates_is_passed_on(session, clock):
    engine = Slow(clock)
    watch = Stopwatch(engine, session.world.cost, short=False)
    report = [Report(round=1, client=0, seed=0)]
    assert [answer.kind for answer in watch.map(report)] == ["report"]
    assert list(watch.map([])) == []
    assert engine.asked == [report, []]
    assert (watch.timings, watch.spent) == ({}, 0)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_stage_begins_behind_fixed_modules(session, stage):
    modules = session.world.modules
    assert len(modules) == 3
    tasks = tasks_of(session, "train", stage)
    ends = [module.last for module in modules[stage:]]
    for task in tasks:
        assert task.first == modules[stage].first
        assert task.last in ends
        assert [(f.first, f.last) for f in task.frozen] == [(m.first, m.last) for m in modules[:stage]]
        assert task.threat.norm == ("l2" if stage else "linf")
        assert not task.threat.harmless
    assert all(task.last == modules[stage].last for task in tasks_of(session, "evaluate", stage))


@pytest.mark.slow
def test_both_sides_play_the_same_rounds(settings, dataset):
    settings = replace(settings, engines=("plain", "plain"), overrides=(*settings.overrides, "evaluate.clients=2"))
    first, second = measure(settings, [Case("fedprophet", 1)], dataset, ignore)
    assert first.assigned == second.assigned
    assert len(first.server) == 2
    assert min(first.server) >= 0
    assert first.stages == 3
    for part in PARTS:
        assert [s.round for s in first.parts[part]] == [1, 2]
        assert [(s.flops, s.tasks) for s in first.parts[part]] == [(s.flops, s.tasks) for s in second.parts[part]]
        assert all(s.seconds > 0 and s.peak_bytes > 0 for s in first.parts[part])


def test_no_further_round_begins_after_the_limit(settings, dataset):
    (found,) = measure(replace(settings, limit=0.0), [Case("jfat")], dataset, ignore)
    assert [len(found.parts[part]) for part in PARTS] == [1, 1, 1]
    assert found.failure is None


@pytest.mark.slow
def test_running_out_of_memory_is_noted_and_the_rest_goes_on(settings, dataset, monkeypatch):
    real = rounds.Stopwatch.map

    def broken(self, tasks):
        tasks = list(tasks)
        if tasks and tasks[0].kind == "evaluate" and tasks[0].first == 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore")
        return real(self, tasks)

    monkeypatch.setattr(rounds.Stopwatch, "map", broken)
    cases = [Case("jfat"), Case("fedprophet", 1)]
    failed, other = measure(replace(settings, repeat=1), cases, dataset, ignore)
    assert failed.failure.startswith("out of memory while its rounds were played (2 GiB could not be had). ")
    assert failed.parts == {}
    assert other.failure is None
    assert len(other.parts[EVALUATION]) == 1


def test_an_engine_is_closed_and_the_threads_are_put_back(settings, dataset, monkeypatch):
    closed = []

    class Closing(PlainEngine):
        def close(self):
            closed.append(True)

    def make(parts):
        return Closing(parts.population, parts.workspaces, parts.reserve)

    monkeypatch.setitem(ENGINES, "plain", replace(ENGINES["plain"], make=make))
    with torch_threads(2):
        measure(replace(settings, repeat=1), [Case("jfat")], dataset, ignore)
        assert torch.get_num_threads() == 2
    assert closed == [True]


def test_the_cases_are_jfat_and_every_stage_or_those_asked_for(settings, dataset):
    stages = [Case("fedprophet", stage) for stage in range(3)]
    assert list(cases_of(settings, dataset)) == [Case("jfat"), *stages]
    assert list(cases_of(replace(settings, methods=("fedprophet",), stages=(2,)), dataset)) == stages[2:]
    with pytest.raises(ConfigError, match=r"no stage 4\. digits has stages 1 to 3"):
        cases_of(replace(settings, stages=(3,)), dataset)


def test_real_data_is_left_to_the_configuration(settings):
    assert rounds.dataset_of(settings).name == "random images"
    assert rounds.dataset_of(replace(settings, real_data=True)) is None


def test_there_is_a_worker_for_each_core_unless_one_says_otherwise(settings, monkeypatch):
    monkeypatch.setattr("fedprophet.machine.cores", lambda: 7)
    small = rounds.RoundsSettings("cifar10-balanced-small")
    assert small.measured("jfat", "workers").threads == 7
    assert small.measured("jfat", "plain").threads == small.config("jfat").threads
    assert replace(small, overrides=("threads=3",)).measured("jfat", "workers").threads == 3


def test_the_plain_loop_is_measured_with_one_thread_as_well(monkeypatch):
    small = rounds.RoundsSettings("cifar10-balanced-small")
    one = small.measured("jfat", "plain-1")
    assert (one.engine, one.threads) == ("plain", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert rounds.plain_sides(()) == ("plain", "plain-1")
    # Not where somebody has said how many, where there is but one, or where a GPU does the work.
    assert rounds.plain_sides(("train.batch=3", "threads = 2")) == ("plain",)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert rounds.plain_sides(()) == ("plain",)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert rounds.plain_sides(()) == ("plain",)


def test_the_memory_of_workers_counts(session, clock, monkeypatch):
    asked = []
    monkeypatch.setattr("fedprophet.machine.forget_peak", asked.append)
    monkeypatch.setattr("fedprophet.machine.peak_bytes", lambda workers: 10 * sum(workers))
    engine = Slow(clock)
    engine.processes = (3, 4)
    watch = Stopwatch(engine, session.world.cost, short=False)
    list(watch.map(tasks_of(session, "evaluate")))
    assert asked == [(3, 4)]
    assert watch.timings[EVALUATION].peak_bytes == 70


def test_the_fast_engine_is_one_that_there_is():
    assert rounds.fast_engine() in ENGINES


def test_what_was_measured_is_shown_after_every_case_and_kept_at_ctrl_c(monkeypatch):
    cases = [rounds.Case("jfat"), rounds.Case("fedprophet", 0), rounds.Case("fedprophet", 1)]

    def measure_case(settings, case, engine, dataset, watch):
        if case.stage == 1:
            raise KeyboardInterrupt
        return rounds.CaseResult(case, engine)

    monkeypatch.setattr(rounds, "_measure_case", measure_case)
    settings, shown = rounds.RoundsSettings("cifar10-balanced-small"), []
    found = rounds.measure(settings, cases, None, lambda text: None, lambda so_far: shown.append(len(so_far)))
    assert [measured.case for measured in found] == cases[:2]
    assert shown == [1, 2]
    with pytest.raises(KeyboardInterrupt):
        rounds.measure(settings, cases[2:], None, lambda text: None)
