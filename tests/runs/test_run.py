"""A run's life in its folder: started, stopped at any moment, resumed, finished, and what can be wrong with it."""

import errno
import fcntl
import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

from fedprophet.cascade.atoms import chain_of
from fedprophet.engines import make_engine
from fedprophet.engines.plain import EmbeddedEngine
from fedprophet.errors import CheckpointError, ConfigError, TrainingError
from fedprophet.runs.journal import Journal
from fedprophet.runs.run import RunFiles, RunStoppedError, Silent, open_to_read, play, reopen, start
from fedprophet.storage.files import how_to_resume

# Two modules, four rounds, as little work as possible.
SMALL = {"rounds": 2, "memory.budget": "60%", "train.iterations": 1, "attack.steps": 1, "attack.feature_steps": 1}
SMALL |= {"population.clients": 20, "evaluate.clients": 2, "evaluate.steps": 1, "evaluate.batch": 400}
SMALL |= {"measure.clients": 2, "measure.steps": 1}


def contents(path):
    """What two runs of the same configuration have in common, to the byte."""
    files = RunFiles(path)
    return {file.name: file.read_bytes() for file in (files.journal, files.model, files.results)}


@pytest.fixture(scope="module")
def undisturbed(tiny, tmp_path_factory):
    """What an undisturbed run leaves; how often it writes a checkpoint makes no difference."""
    path = tmp_path_factory.mktemp("undisturbed") / "run"
    play(start(tiny(SMALL), path))
    return contents(path)


class Stop(Silent):
    """An observer that raises something at a moment of the run."""

    def __init__(self, error=KeyboardInterrupt, after_round=None, in_task=None, in_finish=False):
        self.error, self.after_round, self.in_task, self.in_finish = error, after_round, in_task, in_finish
        self.tasks = 0

    def task_done(self, kind, done, total):
        self.tasks += 1
        if self.tasks == self.in_task or (self.in_finish and self.in_finish == "now"):
            raise self.error

    def round_done(self, record, seconds):
        if record["round"] == self.after_round:
            raise self.error

    def finishing(self):
        if self.in_finish:
            self.in_finish = "now"


class Killed(BaseException):
    """The process is gone: nothing of ours may catch it."""


# An ordinary run ----------------------------------------------------------------------------------------------------


def test_a_run_leaves_its_config_journal_checkpoints_model_and_results(tiny, tmp_path):
    path = tmp_path / "run"
    results = play(start(tiny(SMALL), path))
    names = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
    assert {"config.toml", "journal.jsonl", "timings.jsonl", "model.safetensors", "results.json"} <= names
    assert {name for name in names if name.startswith("checkpoints")} == {
        f"checkpoints/round-00000{r}/{name}" for r in (3, 4) for name in ("state.json", "tensors.safetensors")
    }
    assert not any("tmp" in name for name in names)
    lines = [json.loads(line) for line in (path / "journal.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [1, 2, 3, 4]
    assert [json.loads(line)["round"] for line in (path / "timings.jsonl").read_text().splitlines()] == [1, 2, 3, 4]
    assert "seconds" not in lines[0]
    assert results == json.loads((path / "results.json").read_text())
    assert results["rounds"] == 4
    assert [module["index"] for module in results["modules"]] == [1, 2]
    assert all(module["memory_bytes"] <= results["budget_bytes"] for module in results["modules"])


def test_the_same_seed_gives_the_same_bytes_and_another_does_not(tiny, tmp_path, undisturbed):
    play(start(tiny(SMALL), tmp_path / "again"))
    assert contents(tmp_path / "again") == undisturbed
    play(start(tiny({**SMALL, "seed": 1}), tmp_path / "other"))
    other = contents(tmp_path / "other")
    assert other["journal.jsonl"] != undisturbed["journal.jsonl"]
    assert other["model.safetensors"] != undisturbed["model.safetensors"]


def test_the_number_of_threads_is_recorded_and_used_again(tiny, tmp_path):
    for name in ("undisturbed", "run"):
        torch.set_num_threads(2)
        run = start(tiny({**SMALL, "engine": "plain", "threads": 0}), tmp_path / name)
        assert "threads = 2" in run.files.config.read_text()
        if name == "undisturbed":
            play(run)
    with pytest.raises(RunStoppedError):
        play(run, Stop(after_round=2))
    torch.set_num_threads(1)
    play(reopen(tmp_path / "run"))
    assert torch.get_num_threads() == 2
    assert contents(tmp_path / "run") == contents(tmp_path / "undisturbed")
    torch.set_num_threads(1)


def test_the_model_says_how_to_feed_it(tiny, tmp_path):
    run = start(tiny(SMALL), tmp_path / "run")
    play(run)
    with safe_open(tmp_path / "run" / "model.safetensors", "pt") as file:
        metadata = file.metadata()
    assert metadata["model"] == "vgg-small"
    assert json.loads(metadata["options"]) == {"width": 4}
    assert (metadata["input"], metadata["classes"], metadata["rounds"]) == ("1x8x8", "10", "4")
    assert tuple(json.loads(metadata["normalize_mean"])) == run.session.dataset.mean
    assert tuple(json.loads(metadata["normalize_std"])) == run.session.dataset.std


def test_runs_without_a_name_are_numbered(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = [start(tiny({"method": method})).files.path for method in ("fedprophet", "jfat", "fedprophet")]
    assert list(map(str, paths)) == ["runs/digits-fedprophet-1", "runs/digits-jfat-1", "runs/digits-fedprophet-2"]


@pytest.mark.parametrize("method", ["fedprophet", "jfat"])
def test_shards_that_are_empty_or_smaller_than_a_batch_work(tiny, tmp_path, method):
    settings = {**SMALL, "method": method, "population.clients": 600, "shards.kind": "dirichlet"}
    settings |= {"shards.concentration": 0.01, "evaluate.clients": 9, "measure.clients": 9, "population.cohort": 12}
    run = start(tiny(settings), tmp_path / "run")
    sizes = [run.session.population.samples(client) for client in range(600)]
    assert min(sizes) == 0
    results = play(run)
    assert all(json.loads(line)["dropped"] == {} for line in run.files.journal.read_text().splitlines())
    cohorts = [run.session.world.cohort(r) for r in range(1, results["rounds"] + 1)]
    assert min(sizes[client] for cohort in cohorts for client in cohort) < 16
    assert results["global"]["clean"]["samples"] == 360


def test_clients_without_any_held_out_sample_work(tiny, tmp_path):
    settings = {**SMALL, "population.clients": 1400, "shards.kind": "iid"}
    results = play(start(tiny(settings), tmp_path / "run"))
    assert results["personalised"]["clean"]["samples"] == 0


def test_the_closing_evaluation_asks_as_many_clients_as_the_others(tiny, tmp_path):
    run = start(tiny({**SMALL, "evaluate.clients": 2}), tmp_path / "run")
    results = play(run)
    asked = run.session.world.sample(2, results["rounds"], "evaluate")
    held_out = sum(len(run.session.population.client_data(client).validation) for client in asked)
    assert results["personalised"]["pgd1"]["samples"] == held_out


# Stopped and resumed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("every", "after_round"), [(1, 1), (3, 2), (3, 3)])
def test_ctrl_c_after_a_round(tiny, tmp_path, undisturbed, every, after_round):
    settings = {**SMALL, "checkpoint.every": every}
    with pytest.raises(RunStoppedError) as stop:
        play(start(tiny(settings), tmp_path / "run"), Stop(after_round=after_round))
    assert str(stop.value) == (
        f"stopped after round {after_round}; nothing is lost. Go on with: fedprophet train --resume {tmp_path / 'run'}"
    )
    run = reopen(tmp_path / "run")
    assert run.state.round == after_round, "a checkpoint is written whatever checkpoint.every says"
    play(run)
    assert contents(tmp_path / "run") == undisturbed


@pytest.mark.parametrize(
    ("error", "in_task"), [(KeyboardInterrupt, 8), (KeyboardInterrupt, 15), (Killed, 3), (Killed, 19)]
)
def test_stopped_within_a_round(tiny, tmp_path, undisturbed, in_task, error):
    settings = {**SMALL, "checkpoint.every": 2}
    with pytest.raises((RunStoppedError, Killed)):
        play(start(tiny(settings), tmp_path / "run"), Stop(error, in_task=in_task))
    play(reopen(tmp_path / "run"))
    assert contents(tmp_path / "run") == undisturbed


@pytest.mark.parametrize("when", ["before", "after"])
def test_ctrl_c_while_the_journal_is_written(tiny, tmp_path, undisturbed, monkeypatch, when):
    """The state may be saved with its line in the journal, or without both; never the one without the other."""
    real = Journal.append

    def append(journal, record):
        if when == "after" or record["round"] != 3:
            real(journal, record)
        if record["round"] == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "append", append)
        with pytest.raises(RunStoppedError, match="stopped after round 2"):
            play(start(tiny({**SMALL, "checkpoint.every": 9}), tmp_path / "run"))
    play(reopen(tmp_path / "run"))
    assert contents(tmp_path / "run") == undisturbed


def test_ctrl_c_in_the_first_round_and_in_the_closing_evaluation(tiny, tmp_path, undisturbed):
    path = tmp_path / "a run's folder"
    with pytest.raises(RunStoppedError, match=r"stopped in its first round.*--resume '.*a run'\"'\"'s folder'$"):
        play(start(tiny(SMALL), path), Stop(in_task=3))
    assert not (path / "checkpoints").exists()
    with pytest.raises(RunStoppedError, match="stopped in its closing evaluation; nothing is lost"):
        play(reopen(path), Stop(in_finish=True))
    assert not (path / "results.json").exists()
    play(reopen(path))
    assert contents(path) == undisturbed


def kill_at(monkeypatch, number, error=Killed):
    """Let the process end right before the `number`-th step that makes something durable; return what was counted."""
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
    return count


def _kill_and_resume(tiny, monkeypatch, path, settings, number):
    with monkeypatch.context() as patch:
        kill_at(patch, number)
        try:
            play(start(tiny(settings), path))
        except Killed:
            pass
        else:
            pytest.skip("the run has fewer steps")
    if not RunFiles(path).config.exists():
        play(start(tiny(settings), path))
    else:
        play(reopen(path))


@pytest.mark.parametrize("number", [2, 8, 17, 29, 40, 53])
def test_killed_before_a_step_that_makes_something_durable(tiny, tmp_path, undisturbed, monkeypatch, number):
    _kill_and_resume(tiny, monkeypatch, tmp_path / "run", SMALL, number)
    assert contents(tmp_path / "run") == undisturbed
    assert not list((tmp_path / "run" / "checkpoints").glob("*.tmp"))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(1, 56))
def test_killed_before_any_step_that_makes_something_durable(tiny, tmp_path, undisturbed, monkeypatch, number):
    settings = {**SMALL, "checkpoint.every": 2}
    _kill_and_resume(tiny, monkeypatch, tmp_path / "run", settings, number)
    assert contents(tmp_path / "run") == undisturbed


def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(tiny, tmp_path, undisturbed):
    with pytest.raises(RunStoppedError):
        play(start(tiny(SMALL), tmp_path / "run"), Stop(after_round=3))
    tensors = tmp_path / "run" / "checkpoints" / "round-000003" / "tensors.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-100])
    run = reopen(tmp_path / "run")
    assert run.state.round == 2
    assert any("round 3" in note and "damaged" in note for note in run.notes)
    play(run)
    assert contents(tmp_path / "run") == undisturbed


def test_what_an_interrupted_checkpoint_left_does_not_matter(tiny, tmp_path, undisturbed):
    with pytest.raises(Killed):
        play(start(tiny(SMALL), tmp_path / "run"), Stop(Killed, after_round=3))
    checkpoints = tmp_path / "run" / "checkpoints"
    shutil.copytree(checkpoints / "round-000002", checkpoints / "round-000003.tmp")
    (checkpoints / "round-000003.tmp" / "state.json").write_text('{"format": 1')
    (tmp_path / "run" / ".model.safetensors.tmp").write_bytes(b"half")
    play(reopen(tmp_path / "run"))
    assert contents(tmp_path / "run") == undisturbed
    assert not list(checkpoints.glob("*.tmp"))


def test_a_torn_journal_line_is_written_again(tiny, tmp_path, undisturbed):
    with pytest.raises(Killed):
        play(start(tiny(SMALL), tmp_path / "run"), Stop(Killed, after_round=2))
    with (tmp_path / "run" / "journal.jsonl").open("ab") as file:
        file.write(b'{"round":3,"modu')
    play(reopen(tmp_path / "run"))
    assert contents(tmp_path / "run") == undisturbed


def test_resuming_a_finished_run_changes_nothing(tiny, tmp_path):
    path = tmp_path / "run"
    results = play(start(tiny(SMALL), path))
    before = {file: (file.stat().st_mtime_ns, file.read_bytes()) for file in path.rglob("*") if file.is_file()}
    assert play(reopen(path)) == results
    assert {file: (file.stat().st_mtime_ns, file.read_bytes()) for file in path.rglob("*") if file.is_file()} == before


def test_a_finished_run_makes_its_model_again(tiny, tmp_path, undisturbed):
    play(start(tiny(SMALL), tmp_path / "run"))
    (tmp_path / "run" / "model.safetensors").unlink()
    play(reopen(tmp_path / "run"))
    assert contents(tmp_path / "run") == undisturbed


@pytest.mark.parametrize("name", ["results.json", "inputs.json"])
def test_a_damaged_file_is_named_and_made_again(tiny, tmp_path, undisturbed, name):
    play(start(tiny(SMALL), tmp_path / "run"))
    (tmp_path / "run" / name).write_text("{")
    with pytest.raises(CheckpointError, match=rf"{name} is damaged\. Delete it: it is made again"):
        play(reopen(tmp_path / "run"))
    (tmp_path / "run" / name).unlink()
    play(reopen(tmp_path / "run"))
    assert contents(tmp_path / "run") == undisturbed


# What can be wrong --------------------------------------------------------------------------------------------------


def test_a_folder_that_is_taken_is_refused_and_left_alone(tiny, tmp_path):
    start(tiny(), tmp_path / "run")
    before = (tmp_path / "run" / "config.toml").read_bytes()
    with pytest.raises(ConfigError, match=r"already holds a run\. Go on with: fedprophet train --resume"):
        start(tiny({"seed": 4}), tmp_path / "run")
    assert (tmp_path / "run" / "config.toml").read_bytes() == before
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("dear")
    with pytest.raises(ConfigError, match="is not empty"):
        start(tiny(), tmp_path / "full")
    with pytest.raises(ConfigError, match=r"letter\.txt is a file\. Give a folder"):
        start(tiny(), tmp_path / "full" / "letter.txt")
    (tmp_path / "empty").mkdir()
    start(tiny(), tmp_path / "empty")


def test_a_mistake_in_the_configuration_leaves_no_folder(tiny, tmp_path):
    for settings in ({"memory.budget": 10}, {"model.name": "vgg17"}, {"method": "x"}):
        with pytest.raises(Exception, match=r"budget|vgg16|method"):
            start(tiny(settings), tmp_path / "run")
        assert not (tmp_path / "run").exists()


def test_a_folder_without_a_run(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "nowhere", tmp_path / "file"):
        with pytest.raises(CheckpointError, match=r"there is no run in .*: it has no config\.toml"):
            reopen(path)


def test_a_checkpoint_of_another_configuration_names_the_keys(tiny, tmp_path):
    for seed in (0, 1):
        with pytest.raises(RunStoppedError):
            play(start(tiny({**SMALL, "seed": seed}), tmp_path / f"{seed}"), Stop(after_round=1))
    shutil.rmtree(tmp_path / "0" / "checkpoints")
    shutil.copytree(tmp_path / "1" / "checkpoints", tmp_path / "0" / "checkpoints")
    with pytest.raises(CheckpointError, match="another configuration: seed: here 0, there 1"):
        reopen(tmp_path / "0")


def test_two_processes_do_not_work_on_one_run(tiny, tmp_path):
    run = start(tiny(SMALL), tmp_path / "run")
    other = os.open(tmp_path / "run", os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(CheckpointError, match="another process is working on"):
        play(run)
    os.close(other)
    play(run)


def test_a_file_system_without_locks_is_no_obstacle(tiny, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    play(start(tiny(SMALL), tmp_path / "run"))


@pytest.mark.parametrize("number", [1, 5, 20, 45])
def test_a_full_disk_is_said_and_nothing_is_lost(tiny, tmp_path, undisturbed, monkeypatch, number):
    """From some step on nothing more fits; then there is room again."""
    path = tmp_path / "run"

    def full(real):
        def step(*arguments):
            count[0] += 1
            if count[0] >= number:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(*arguments)

        return step

    count = [0]
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full(os.fsync))
        with pytest.raises(CheckpointError, match=r"cannot write .*: No space left on device\. .*[Mm]ake room there"):
            play(start(tiny(SMALL), path))
    if RunFiles(path).config.exists():
        play(reopen(path))
    else:
        play(start(tiny(SMALL), path))
    assert contents(path) == undisturbed


def test_three_rounds_in_a_row_without_an_update_stop_the_run(tiny, tmp_path, monkeypatch):
    settings = {"rounds": 8, "convergence.patience": 8, "memory.budget": "100%", "checkpoint.every": 50}
    path, real = tmp_path / "run", EmbeddedEngine.map

    def broken(self, tasks):
        for update in real(self, tasks):
            hit = update.kind == "train" and update.round in (2, 4, 5, 6)
            nan = {name: value * float("nan") for name, value in update.parameters.items()}
            yield replace(update, parameters=nan) if hit else update

    monkeypatch.setattr(EmbeddedEngine, "map", broken)
    with pytest.raises(TrainingError, match=r"3 rounds in a row had no usable update \(client \d: .* is not finite"):
        play(start(tiny(settings), path))
    lines = [json.loads(line) for line in (path / "journal.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [len(line["dropped"]) for line in lines] == [0, 2, 0, 2, 2, 2]
    monkeypatch.setattr(EmbeddedEngine, "map", real)
    run = reopen(path)
    assert (run.state.round, run.state.failures) == (6, 3)
    assert play(run)["rounds"] == 8


# A run on other machines ---------------------------------------------------------------------------------------------


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
        wire = {"sent": self.sent, "received": 2 * self.sent, "jfat": 0}
        self.sent = 0
        self.accounts.append({"wire": wire, "faults": {"0": f"reason {len(self.accounts)}"}})
        return self.accounts[-1]


def test_the_closing_evaluation_has_an_account_of_its_own(tiny, tmp_path):
    run = start(tiny(SMALL), tmp_path / "run", engine=lambda parts: Accounting(make_engine(parts)))
    results, engine = play(run), run.session.engine
    *rounds, last = engine.accounts
    assert len(rounds) == results["rounds"]
    assert results["closing"] == last
    assert last["wire"]["sent"] > 0
    assert results["wire"] == {
        part: sum(account["wire"][part] for account in rounds) for part in ("sent", "received", "jfat")
    }
    assert results["faults"] == len(rounds)
    # Nothing was asked after the account: it is complete.
    assert engine.sent == 0
    assert results["wire"]["sent"] + results["closing"]["wire"]["sent"] == engine.all_sent


def test_an_engine_without_accounts_has_none_at_the_end(tiny, tmp_path):
    assert {"closing", "wire", "faults"}.isdisjoint(play(start(tiny(SMALL), tmp_path / "run")))


@pytest.mark.parametrize("where", ["pilot/runs/run 1", "alone/run 1"])
def test_how_a_deployed_run_goes_on(tiny, tmp_path, where):
    path = tmp_path / where
    with pytest.raises(RunStoppedError):
        play(start(tiny(SMALL), path), Stop(after_round=1))
    assert how_to_resume(path) == f"fedprophet train --resume '{path}'"
    (tmp_path / "pilot").mkdir(exist_ok=True)
    (tmp_path / "pilot" / "deploy.toml").touch()
    (path / "flower.json").write_text('{"run": "ab", "deployed": true}')
    expected = {
        "pilot/runs/run 1": f"fedprophet deploy run {tmp_path}/pilot --name 'run 1' --resume",
        "alone/run 1": f"flwr run APP SERVER --run-config 'out=\"{path}\" resume=true'",
    }[where]
    assert how_to_resume(path) == expected
    for open_ in (reopen, open_to_read):
        with pytest.raises(CheckpointError, match=re.escape(f"Go on with: {expected}")):
            open_(path)
    (path / "flower.json").write_text('{"run": "ab", "deployed": false}')
    assert how_to_resume(path) == f"fedprophet train --resume '{path}'"
    (path / "flower.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"flower\.json is damaged. Put it back from a copy"):
        reopen(path)


def test_a_pilots_run_is_known_before_its_first_task(tmp_path):
    (tmp_path / "deploy.toml").touch()
    assert "deploy run" in how_to_resume(tmp_path / "runs" / "run-1")
    assert "train --resume" in how_to_resume(tmp_path / "other" / "run-1")


# A model of one's own -----------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.two = nn.Sequential(nn.Conv2d(4, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU())
        self.head = nn.Linear(36, 10)

    def forward(self, x):
        return self.head(self.two(self.one(x)).flatten(1))


@pytest.fixture
def net():
    torch.manual_seed(4)
    return Net()


@pytest.mark.parametrize("as_chain", [False, True])
def test_a_model_of_ones_own_is_left_as_it_is(tiny, tmp_path, net, same_tensors, as_chain):
    before = {name: value.clone() for name, value in net.state_dict().items()}
    given = chain_of(net) if as_chain else net
    config = tiny({**SMALL, "memory.budget": "90%", "model.options": {}})
    play(start(config, tmp_path / "one", model=given))
    assert same_tensors(dict(net.state_dict()), before)
    play(start(config, tmp_path / "two", model=given))
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_a_model_of_ones_own_is_handed_over_again_to_resume(tiny, tmp_path, net):
    config = tiny({**SMALL, "memory.budget": "90%", "model.options": {}})
    with pytest.raises(RunStoppedError):
        play(start(config, tmp_path / "one", model=net), Stop(after_round=2))
    with pytest.raises(ConfigError, match=r"go on with fedprophet\.resume\(RUN, model=…\)"):
        reopen(tmp_path / "one")
    play(reopen(tmp_path / "one", model=net))
    play(start(config, tmp_path / "two", model=net))
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
