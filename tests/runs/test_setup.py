"""setup.json: what a run consists of, from its beginning on, and the machines it was played on."""

import json

import pytest
from torch import nn

from fedprophet.runs import setup
from fedprophet.runs.pack import pack, unpack
from fedprophet.runs.play import play
from fedprophet.runs.run import reopen


def read(path):
    return json.loads((path / "setup.json").read_text())


@pytest.fixture
def machine(monkeypatch):
    """Return a function that says which processor this machine has from now on."""

    def is_now(processor):
        monkeypatch.setattr(setup, "describe", lambda gpu: {"date": object(), "load": 1.0, "processor": processor})

    return is_now


def test_it_says_what_the_results_say_later(finished):
    about, results = read(finished), json.loads((finished / "results.json").read_text())
    shared = ("memory_model", "budget_bytes", "whole_model_bytes", "modules")
    assert {key: about[key] for key in shared} == {key: results[key] for key in shared}
    assert about["memory_model"] == "paper"
    assert about["data"] == {"name": "digits", "shape": [1, 8, 8], "classes": 10, "train": 1437, "test": 360}
    (model, machine) = about["model"], about["machines"][0]
    session = reopen(finished).session
    assert model["parameters"] == sum(p.numel() for p in session.world.chain.model.parameters())
    assert model["architecture"] == setup.architecture(session.world.chain.model)
    assert (machine["round"], machine["gpu"]) == (1, None)
    assert {"processor", "cores", "memory_bytes", "python", "torch", "fedprophet"} <= machine.keys()
    assert {"date", "load"}.isdisjoint(machine), "the same run on the same machine has the same bytes"


def small(width=4, activation=nn.ReLU):
    return nn.Sequential(nn.Conv2d(3, width, 3), activation(), nn.Flatten(), nn.Linear(width, 2))


def test_an_architecture_is_its_layers_and_tensors_whatever_its_weights():
    same = {setup.architecture(small()) for _ in range(2)}
    assert len(same) == 1, "with other weights it is the same"
    others = (small(width=5), small(activation=nn.GELU), nn.Sequential(small()))
    assert len(same | {setup.architecture(other) for other in others}) == 4


def test_another_machine_is_added_and_the_same_one_is_not(stopped, machine):
    before = read(stopped)
    machine("another")
    run = reopen(stopped)
    setup.note_setup(run)
    assert read(stopped)["machines"] == [
        before["machines"][0],
        {"round": run.state.round + 1, "processor": "another"},
    ]
    setup.note_setup(run)
    assert len(read(stopped)["machines"]) == 2, "nothing was played on it yet: it is named once"


def test_a_run_that_goes_back_forgets_the_machines_of_later_rounds(stopped, machine):
    run = reopen(stopped)
    about = read(stopped)
    about["machines"].append({"round": run.state.round + 1, "processor": "of rounds that are lost"})
    (stopped / "setup.json").write_text(json.dumps(about))
    machine("another")
    setup.note_setup(run)
    assert [each["processor"] for each in read(stopped)["machines"][1:]] == ["another"]


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"machines": 3}', '{"machines": [5, {"round": "x"}]}', '{"modules": [3]}']
)
def test_a_damaged_one_is_written_anew_and_no_result_depends_on_it(stopped, contents, undisturbed, text):
    (stopped / "setup.json").write_text(text)
    play(reopen(stopped))
    assert contents(stopped) == undisturbed
    assert read(stopped)["modules"][0]["index"] == 1
    assert len(read(stopped)["machines"]) == 1


def test_it_is_packed_and_the_report_is_not(stopped, tmp_path):
    (stopped / "report.html").write_text("made again by fedprophet report")
    packed = pack(stopped, tmp_path / "parts", 2**20)
    assert "report.html" in packed.left_out
    unpacked = unpack(tmp_path / "parts", tmp_path / "moved")
    assert (unpacked.run / "setup.json").read_bytes() == (stopped / "setup.json").read_bytes()
