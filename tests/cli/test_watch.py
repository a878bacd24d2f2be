"""`fedprophet watch` without a terminal; tests/e2e/test_watch.py has one, and runs that are being trained."""

import json
import os
import shutil
import threading
import time
import urllib.request

import pytest

from fedprophet.runs.journal import Journal
from fedprophet.storage.locks import folder_lock


@pytest.fixture
def stopped(copied):
    """A run of three rounds, killed long before the last: nobody works on it."""
    path = copied()
    for name in ("results.json", "model.safetensors"):
        (path / name).unlink()
    for name in ("journal.jsonl", "timings.jsonl"):
        Journal(path / name).truncate(2)
        os.utime(path / name, (1, 1))
    return path


def test_a_finished_run_ends_with_its_table(cli, copied):
    copied()
    said = cli("watch", "run")
    assert said.code == 0
    assert "round 3  module 3/3  of stage 1/1  eps " in said.out
    assert said.out == said.out[: said.out.index("# Results")] + cli("watch", "run", "--once").out
    assert "Accuracy of the trained model" in said.out
    assert said.out.rstrip().endswith("Files: run")


def test_a_run_that_was_stopped(cli, stopped):
    """Where nobody reads along, a command that waits for it would wait for ever."""
    said = cli("watch", "run")
    assert said.error == (
        "error: run: no process is working on it: it was stopped after round 2. "
        "Resume it with: fedprophet train --resume run\n"
    )
    assert said.out.splitlines()[1] == "run: run"
    assert said.out.splitlines()[2].startswith("round 2  module 2/3  of stage 1/1  eps ")


def test_once(cli, stopped):
    said = cli("watch", "run", "--once")
    assert said.code == 0
    assert "it was stopped after round 2. Resume it with: fedprophet train --resume run\n" in said.out
    document = cli("watch", "run", "--once", "--json").json
    assert (document["state"], document["round"], document["modules"]) == ("stopped", 2, 3)


def test_documents(cli, stopped):
    said = cli("watch", "run", "--json")
    assert said.code == 2
    (document,) = map(json.loads, said.out.splitlines())
    assert (document["state"], document["round"], document["resume"]) == (
        "stopped",
        2,
        "fedprophet train --resume run",
    )


class Writing(threading.Thread):
    """Plays the rounds of a finished run into a folder, one between two looks, as another process would."""

    def __init__(self, path, monkeypatch):
        super().__init__()
        self.looks = threading.Semaphore(0)
        self.written = threading.Semaphore(0)
        monkeypatch.setattr(time, "sleep", self.sleep)
        self.path, self.files = path, {}
        for name in ("results.json", "model.safetensors"):
            self.files[name] = (path / name).read_bytes()
            (path / name).unlink()
        self.journal, self.timings = (path / name for name in ("journal.jsonl", "timings.jsonl"))
        self.rounds = [file.read_bytes().splitlines(keepends=True) for file in (self.journal, self.timings)]
        self.journal.unlink()
        self.timings.unlink()
        self.taken = threading.Event()
        self.start()
        self.taken.wait()

    def sleep(self, seconds):
        """Instead of the second between two looks, something is written."""
        self.looks.release()
        self.written.acquire()

    def step(self):
        self.written.release()
        self.looks.acquire()

    def run(self):
        with folder_lock(self.path):
            self.taken.set()
            self.looks.acquire()
            for line, timing in zip(*self.rounds, strict=True):
                for half in (line[:20], line[20:]):
                    with self.journal.open("ab") as file:
                        file.write(half)
                    self.step()
                with self.timings.open("ab") as file:
                    file.write(timing)
                self.step()
            for name, content in self.files.items():
                (self.path / name).write_bytes(content)
        self.written.release()


def test_a_line_for_each_round_that_comes(cli, copied, monkeypatch):
    """Looks come after every half of a line, too."""
    writing = Writing(copied(), monkeypatch)
    said = cli("watch", "run")
    writing.join()
    assert said.code == 0
    lines = said.out.splitlines()
    assert lines[0] == "a process is working on it; no round has come yet"
    assert [line.split("  ")[0] for line in lines if line.startswith("round ")] == ["round 1", "round 2", "round 3"]
    assert sum(line.startswith("module ") for line in lines) == 3, "each is fixed in its only round"
    assert "Files: run" in lines


def test_a_document_for_each_round_that_comes(cli, copied, monkeypatch):
    writing = Writing(copied(), monkeypatch)
    said = cli("watch", "run", "--json")
    writing.join()
    documents = [json.loads(line) for line in said.out.splitlines()]
    assert [(each["round"], each["state"]) for each in documents] == [
        (0, "working"),
        (1, "working"),
        (2, "working"),
        (3, "finishing"),
        (3, "finished"),
    ]


def test_rounds_that_come_together_are_told_one_by_one(cli, stopped, monkeypatch):
    record, timing = ([json.loads(line) for line in (stopped / name).read_text().splitlines()][-1] for name in NAMES)

    def sleep(seconds):
        for number in (3, 4):
            Journal(stopped / "journal.jsonl").append(record | {"round": number})
            Journal(stopped / "timings.jsonl").append(timing | {"round": number})
        monkeypatch.setattr(time, "sleep", interrupt)

    monkeypatch.setattr(time, "sleep", sleep)
    with folder_lock(stopped):
        said = cli("watch", "run", "--json")
    assert [json.loads(line)["round"] for line in said.out.splitlines()] == [2, 3, 4]


NAMES = ("journal.jsonl", "timings.jsonl")


def interrupt(*_):
    raise KeyboardInterrupt


def test_ctrl_c_leaves_the_run_alone(cli, stopped, monkeypatch):
    monkeypatch.setattr(time, "sleep", interrupt)
    with folder_lock(stopped):
        said = cli("watch", "run")
    assert said.code == 130
    assert said.err == "the run is left as it is. Show it again with: fedprophet watch run\n"


def test_a_run_that_goes_back_is_told(cli, stopped, monkeypatch):
    def sleep(seconds):
        for name in NAMES:
            Journal(stopped / name).truncate(1)
        monkeypatch.setattr(time, "sleep", interrupt)

    monkeypatch.setattr(time, "sleep", sleep)
    with folder_lock(stopped):
        said = cli("watch", "run")
    assert said.out.splitlines()[-1] == "the run went back to round 1"


def test_the_report_is_served(cli, stopped, monkeypatch):
    """Until Ctrl-C, on loopback."""
    pages = []

    def wait(server):
        with urllib.request.urlopen(server.url) as answer:
            pages.append((server.url, answer.read()))
        raise KeyboardInterrupt

    monkeypatch.setattr("fedprophet.report.serve.ReportServer.wait", wait)
    said = cli("watch", "run", "--serve")
    ((url, page),) = pages
    assert url.startswith("http://127.0.0.1:")
    assert page.startswith(b"<!")
    assert said.out.startswith(f"{url} shows run, ")
    assert said.code == 130


def test_a_run_that_is_about_to_begin_is_waited_for(cli, finished, tmp_path, monkeypatch):
    def sleep(seconds):
        shutil.copytree(finished(), tmp_path / "run")

    monkeypatch.setattr(time, "sleep", sleep)
    said = cli("watch", "run")
    assert said.code == 0
    assert said.err == "there is no run in run yet: waiting for it, at most 60 seconds\n"


def test_a_run_that_does_not_begin_is_not_waited_for_for_ever(cli, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    assert "error: there is no run in nothing: it has no config.toml" in cli("watch", "nothing").error


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nothing", "--once"], "there is no run in nothing: it has no config.toml"),
        (["run", "--port", "80"], "--port goes with --serve"),
        (["run", "--serve", "--json"], "leave out --once and --json"),
        (["run", "--serve", "--once"], "leave out --once and --json"),
    ],
)
def test_mistakes(cli, stopped, arguments, text):
    assert text in cli("watch", *arguments).error


@pytest.mark.parametrize("more", [[], ["--serve"]])
def test_a_file_is_not_waited_for(cli, tmp_path, more):
    (tmp_path / "file").write_text("")
    assert "is a file. Give the folder of a run" in cli("watch", str(tmp_path / "file"), *more).error
