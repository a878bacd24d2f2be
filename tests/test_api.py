"""The Python API: a model and data of one's own, and the same run as on the command line."""

import io
import json
import os
import signal
import sys
import time

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import nn

import fedprophet
from fedprophet.errors import CheckpointError, ConfigError, ModelError
from fedprophet.runs.observer import Observer
from fedprophet.runs.pack import pack, unpack
from fedprophet.runs.run import RunStoppedError


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.two = nn.Sequential(nn.Conv2d(4, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU())
        self.last = nn.Linear(16, 3)

    def forward(self, x):
        return self.last(self.two(self.one(x)).flatten(1))


class Pairs(torch.utils.data.Dataset):
    """A map-style dataset that makes its samples when they are asked for."""

    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(3, (count,), generator=generator)
        self.noise = torch.rand(count, 2, 5, 5, generator=generator)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return (self.noise[index] + 0.3 * self.labels[index]) / 2, int(self.labels[index])


SETTINGS = {
    "rounds": 2,
    "threads": 1,
    "memory": {"budget": "90%"},
    "population": {"clients": 4, "cohort": 2},
    "train": {"iterations": 2, "batch": 8, "warmup": 0},
    "attack": {"radius": 0.05, "steps": 1, "feature_steps": 1},
    "convergence": {"gate": 0},
    "evaluate": {"steps": 1},
    "measure": {"steps": 1},
}


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    return Net()


@pytest.fixture(scope="module")
def data():
    return fedprophet.from_datasets(Pairs(60, 1), Pairs(20, 2))


@pytest.fixture(scope="module")
def trained(net, data, tmp_path_factory):
    """A finished run with a model and data of one's own."""
    return fedprophet.train(SETTINGS, model=net, data=data, out=tmp_path_factory.mktemp("trained") / "run")


def tensors_of(pairs):
    images = torch.stack([pairs[index][0] for index in range(len(pairs))])
    return images, pairs.labels


def test_own_model_and_map_style_dataset(trained):
    assert len(trained.results["modules"]) == 2
    assert trained.results["global"]["clean"]["samples"] == 20
    assert trained.results == json.loads((trained.path / "results.json").read_text())
    fresh = Net()
    fresh.load_state_dict(load_file(trained.path / "model.safetensors"), strict=True)


def test_tensors_and_a_map_style_dataset_are_the_same(net, trained, tmp_path):
    same = fedprophet.from_tensors(*tensors_of(Pairs(60, 1)), *tensors_of(Pairs(20, 2)))
    fedprophet.train(SETTINGS, model=net, data=same, out=tmp_path / "tensors")
    for file in ("journal.jsonl", "model.safetensors"):
        assert (trained.path / file).read_bytes() == (tmp_path / "tensors" / file).read_bytes()


def test_evaluate_and_export(net, data, trained, tmp_path):
    run = trained
    results = fedprophet.evaluate(run.path, ["clean", "pgd1"], model=net, data=data)
    assert results.pop("warnings") == []
    keys = ("starting_weights", "norm_layers", "public_samples", "personalised", "global")
    assert results == {key: run.results[key] for key in keys}
    assert fedprophet.evaluate(run.path, ["clean"], of="global", model=net, data=data)["personalised"] == {}
    some = fedprophet.evaluate(run.path, "clean,pgd1", samples=3, masking_check=False, model=net, data=data)
    assert [cell["samples"] for cell in some["global"].values()] == [3, 3]
    with pytest.raises(ConfigError, match="the number of samples must be at least 1, not 0"):
        fedprophet.evaluate("nowhere", samples=0)
    with pytest.raises(ConfigError, match="unknown attack 'pgd'"):
        fedprophet.evaluate("nowhere", "pgd")
    fedprophet.export(run.path, tmp_path / "out.safetensors", model=net, data=data)
    assert (tmp_path / "out.safetensors").read_bytes() == (run.path / "model.safetensors").read_bytes()


class Stop(Observer):
    def round_done(self, record, seconds):
        raise KeyboardInterrupt


class Finalised:
    """An object during whose end Ctrl-C is pressed."""

    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)


class Dropped(Observer):
    """A Ctrl-C whose exception Python drops."""

    def round_done(self, record, seconds):
        Finalised()
        time.sleep(60)


def test_a_ctrl_c_that_python_drops_stops_the_call_and_nothing_of_ours_is_left(net, data, tmp_path):
    before, hook = signal.signal(signal.SIGINT, signal.default_int_handler), sys.unraisablehook
    with pytest.raises(RunStoppedError, match="stopped after round 1; nothing is lost"):
        fedprophet.train(SETTINGS, model=net, data=data, out=tmp_path / "run", observer=Dropped())
    assert sys.unraisablehook is hook
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


def test_resume_wants_the_same_data_and_start_again(net, data, trained, tmp_path):
    with pytest.raises(RunStoppedError, match=r"Resume it with: fedprophet\.resume\('.*run', model=…, data=…\)$"):
        fedprophet.train(SETTINGS, model=net, data=data, out=tmp_path / "run", observer=Stop())
    with pytest.raises(ConfigError, match=r'data\.name = "custom".*fedprophet\.resume\(RUN, model=…, data=…\)'):
        fedprophet.resume(tmp_path / "run", model=net)
    other = fedprophet.from_datasets(Pairs(60, 3), Pairs(20, 2))
    with pytest.raises(CheckpointError, match="was started with a different dataset: pass the same one, or"):
        fedprophet.resume(tmp_path / "run", model=net, data=other)
    another = Net()
    another.last = nn.Linear(16, 3, bias=False)
    wrong = r"there 'last\.bias' is float32 of shape \(3,\), and here not there\. Pass one that is built like it"
    with pytest.raises(ModelError, match=wrong):
        fedprophet.resume(tmp_path / "run", model=another, data=data)
    fedprophet.resume(tmp_path / "run", model=net, data=data)
    for file in ("journal.jsonl", "model.safetensors", "results.json"):
        assert (tmp_path / "run" / file).read_bytes() == (trained.path / file).read_bytes()


class Never(Observer):
    def started(self, session, path, round):
        raise KeyboardInterrupt


def drawn_anew():
    """A model as a new process builds it without a seed: no weight, and no statistic, is what it was."""
    model = Net()
    model.one[1].running_mean.fill_(0.5)
    return model


@pytest.mark.parametrize("changes", [{}, {"norm": {"newcomers": "average"}}, {"method": "jfat"}])
@pytest.mark.parametrize("stop", [Stop, Never])
def test_a_model_with_other_weights_goes_on_like_one_that_never_stopped(net, data, tmp_path, changes, stop):
    """With one client a round, clients that begin after the resume must begin as the run's model did."""
    settings = {**SETTINGS, **changes, "rounds": 3, "population": {"clients": 4, "cohort": 1}}
    fedprophet.train(settings, model=net, data=data, out=tmp_path / "whole")
    with pytest.raises((RunStoppedError, KeyboardInterrupt)):
        fedprophet.train(settings, model=net, data=data, out=tmp_path / "run", observer=stop())
    fedprophet.resume(tmp_path / "run", model=drawn_anew(), data=data)
    for file in ("journal.jsonl", "model.safetensors", "results.json"):
        assert (tmp_path / "run" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    fedprophet.export(tmp_path / "run", tmp_path / "out.safetensors", model=drawn_anew(), data=data)
    assert (tmp_path / "out.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()


def test_weights_of_the_beginning_that_are_lost_or_altered_are_noticed(net, data, tmp_path):
    run = tmp_path / "run"
    with pytest.raises(RunStoppedError):
        fedprophet.train(SETTINGS, model=net, data=data, out=run, observer=Stop())
    start = run / "start.safetensors"
    whole = start.read_bytes()
    for content in (b"", whole[:-1] + b"\x07"):
        start.write_bytes(content)
        for call in (fedprophet.resume, fedprophet.evaluate):
            with pytest.raises(
                CheckpointError, match=r"start\.safetensors, the weights that .* was altered\. Put it back"
            ):
                call(run, model=net, data=data)
    start.unlink()
    with pytest.raises(
        CheckpointError, match=r"start\.safetensors, which holds .* is lost\. Put it back from a copy, or"
    ):
        fedprophet.resume(run, model=drawn_anew(), data=data)
    fedprophet.resume(run, model=net, data=data)


def test_a_run_of_an_own_model_is_packed_with_the_weights_of_its_beginning(net, data, tmp_path):
    with pytest.raises(RunStoppedError):
        fedprophet.train(SETTINGS, model=net, data=data, out=tmp_path / "run", observer=Stop())
    pack(tmp_path / "run", tmp_path / "parts", 10**6)
    unpack(tmp_path / "parts", tmp_path / "there")
    assert (tmp_path / "there" / "start.safetensors").read_bytes() == (
        tmp_path / "run" / "start.safetensors"
    ).read_bytes()
    fedprophet.resume(tmp_path / "there", model=drawn_anew(), data=data)


@pytest.fixture
def screen(monkeypatch):
    """What a person sees at standard error, in a terminal."""
    written = io.StringIO()
    monkeypatch.setattr(fedprophet.api, "console_on", lambda err: Console(file=written, force_terminal=True, width=200))
    return written


class Count(Observer):
    rounds = 0

    def round_done(self, record, seconds):
        self.rounds += 1


def test_a_terminal_shows_how_far_a_run_is(net, data, tmp_path, screen, capfd):
    fedprophet.train(SETTINGS, model=net, data=data, out=tmp_path / "run")
    assert "fedprophet on dataset: custom in 2 modules" in screen.getvalue()
    assert "evaluating the trained model" in screen.getvalue()
    assert "\x1b[?25h" in screen.getvalue().rpartition("evaluating")[2], "the cursor is back"
    with pytest.raises(RunStoppedError):
        fedprophet.train(SETTINGS, model=net, data=data, out=tmp_path / "stopped", observer=Stop())
    fedprophet.resume(tmp_path / "stopped", model=net, data=data)
    assert "going on after round 1" in screen.getvalue()
    assert capfd.readouterr() == ("", "")


def test_nothing_is_shown_where_it_is_not_wanted_or_nobody_looks(net, data, tmp_path, screen, monkeypatch, capfd):
    fedprophet.train(SETTINGS, model=net, data=data, out=tmp_path / "quiet", quiet=True)
    count = Count()
    fedprophet.train(SETTINGS, model=net, data=data, out=tmp_path / "observed", observer=count)
    assert count.rounds == 4
    assert screen.getvalue() == ""
    monkeypatch.undo()
    fedprophet.train(SETTINGS, model=net, data=data, out=tmp_path / "piped")
    assert capfd.readouterr() == ("", "")


def test_a_terminal_shows_how_far_an_evaluation_is(net, data, tmp_path, screen, monkeypatch, capfd):
    run = fedprophet.train(SETTINGS, model=net, data=data, out=tmp_path / "run", quiet=True).path
    monkeypatch.setattr(fedprophet.progress, "console_on", lambda err: fedprophet.api.console_on(err=err))
    kept = fedprophet.evaluate(run, "clean", samples=8, model=net, data=data, quiet=True)
    assert screen.getvalue() == ""
    (run / "evaluation.json").unlink()
    seen = fedprophet.evaluate(run, "clean,pgd2", samples=8, model=net, data=data)
    assert seen["global"]["clean"] == kept["global"]["clean"]
    assert "8/8" in screen.getvalue()
    before = screen.getvalue()
    monkeypatch.undo()
    fedprophet.evaluate(run, "clean", samples=4, model=net, data=data)
    assert screen.getvalue() == before
    assert capfd.readouterr() == ("", "")


def test_configurations_of_all_kinds(net, data, tmp_path):
    config = fedprophet.load_config("digits", ["rounds=1"])
    with pytest.raises(ConfigError, match="overrides go with a preset's name or a file"):
        fedprophet.train(config, overrides=["seed=1"])
    with pytest.raises(ConfigError, match="overrides go with"):
        fedprophet.train(SETTINGS, overrides=["seed=1"])
    with pytest.raises(ConfigError, match=r"unknown key .train\.bach."):
        fedprophet.train({"train": {"bach": 3}})
    (tmp_path / "mine.toml").write_text("rounds = 1\nthreads = 1\n[train]\nwarmup = 0\n[convergence]\ngate = 0\n")
    small = ["memory.budget=100%", "train.iterations=1", "population.cohort=1", "evaluate.steps=1"]
    run = fedprophet.train(tmp_path / "mine.toml", model=net, data=data, out=tmp_path / "run", overrides=small)
    assert run.results["rounds"] == 1
    assert 'name = "custom"' in (run.path / "config.toml").read_text()
