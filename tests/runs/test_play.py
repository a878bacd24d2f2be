"""A run is played, stopped at any moment, resumed and finished: it always ends with the same bytes."""

import errno
import json
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from torch import nn

from fedprophet.cascade.atoms import chain_of
from fedprophet.engines import make_engine
from fedprophet.engines.plain import PlainEngine
from fedprophet.errors import CheckpointError, ConfigError, TrainingError
from fedprophet.messages.values import SERVER
from fedprophet.runs import play as play_module
from fedprophet.runs.checkpoint import Checkpoints
from fedprophet.runs.evaluation import evaluate_run
from fedprophet.runs.export import write_model
from fedprophet.runs.files import RunFiles
from fedprophet.runs.journal import Journal
from fedprophet.runs.observer import Observer
from fedprophet.runs.play import play
from fedprophet.runs.run import RunStoppedError, open_to_read, reopen, start
from fedprophet.storage.files import tensors_from_bytes
from fedprophet.storage.locks import folder_lock

# An ordinary run ----------------------------------------------------------------------------------------------------


def test_a_run_leaves_its_config_journal_checkpoints_model_and_results(finished):
    names = {str(file.relative_to(finished)) for file in finished.rglob("*") if file.is_file()}
    assert {name for name in names if "/" not in name and not name.startswith(".")} == {
        "config.toml", "inputs.json", "setup.json", "journal.jsonl", "timings.jsonl", "model.safetensors",
        "results.json",
    }  # fmt: skip
    assert {Path(name).parts[1] for name in names if name.startswith("checkpoints")} == {"round-000003", "round-000004"}
    assert not any("tmp" in name for name in names)
    lines = [json.loads(line) for line in (finished / "journal.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [1, 2, 3, 4]
    assert [json.loads(line)["round"] for line in (finished / "timings.jsonl").read_text().splitlines()] == [1, 2, 3, 4]
    assert "seconds" not in lines[0]
    results = json.loads((finished / "results.json").read_text())
    assert results["rounds"] == 4
    assert [module["index"] for module in results["modules"]] == [1, 2]
    assert all(module["memory_bytes"] <= results["budget_bytes"] for module in results["modules"])
    assert {"closing", "wire", "faults"}.isdisjoint(results), "an engine without accounts has none at the end"
    run = reopen(finished)
    asked = run.session.world.clients.sample(2, 4, "evaluate")
    held_out = sum(len(run.session.population.client_data(client).validation) for client in asked)
    assert results["personalised"]["pgd1"]["samples"] == held_out


def test_another_seed_gives_other_bytes(tiny, small, tmp_path, contents, undisturbed):
    play(start(tiny({**small, "seed": 1}), tmp_path / "other"))
    other = contents(tmp_path / "other")
    assert all(other[name] != undisturbed[name] for name in ("journal.jsonl", "model.safetensors"))


def test_the_number_of_threads_is_recorded_and_used_again(tiny, small, tmp_path):
    torch.set_num_threads(2)
    run = start(tiny({**small, "engine": "plain", "threads": 0}), tmp_path / "run")
    assert "threads = 2" in run.files.config.read_text()
    torch.set_num_threads(1)
    reopen(tmp_path / "run")
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("method", ["fedprophet", "jfat"])
def test_shards_that_are_empty_or_smaller_than_a_batch_work(tiny, small, tmp_path, method):
    settings = {**small, "method": method, "population.clients": 300, "shards.kind": "dirichlet"}
    settings |= {"shards.concentration": 0.01, "evaluate.clients": 4, "measure.clients": 4, "population.cohort": 6}
    run = start(tiny(settings), tmp_path / "run")
    sizes = [run.session.population.samples(client) for client in range(300)]
    assert min(sizes) == 0
    results = play(run)
    assert all(json.loads(line)["dropped"] == {} for line in run.files.journal.read_text().splitlines())
    cohorts = [run.session.world.clients.cohort(r) for r in range(1, results["rounds"] + 1)]
    assert min(sizes[client] for cohort in cohorts for client in cohort) < 16
    assert results["global"]["clean"]["samples"] == 40


def test_clients_without_any_held_out_sample_work(tiny, small, tmp_path):
    settings = {**small, "population.clients": 1400, "shards.kind": "iid"}
    results = play(start(tiny(settings), tmp_path / "run"))
    assert results["personalised"]["clean"]["samples"] == 0


# Stopped and resumed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("every", "after_round"), [(1, 1), (3, 2)])
def test_ctrl_c_after_a_round(tiny, small, stop, tmp_path, contents, undisturbed, every, after_round):
    settings = {**small, "checkpoint.every": every}
    with pytest.raises(RunStoppedError) as stopped:
        play(start(tiny(settings), tmp_path / "run"), stop(after_round=after_round))
    assert str(stopped.value) == (
        f"stopped after round {after_round}; nothing is lost. "
        f"Resume it with: fedprophet train --resume {tmp_path / 'run'}"
    )
    run = reopen(tmp_path / "run")
    assert run.state.round == after_round, "a checkpoint is written whatever checkpoint.every says"
    play(run)
    assert contents(tmp_path / "run") == undisturbed


@pytest.mark.parametrize(("by_kill", "in_task"), [(False, 8), (True, 3), (True, 19)])
def test_stopped_within_a_round(tiny, small, stop, killed, tmp_path, contents, undisturbed, in_task, by_kill):
    error = killed if by_kill else KeyboardInterrupt
    with pytest.raises((RunStoppedError, killed)):
        play(start(tiny({**small, "checkpoint.every": 2}), tmp_path / "run"), stop(error, in_task=in_task))
    play(reopen(tmp_path / "run"))
    assert contents(tmp_path / "run") == undisturbed


@pytest.mark.parametrize("method", ["jfat", "fedprophet"])
def test_a_run_whose_model_is_a_mean_goes_on_with_both(tiny, small, stop, tmp_path, contents, method):
    """It is stopped in the third round, after two under the attack."""
    settings = {**small, "method": method, "rounds": 4, "norm.layers": "shared", "aggregate.horizon": 3}
    with pytest.raises(RunStoppedError):
        play(start(tiny(settings), tmp_path / "run"), stop(after_round=3))
    run = reopen(tmp_path / "run")
    assert run.state.mean.rounds == 2
    assert any(not torch.equal(run.state.mean.parameters[name], value) for name, value in run.state.model.items())
    play(run)
    play(start(tiny(settings), tmp_path / "undisturbed"))
    assert contents(tmp_path / "run") == contents(tmp_path / "undisturbed")


@pytest.mark.parametrize("when", ["before", "after"])
def test_ctrl_c_while_the_journal_is_written(stopped, contents, undisturbed, monkeypatch, when):
    """The state may be saved with its line in the journal, or without both; never the one without the other."""
    real = Journal.append

    def append(journal, record):
        if when == "after":
            real(journal, record)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "append", append)
        with pytest.raises(RunStoppedError, match="stopped after round 3"):
            play(reopen(stopped))
    play(reopen(stopped))
    assert contents(stopped) == undisturbed


def test_ctrl_c_in_the_first_round(tiny, small, stop, tmp_path):
    path = tmp_path / "a run's folder"
    with pytest.raises(RunStoppedError, match=r"stopped in its first round.*--resume '.*a run'\"'\"'s folder'$"):
        play(start(tiny(small), path), stop(in_task=3))
    assert not (path / "checkpoints").exists()


def test_ctrl_c_in_the_closing_evaluation(tiny, small, stop, tmp_path, contents, undisturbed):
    path = tmp_path / "run"
    with pytest.raises(RunStoppedError, match="stopped in its closing evaluation; nothing is lost"):
        play(start(tiny(small), path), stop(in_finish=True))
    assert not (path / "results.json").exists()
    play(reopen(path))
    assert contents(path) == undisturbed


def kill_at(monkeypatch, number, error):
    """Let the process end right before the `number`-th step that makes something durable."""
    count = [0]

    def counted(real):
        def step(*arguments, **keywords):
            count[0] += 1
            if count[0] == number:
                raise error
            return real(*arguments, **keywords)

        return step

    for owner, name in ((os, "fsync"), (Path, "replace"), (Path, "rename"), (shutil, "rmtree")):
        monkeypatch.setattr(owner, name, counted(getattr(owner, name)))


def start_or_reopen(config, path):
    return reopen(path) if RunFiles(path).config.exists() else start(config, path)


DURABLE_STEPS = 56


@pytest.mark.parametrize(
    "number",
    [8, 29, 53, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, DURABLE_STEPS, 2) if n not in (29, 53))],
)
def test_killed_before_a_step_that_makes_something_durable(
    tiny, small, tmp_path, contents, undisturbed, monkeypatch, killed, number
):
    config = tiny({**small, "checkpoint.every": 1 + number % 2})
    with monkeypatch.context() as patch:
        kill_at(patch, number, killed)
        try:
            play(start(config, tmp_path / "run"))
        except killed:
            pass
        else:
            pytest.skip("the run has fewer steps")
    play(start_or_reopen(config, tmp_path / "run"))
    assert contents(tmp_path / "run") == undisturbed
    assert not list((tmp_path / "run" / "checkpoints").glob("*.tmp"))


def test_what_a_kill_left_half_written_does_not_matter(stopped, contents, undisturbed):
    checkpoints = stopped / "checkpoints"
    shutil.copytree(checkpoints / "round-000002", checkpoints / "round-000003.tmp")
    (checkpoints / "round-000003.tmp" / "state.json").write_text('{"format": 1')
    (stopped / ".model.safetensors.tmp").write_bytes(b"half")
    with (stopped / "journal.jsonl").open("ab") as file:
        file.write(b'{"round":4,"modu')
    play(reopen(stopped))
    assert contents(stopped) == undisturbed
    assert not list(checkpoints.glob("*.tmp"))


# Checkpoints are written beside the rounds ---------------------------------------------------------------------------


class Slow:
    """Holds the writing of checkpoints until it may go on; that of round 1 may fail then."""

    def __init__(self, monkeypatch, error=None):
        self.go_on, self.begun, real = threading.Event(), [], Checkpoints._write

        def write(checkpoints, document, snapshot, round):
            self.begun.append((round, threading.current_thread() is threading.main_thread()))
            self.go_on.wait()
            if error and round == 1:
                raise error
            real(checkpoints, document, snapshot, round)

        monkeypatch.setattr(Checkpoints, "_write", write)


class RoundsDone(Observer):
    """Lets the first checkpoint be written when round 2 is played, and it has begun."""

    def __init__(self, slow, wait_until):
        self.slow, self.wait_until, self.rounds = slow, wait_until, []

    def round_done(self, record, seconds):
        self.rounds.append(record["round"])
        if record["round"] == 2:
            self.wait_until(lambda: self.slow.begun)
            assert len(self.slow.begun) == 1
            self.slow.go_on.set()


def test_a_round_is_played_while_the_checkpoint_before_it_is_written(
    tiny, small, tmp_path, undisturbed, contents, monkeypatch, wait_until
):
    """The first is held until round 2 is played; the second waits for it, so none is left out."""
    slow = Slow(monkeypatch)
    play(start(tiny(small), tmp_path / "run"), RoundsDone(slow, wait_until))
    assert slow.begun == [(1, False), (2, False), (3, False), (4, False)]
    assert contents(tmp_path / "run") == undisturbed
    assert reopen(tmp_path / "run").state.round == 4


def test_what_went_wrong_with_a_checkpoint_is_said_when_the_next_is_due(tiny, small, tmp_path, monkeypatch, wait_until):
    slow = Slow(monkeypatch, CheckpointError("cannot write the checkpoint"))
    observer = RoundsDone(slow, wait_until)
    with pytest.raises(CheckpointError, match="cannot write the checkpoint"):
        play(start(tiny(small), tmp_path / "run"), observer)
    assert observer.rounds == [1, 2]


def test_what_went_wrong_with_the_last_checkpoint_is_said_before_results_are_made(tiny, small, tmp_path, monkeypatch):
    slow = Slow(monkeypatch, CheckpointError("cannot write the checkpoint"))
    slow.go_on.set()
    with pytest.raises(CheckpointError, match="cannot write the checkpoint"):
        play(start(tiny({**small, "method": "jfat", "rounds": 1, "train.warmup": 0}), tmp_path / "run"))
    assert not (tmp_path / "run" / "results.json").exists()


def test_ctrl_c_waits_for_the_checkpoint_that_is_being_written(
    tiny, small, stop, tmp_path, undisturbed, contents, monkeypatch
):
    slow, path = Slow(monkeypatch), tmp_path / "run"

    class Release(stop):
        def round_done(self, record, seconds):
            if record["round"] == 2:
                threading.Timer(0.05, slow.go_on.set).start()
            super().round_done(record, seconds)

    with pytest.raises(RunStoppedError, match="after round 2"):
        play(start(tiny(small), path), Release(after_round=2))
    assert [number for number, _ in slow.begun] == [1, 2]
    monkeypatch.undo()
    run = reopen(path)
    assert run.state.round == 2
    play(run)
    assert contents(path) == undisturbed


def test_timings_say_all_that_a_round_costs(tiny, small, tmp_path, monkeypatch):
    """Playing takes 8 seconds, its line in the journal 2, holding up for a checkpoint 4, telling the observer 1."""
    real_round, real_append, real_prepare = play_module.play_round, Journal.append, Checkpoints.prepare
    clock = SimpleNamespace(now=0)
    monkeypatch.setattr(play_module, "time", SimpleNamespace(monotonic=lambda: clock.now))

    def taking(seconds, real):
        def slow(*arguments, **keywords):
            clock.now += seconds
            return real(*arguments, **keywords)

        return slow

    def append(journal, record):
        clock.now += 2 if "module" in record else 0
        real_append(journal, record)

    class Told(Observer):
        def round_done(self, record, seconds):
            clock.now += 1

    monkeypatch.setattr(play_module, "play_round", taking(8, real_round))
    monkeypatch.setattr(Journal, "append", append)
    monkeypatch.setattr(Checkpoints, "prepare", taking(4, real_prepare))
    play(start(tiny({**small, "checkpoint.every": 2}), tmp_path / "run"), Told())
    lines = [json.loads(line) for line in (tmp_path / "run" / "timings.jsonl").read_text().splitlines()]
    names = ("seconds", "journal_seconds", "checkpoint_seconds", "total_seconds")
    assert [tuple(line[name] for name in names) for line in lines] == [
        (8, 2, 0, 10), (8, 2, 0, 11), (8, 2, 4, 15), (8, 2, 0, 11),
    ]  # fmt: skip


# Finished runs -------------------------------------------------------------------------------------------------------


def test_resuming_a_finished_run_changes_nothing(finished, undisturbed):
    before = {file: (file.stat().st_mtime_ns, file.read_bytes()) for file in finished.rglob("*") if file.is_file()}
    assert play(reopen(finished)) == json.loads(undisturbed["results.json"])
    after = {file: (file.stat().st_mtime_ns, file.read_bytes()) for file in finished.rglob("*") if file.is_file()}
    assert after == before


def test_a_finished_run_makes_its_model_again(finished, contents, undisturbed):
    (finished / "model.safetensors").unlink()
    play(reopen(finished))
    assert contents(finished) == undisturbed


@pytest.mark.parametrize("text", ["{", "[]", "7", "[" * 100_000])
def test_damaged_results_are_named_and_made_again(finished, contents, undisturbed, text):
    (finished / "results.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"results\.json is damaged\. Delete it: it is made again"):
        play(reopen(finished))
    (finished / "results.json").unlink()
    play(reopen(finished))
    assert contents(finished) == undisturbed


# What can be wrong --------------------------------------------------------------------------------------------------


def test_two_processes_do_not_work_on_one_run(stopped, contents, undisturbed):
    run = reopen(stopped)
    with folder_lock(stopped), pytest.raises(CheckpointError, match="another process is working on"):
        play(run)
    play(run)
    assert contents(stopped) == undisturbed


@pytest.mark.parametrize("number", [1, 5, 45])
def test_a_full_disk_is_said_and_nothing_is_lost(tiny, small, tmp_path, contents, undisturbed, monkeypatch, number):
    """From some step on nothing more fits; then there is room again."""
    path, count, real = tmp_path / "run", [0], os.fsync

    def full(file):
        count[0] += 1
        if count[0] >= number:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(file)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match=r"cannot write .*: No space left on device\. .*[Mm]ake room there"):
            play(start(tiny(small), path))
    play(start_or_reopen(tiny(small), path))
    assert contents(path) == undisturbed


def test_three_rounds_in_a_row_without_an_update_stop_the_run(tiny, tmp_path, monkeypatch):
    settings = {"method": "jfat", "rounds": 7, "checkpoint.every": 50, "train.iterations": 1, "attack.steps": 1}
    settings |= {"evaluate.clients": 1, "evaluate.steps": 1, "evaluate.test_samples": 10}
    path, real = tmp_path / "run", PlainEngine.map

    def broken(self, tasks):
        for answer in real(self, tasks):
            if answer.kind == "train" and answer.round in (2, 4, 5, 6):
                nan = {name: value * float("nan") for name, value in answer.parameters.items()}
                answer = replace(answer, parameters=nan)
            yield answer

    monkeypatch.setattr(PlainEngine, "map", broken)
    with pytest.raises(TrainingError, match=r"3 rounds in a row had no usable update \(client \d: .* is not finite"):
        play(start(tiny(settings), path))
    lines = [json.loads(line) for line in (path / "journal.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [len(line["dropped"]) for line in lines] == [0, 2, 0, 2, 2, 2]
    monkeypatch.setattr(PlainEngine, "map", real)
    run = reopen(path)
    assert (run.state.round, run.state.failures) == (6, 3)
    assert play(run)["rounds"] == 7


def test_a_run_that_bad_updates_have_spoilt_goes_back_to_where_it_was_sound(tiny, tmp_path, monkeypatch, contents):
    """In round 3 every client sends what looks good and ruins the model: from then on nobody can train it.

    Both checkpoints that are kept have the ruined model, and so has that of the best round, 3; that of round 2 is kept
    as well.
    """
    settings = {"method": "jfat", "rounds": 7, "train.iterations": 1, "attack.steps": 1}
    settings |= {"evaluate.clients": 1, "evaluate.steps": 1, "evaluate.test_samples": 10}
    path, real = tmp_path / "run", PlainEngine.map
    play(start(tiny(settings), tmp_path / "undisturbed"))

    def ruinous(self, tasks):
        for answer in real(self, tasks):
            if answer.kind == "train" and answer.round == 3:
                answer = replace(answer, parameters={n: v + 500 for n, v in answer.parameters.items()})
            if answer.kind == "train" and answer.round > 3:
                answer = replace(answer, loss=float("nan"))
            yield answer

    monkeypatch.setattr(PlainEngine, "map", ruinous)
    with pytest.raises(TrainingError, match=r"3 rounds in a row had no usable update") as failed:
        play(start(tiny(settings), path))
    assert str(failed.value).endswith(f"go back with: fedprophet train --resume {path} --from-round 2")
    assert sorted(folder.name[-1] for folder in (path / "checkpoints").iterdir()) == ["2", "3", "5", "6"]
    monkeypatch.setattr(PlainEngine, "map", real)
    with pytest.raises(CheckpointError, match="there is no checkpoint of round 4"):
        reopen(path, round=4)
    play(reopen(path, round=2))
    assert contents(path) == contents(tmp_path / "undisturbed")


def test_a_kill_while_going_back_leaves_a_run_that_goes_on(tiny, small, tmp_path, contents, undisturbed, monkeypatch):
    """A checkpoint whose journal is cut already could not be resumed, so it goes first."""
    path = tmp_path / "run"
    play(start(tiny({**small, "checkpoint.keep": 9}), path))
    run = reopen(path, round=2)
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "truncate", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            play(run)
    play(reopen(path))
    assert contents(path) == undisturbed


def test_a_finished_run_without_its_checkpoints_is_not_begun_again(finished):
    shutil.rmtree(finished / "checkpoints")
    for look in (reopen, open_to_read):
        with pytest.raises(CheckpointError, match=r"checkpoints is lost: .* model\.safetensors can still be used"):
            look(finished)
    (finished / "results.json").unlink()
    (finished / "model.safetensors").unlink()
    assert any("begins with its first round again" in note for note in reopen(finished).notes)


def test_going_back_in_a_finished_run_makes_its_results_again(tiny, small, tmp_path, contents, undisturbed):
    play(start(tiny({**small, "checkpoint.keep": 9}), tmp_path / "run"))
    (tmp_path / "run" / "results.json").write_text("{}")
    play(reopen(tmp_path / "run", round=2))
    assert contents(tmp_path / "run") == undisturbed
    assert json.loads((tmp_path / "run" / "results.json").read_text())["rounds"] > 2


# An engine with accounts ---------------------------------------------------------------------------------------------


class Accounting:
    """An engine that counts each task as a byte sent, and has a fault of client 0 in every account."""

    def __init__(self, engine):
        self.engine, self.sent, self.all_sent, self.accounts = engine, 0, 0, []

    def map(self, tasks):
        tasks = list(tasks)
        self.sent += len(tasks)
        self.all_sent += len(tasks)
        yield from self.engine.map(tasks)

    def account(self):
        wire = {"sent": self.sent, "received": 2 * self.sent, "whole_model": 0}
        self.sent = 0
        self.accounts.append({"wire": wire, "faults": {"0": f"reason {len(self.accounts)}"}})
        return self.accounts[-1]


def test_the_closing_evaluation_has_an_account_of_its_own(tiny, small, tmp_path):
    run = start(tiny(small), tmp_path / "run", engine=lambda parts: Accounting(make_engine(parts)))
    results, engine = play(run), run.session.engine
    *rounds, last = engine.accounts
    assert len(rounds) == results["rounds"]
    assert results["closing"] == last
    assert last["wire"]["sent"] > 0
    assert results["wire"] == {
        part: sum(account["wire"][part] for account in rounds) for part in ("sent", "received", "whole_model")
    }
    assert results["faults"] == len(rounds)
    # Nothing was asked after the account: it is complete.
    assert engine.sent == 0
    assert results["wire"]["sent"] + results["closing"]["wire"]["sent"] == engine.all_sent


# A model of one's own -----------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.two = nn.Sequential(nn.Conv2d(4, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU())
        self.head = nn.Linear(36, 10)

    def forward(self, x):
        return self.head(self.two(self.one(x)).flatten(1))


def test_a_model_of_ones_own_is_left_as_it_is_and_handed_over_again_to_resume(
    tiny, small, stop, tmp_path, contents, same_tensors
):
    torch.manual_seed(4)
    net = Net()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    config = tiny({**small, "memory.budget": "90%", "model.options": {}})
    play(start(config, tmp_path / "chain", model=chain_of(net)))
    assert same_tensors(dict(net.state_dict()), before)
    with pytest.raises(RunStoppedError):
        play(start(config, tmp_path / "model", model=net), stop(after_round=2))
    assert same_tensors(dict(net.state_dict()), before)
    with pytest.raises(ConfigError, match=r"with a run that is there, fedprophet\.resume\(RUN, model=…\), "):
        reopen(tmp_path / "model")
    play(reopen(tmp_path / "model", model=net))
    play(start(config, tmp_path / "undisturbed", model=net))
    assert contents(tmp_path / "model") == contents(tmp_path / "undisturbed")


# The round that measures norm statistics -----------------------------------------------------------------------------

REFRESHED = {"method": "heterofl", "norm.refresh": "attacked", "checkpoint.keep": 9}


@pytest.fixture(scope="module")
def refreshed(tiny, small, tmp_path_factory):
    """A run of two rounds, and the third that measures."""
    path = tmp_path_factory.mktemp("refreshed") / "run"
    play(start(tiny({**small, **REFRESHED}), path))
    return path


@pytest.mark.parametrize("in_round", [2, 3])
def test_a_run_that_is_stopped_before_or_in_the_measuring_round_ends_with_the_same_bytes(
    tiny, small, stop, tmp_path, contents, refreshed, in_round
):
    path = tmp_path / "run"

    class Stopped(Observer):
        def task_done(self, kind, done, total):
            if in_round == 3 and kind == "refresh" and done == 2:
                raise KeyboardInterrupt

    with pytest.raises(RunStoppedError):
        play(start(tiny({**small, **REFRESHED}), path), Stopped() if in_round == 3 else stop(after_round=2))
    assert reopen(path).state.round == 2
    play(reopen(path))
    assert contents(path) == contents(refreshed)


@pytest.mark.parametrize("round", [1, 2, 3])
def test_a_refreshed_run_goes_back_and_measures_again(refreshed, tmp_path, contents, round):
    path = shutil.copytree(refreshed, tmp_path / "run")
    play(reopen(path, round=round))
    assert contents(path) == contents(refreshed)


def test_what_a_refreshed_run_leaves(refreshed, tmp_path):
    """The model has the pooled statistics, and all ways to it give the same."""
    records = Journal(refreshed / "journal.jsonl").read()
    assert [record["round"] for record in records] == [1, 2, 3]
    assert records[-1]["refresh"] == "attacked"
    results = json.loads((refreshed / "results.json").read_text())
    assert results["rounds"] == 3
    assert "measured anew on attacked images" in results["norm_layers"]["global"]
    run = reopen(refreshed)
    whole = tensors_from_bytes((refreshed / "model.safetensors").read_bytes())
    names = [name for name in whole if name.endswith(("running_mean", "running_var"))]
    assert names
    assert all(torch.equal(whole[name], run.state.norm_layers[name]) for name in names)
    write_model(run, tmp_path / "model.safetensors")
    assert (tmp_path / "model.safetensors").read_bytes() == (refreshed / "model.safetensors").read_bytes()
    session = run.session
    task = session.method.evaluation_task(run.state, SERVER, None)
    layers = {name: whole[name] for name in session.world.chain.local()}
    answers = session.engine.map([replace(task, samples=40, parameters={**task.parameters, **layers})])
    assert [answer.clean for answer in answers] == [round(40 * results["global"]["clean"]["accuracy"])]


class NobodyMeasures:
    """An engine whose clients do not answer what a refresh asks."""

    def __init__(self, engine):
        self.engine = engine

    def map(self, tasks):
        yield from self.engine.map([task for task in tasks if task.kind != "refresh"])


def test_results_model_and_evaluation_say_if_nothing_was_measured_anew(tiny, small, stop, tmp_path):
    path, config = tmp_path / "run", tiny({**small, **REFRESHED, "norm.layers": "statistics-local"})
    engine = lambda parts: NobodyMeasures(make_engine(parts))  # noqa: E731
    with pytest.raises(RunStoppedError):
        play(start(config, path, engine=engine), stop(after_round=2))
    early = evaluate_run(open_to_read(path), ["clean"], samples=20, masking_check=False).conditions["norm_layers"]
    assert not any("at the end" in text for text in early.values()), "that round is still to come"
    layers = play(reopen(path, engine=engine))["norm_layers"]
    assert layers["global"].endswith("; at the end, statistics were not measured anew: too few usable answers")
    assert layers["personalised"].endswith("; at the end, no client measured its statistics anew")
    with safe_open(path / "model.safetensors", "pt") as file:
        assert file.metadata()["norm_layers"] == layers["global"]
    found = evaluate_run(open_to_read(path), ["clean"], samples=20, masking_check=False)
    assert found.conditions["norm_layers"] == layers
    assert Journal(path / "journal.jsonl").read()[-1]["renewed"] == 0


def test_clients_are_evaluated_with_the_statistics_they_renewed(refreshed):
    """A run that is opened again finds them on disk."""
    run = reopen(refreshed)
    session, state = run.session, run.state
    names = [name for name in session.world.chain.local() if name.endswith("running_mean")]
    for client in range(20):
        own = session.layers.get("backbone", client, session.method.timeline(state), 4)
        before = session.layers.get("backbone", client, session.method.timeline(state), 3) or {}
        assert all(
            name in own and not torch.equal(own[name], before.get(name, session.world.initial_layers[name]))
            for name in names
        )


def test_a_run_whose_last_rounds_failed_ends_after_its_statistics(tiny, small, tmp_path, monkeypatch):
    """It was stopped for its failures; the round that only measures is none of them."""
    path, real = tmp_path / "run", PlainEngine.map

    def broken(self, tasks):
        for answer in real(self, tasks):
            yield replace(answer, loss=float("nan")) if answer.kind == "train" and answer.round > 1 else answer

    monkeypatch.setattr(PlainEngine, "map", broken)
    config = tiny({**small, "method": "jfat", "rounds": 4, "norm.refresh": "clean"})
    with pytest.raises(TrainingError, match="3 rounds in a row"):
        play(start(config, path))
    results = play(reopen(path))
    assert results["rounds"] == 5
