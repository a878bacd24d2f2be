"""What trackers are told, and that none of them disturbs a run."""

import json
import re
from pathlib import Path

import pytest

import fedprophet
from fedprophet.runs.observer import Observer
from fedprophet.runs.run import RunStoppedError
from fedprophet.tracking import TrackedRun, Tracker, open_trackers


class Spy(Tracker):
    """Keeps what it is told; fails in a round, if that is asked for."""

    def __init__(self, fails_in=None):
        self.runs, self.steps, self.results, self.fails_in = [], [], [], fails_in

    def start(self, run):
        self.runs.append(run)

    def scalars(self, step, values):
        if step == self.fails_in:
            raise ConnectionError("the server is gone.\nand more")
        self.steps.append(step)

    def finish(self, results):
        self.results.append(results)


class Notes(Observer):
    """Keeps notes; stops after a round, if that is asked for."""

    def __init__(self, stop_after=None):
        self.notes, self.stop_after = [], stop_after

    def note(self, text):
        self.notes.append(text)

    def round_done(self, record, seconds):
        if record["round"] == self.stop_after:
            raise KeyboardInterrupt


def contents(path):
    names = ("config.toml", "journal.jsonl", "results.json", "model.safetensors")
    return {name: (path / name).read_bytes() for name in names}


def test_a_tracker_of_the_users_own(small):
    spy = Spy()
    trained = fedprophet.train(small, out="run", log=[spy])
    (run,) = spy.runs
    assert (run.name, run.round) == ("run", 0)
    assert run.config["train.batch"] == 16
    assert spy.steps == [1, 2, 3, 4]
    (results,) = spy.results
    assert results["final/global/clean"] == trained.results["global"]["clean"]["accuracy"]


def test_logs_are_no_part_of_a_run(small):
    """Configuration, journal, results and model have the same bytes; the run does not remember that it was logged."""
    logged = fedprophet.train(small, out="logged", log=["tensorboard", Spy()])
    plain = fedprophet.train(small, out="plain")
    assert contents(logged.path) == contents(plain.path)
    before = sorted((logged.path / "tensorboard").iterdir())
    fedprophet.resume(logged.path, from_round=3)
    assert sorted((logged.path / "tensorboard").iterdir()) == before
    assert not (logged.path / "tracking.json").exists(), "TensorBoard needs no id"


def test_a_tracker_that_fails_does_not_stop_the_training(small):
    """The user is told once; the others go on."""
    failing, sound, notes = Spy(fails_in=2), Spy(), Notes()
    trained = fedprophet.train(small, out="run", log=[failing, sound], observer=notes)
    assert trained.results["rounds"] == 4
    assert (failing.steps, failing.results) == ([1], [])
    assert sound.steps == [1, 2, 3, 4]
    assert [note for note in notes.notes if "failed" in note] == [
        "Spy failed, and nothing more is logged there: ConnectionError: the server is gone"
    ]


def test_one_that_cannot_begin_is_told_before_training(small, tmp_path):
    class Closed(Tracker):
        def start(self, run):
            raise PermissionError("wrong password")

    sound = Spy()
    with pytest.raises(fedprophet.FedProphetError) as told:
        fedprophet.train(small, out="run", log=[sound, Closed()])
    assert str(told.value) == (
        "Closed cannot begin to log: PermissionError: wrong password. Nothing was trained. Correct that, or log "
        "without it. Resume it with: fedprophet train --resume run"
    )
    assert sound.results == [None], "it is closed"
    assert not (tmp_path / "run" / "journal.jsonl").exists()
    assert fedprophet.resume("run", log=[sound]).results["rounds"] == 4


def test_a_stopped_run_closes_its_trackers(small):
    spy = Spy()
    with pytest.raises(RunStoppedError):
        fedprophet.train(small, out="run", log=[spy], observer=Notes(stop_after=3))
    assert spy.results == [None]
    fedprophet.resume("run", log=[spy])
    assert spy.runs[1].round == 3
    assert spy.steps == [1, 2, 4], "the stop came before round 3 was logged"
    assert spy.results[1] is not None


def test_unknown_names_are_refused_before_anything_is_written(small, tmp_path):
    for log in ("tensorbord", ["tensorbord"]):
        with pytest.raises(fedprophet.FedProphetError, match=r"^log: .*'tensorbord'\. Did you mean 'tensorboard'\?"):
            fedprophet.train(small, out="run", log=log)
    with pytest.raises(fedprophet.FedProphetError, match=r"^log: 5 is neither a name, such as 'tensorboard', nor a"):
        fedprophet.train(small, out="run", log=5)
    assert not (tmp_path / "run").exists()


def test_a_name_that_is_given_twice_counts_once():
    assert len(open_trackers(["tensorboard", "tensorboard"])) == 1


def test_one_name_and_one_tracker_need_no_list():
    tracker = Tracker()
    assert open_trackers(tracker) == [tracker]
    assert len(open_trackers("tensorboard")) == 1


def test_what_cannot_be_a_key_is_told_what_to_be():
    with pytest.raises(fedprophet.FedProphetError, match=r"^log: \{'a': 1\} is neither a name"):
        open_trackers([{"a": 1}])


def test_what_trackers_remember(tmp_path):
    """A damaged file is as good as none."""
    run = TrackedRun("one", tmp_path, {}, 0)
    assert run.recall("a") == {}
    run.remember("a", id=1)
    run.remember("b", id=2)
    assert (run.recall("a"), run.recall("b")) == ({"id": 1}, {"id": 2})
    for damage in ("no JSON", "[]", json.dumps({"a": 3})):
        (tmp_path / "tracking.json").write_text(damage)
        assert run.recall("a") == {}


def test_the_tracker_of_the_documentation(small, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "watch.md").read_text()
    (*_, example) = re.findall("```python\n(.*?)```", page, re.DOTALL)
    train, given = fedprophet.train, []
    monkeypatch.setattr(fedprophet, "train", lambda preset, log: given.extend(log))
    exec(example, {})
    trained = train(small, out="run", log=given)
    rows = [line.split(",") for line in (trained.path / "rounds.csv").read_text().splitlines()]
    assert [row[0] for row in rows if row[1] == "training/loss"] == ["1", "2", "3", "4"]
