"""A run's folder as it is seen from outside, with another process at work on it and without."""

import json
import os
import time

import pytest

from fedprophet import data
from fedprophet.errors import CheckpointError
from fedprophet.runs import watched as module
from fedprophet.runs.files import RunFiles
from fedprophet.runs.journal import Journal
from fedprophet.runs.outline import outline_of, read_outline
from fedprophet.runs.play import play
from fedprophet.runs.run import start
from fedprophet.runs.session import assemble
from fedprophet.runs.watched import WatchedRun
from fedprophet.storage.locks import folder_lock


class Clock:
    """Time that passes when a test says so."""

    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now

    time = staticmethod(time.time)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def long_ago(path):
    for file in path.iterdir():
        os.utime(file, (1, 1))
    return path


def append(path, record, seconds=None):
    Journal(path / "journal.jsonl").append(record)
    if seconds is not None:
        Journal(path / "timings.jsonl").append({"round": record["round"], "seconds": seconds})


def fourth(path):
    """A round that might come next: the last of the run."""
    last = json.loads((path / "journal.jsonl").read_text().splitlines()[-1])
    return last | {"round": 4, "stage_round": 2, "fixed": {"module": 2}}


def test_a_run_that_was_stopped(stopped):
    look = WatchedRun(long_ago(stopped)).look()
    assert look.state == "stopped"
    assert look.round == 3
    assert look.seconds.keys() == {1, 2, 3}
    assert [record["round"] for record in look.records] == [1, 2, 3]
    assert (look.outline.dataset, look.outline.modules, look.outline.total) == ("digits", 2, 4)
    assert look.since > 10**6
    assert not look.deployed


def test_a_process_at_work_and_one_that_ends(stopped, clock):
    """Its lock was seen here, so that a free one means that it is gone, however new the last round is."""
    watched = WatchedRun(long_ago(stopped))
    with folder_lock(stopped):
        assert watched.look().state == "working"
        clock.now += 60
        append(stopped, {**fourth(stopped), "fixed": None, "stage_round": 1, "module": 1}, 0.5)
        look = watched.look()
        assert (look.state, look.round, look.since) == ("working", 4, 0.0)
        clock.now += 5
        assert watched.look().since == 5
    assert watched.look().state == "stopped"


def test_the_newest_round_waits_for_its_time(stopped):
    """It is written behind the line of the journal. If nobody writes any more, it is not waited for."""
    watched = WatchedRun(stopped)
    with folder_lock(stopped):
        append(stopped, fourth(stopped))
        assert watched.look().round == 3
        Journal(stopped / "timings.jsonl").append({"round": 4, "seconds": 1.5})
        assert watched.look().round == 4
    (stopped / "timings.jsonl").unlink()
    assert watched.look().round == 4


def test_all_rounds_are_played(stopped):
    watched = WatchedRun(stopped)
    with folder_lock(stopped):
        append(stopped, fourth(stopped), 1.0)
        assert watched.look().state == "finishing"


def test_a_run_that_just_begins_has_no_lock_yet(stopped, clock):
    for name in ("journal.jsonl", "timings.jsonl"):
        (stopped / name).unlink()
    os.utime(stopped / "config.toml")
    watched = WatchedRun(stopped)
    look = watched.look()
    assert (look.state, look.round) == ("working", 0)
    clock.now += module.STILL_SECONDS + 0.1
    assert watched.look().state == "stopped"


def test_a_process_whose_lock_is_not_seen_here(stopped, clock):
    """As one on another machine. Rounds come, so it works; it stands still after three rounds' time."""
    watched = WatchedRun(long_ago(stopped))
    assert watched.look().state == "stopped"
    append(stopped, {**fourth(stopped), "stage_round": 1, "fixed": None, "module": 1}, 10.0)
    assert watched.look().state == "working"
    clock.now += 29
    assert watched.look().state == "working"
    clock.now += 2
    assert watched.look().state == "stopped"


def test_a_file_system_without_locks(stopped, clock, monkeypatch):
    monkeypatch.setattr(module, "is_locked", lambda folder: None)
    assert WatchedRun(long_ago(stopped)).look().state == "unknown"


def test_a_clock_that_is_ahead(stopped):
    """Another machine wrote the files, an hour from now."""
    os.utime(stopped / "journal.jsonl", (time.time() + 3600,) * 2)
    assert 0 <= WatchedRun(stopped).look().since < 60


def test_a_run_that_goes_back(stopped):
    watched = WatchedRun(stopped)
    assert watched.look().round == 3
    Journal(stopped / "journal.jsonl").truncate(1)
    assert watched.look().round == 1


def test_a_finished_run(finished):
    assert WatchedRun(finished).look().state == "finished"


def test_looking_writes_nothing_and_needs_no_data(stopped, monkeypatch):
    monkeypatch.setattr(data, "load", None)
    (stopped / ".lock").unlink()
    before = {file: file.stat().st_mtime_ns for file in (stopped, *stopped.rglob("*"))}
    watched = WatchedRun(stopped)
    for _ in range(3):
        watched.look()
    assert {file: file.stat().st_mtime_ns for file in (stopped, *stopped.rglob("*"))} == before


def test_a_folder_without_a_run(tmp_path):
    with pytest.raises(CheckpointError, match="there is no run in"):
        WatchedRun(tmp_path)


@pytest.mark.parametrize("changes", [{}, {"method": "jfat"}, {"norm.refresh": "attacked"}])
def test_the_outline_of_a_folder_is_that_of_the_run(tiny, small, tmp_path, changes, stop, killed):
    config = tiny({**small, **changes})
    with pytest.raises(killed):
        play(start(config, tmp_path / "run"), stop(killed, after_round=1))
    ours = outline_of(assemble(config))
    assert read_outline(RunFiles(tmp_path / "run")) == ours
    assert ours.total == {"jfat": 2}.get(config.method, 4) + (config.norm.refresh != "none")


@pytest.mark.parametrize("damage", [None, "no JSON", "[]", '{"modules": 3, "data": [], "budget_bytes": "x"}'])
def test_an_outline_without_the_file_that_has_it(stopped, damage):
    """As in folders of earlier versions: what is not known is left out."""
    setup = stopped / "setup.json"
    setup.unlink() if damage is None else setup.write_text(damage)
    outline = read_outline(RunFiles(stopped))
    assert (outline.dataset, outline.modules, outline.total, outline.whole) == ("digits", None, None, None)


def test_a_finished_run_of_an_earlier_version_says_it_in_its_results(finished):
    before = read_outline(RunFiles(finished))
    (finished / "setup.json").unlink()
    assert read_outline(RunFiles(finished)) == before
