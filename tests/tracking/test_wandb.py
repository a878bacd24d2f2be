"""Weights & Biases, by a module that records what it is told; the real one was tried by hand (WANDB_MODE=offline)."""

import json
import sys
from types import SimpleNamespace

import pytest

import fedprophet


class FakeRun:
    url, offline, dir = "https://wandb.example/run", False, "run/wandb/offline-run-1/files"

    def __init__(self, **given):
        self.given, self.logged, self.summary, self.exit_code = given, [], {}, None

    def log(self, values, step):
        self.logged.append((step, values))

    def finish(self, exit_code):
        self.exit_code = exit_code


@pytest.fixture
def runs(monkeypatch):
    """The runs that were begun."""
    made = []

    def init(**given):
        made.append(FakeRun(**given))
        return made[-1]

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Settings=lambda **given: given))
    for name in ("WANDB_PROJECT", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    return made


def test_a_run(runs, logged, journal, capsys):
    path = logged("wandb")
    (run,) = runs
    assert [step for step, _ in run.logged] == [1, 2, 3, 4]
    for step, values in run.logged:
        assert values["accuracy/personalised/clean"] == journal(path)[step]["clean"]
    results = json.loads((path / "results.json").read_text())
    assert run.summary["final/global/clean"] == results["global"]["clean"]["accuracy"]
    assert run.exit_code == 0
    assert run.given["config"]["train.batch"] == 16
    assert run.given["project"] == "fedprophet"
    assert run.given["dir"] == "run"
    assert run.given["settings"]["console"] == "off", "what the terminal shows is not sent"
    assert "WeightsAndBiases: https://wandb.example/run" in capsys.readouterr().out


def test_a_resumed_run_goes_on_under_its_id(runs, logged):
    logged("wandb", killed_after=3)
    first, second = runs
    assert first.exit_code is None
    assert [step for step, _ in first.logged] == [1, 2, 3]
    assert [step for step, _ in second.logged] == [3, 4], "wandb itself drops a step that it has"
    assert first.given["id"] == second.given["id"]
    assert second.given["resume"] == "allow"


def test_offline(runs, logged, monkeypatch, capsys):
    monkeypatch.setattr(FakeRun, "offline", True)
    logged("wandb", killed_after=1, resumed=False)
    assert "WeightsAndBiases: offline; send it with: wandb sync run/wandb/offline-run-1\n" in capsys.readouterr().out


def test_its_own_environment_is_heeded(runs, logged, monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    logged("wandb", killed_after=2, resumed=False)
    assert runs[0].given["project"] == "mine"
    assert runs[0].given["dir"] == str(tmp_path)


def test_the_real_one_is_refused_where_it_is_not_installed(small, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(fedprophet.FedProphetError, match=r"pip install 'fedprophet\[wandb\]'"):
        fedprophet.train(small, log=["wandb"])
    assert not (tmp_path / "runs").exists(), "before anything is written"
