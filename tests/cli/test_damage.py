"""A damaged run at the command line: a sentence that names the file, and a way out; never another number."""

import json
import shutil

import pytest

COMMANDS = {
    "train": ("train", "--resume", "run"),
    "evaluate": ("evaluate", "run", "--attack", "clean", "--no-masking-check"),
    "export": ("export", "run", "--out", "model.safetensors"),
}


@pytest.fixture
def run(copied):
    """A run that has trained and is not finished: its closing evaluation is still to come."""
    path = copied()
    (path / "results.json").unlink()
    return path


@pytest.mark.parametrize("command", COMMANDS)
def test_lost_layers(cli, run, command):
    shutil.rmtree(run / "clients")
    error = cli(*COMMANDS[command]).error
    assert error.startswith("error: missing: run/clients/backbone/0/")
    assert error.endswith("Put back run/clients from a copy, or start the run anew\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_altered_layers(cli, run, command):
    for file in (run / "clients").rglob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-4] + b"\x00\x00\x80\x3f")
    error = cli(*COMMANDS[command]).error
    assert "error: the stored layers in run/clients/backbone/0/" in error
    assert "are not those that were written. Put it back from a copy, or start the run anew" in error


def test_a_cut_journal(cli, run):
    (run / "journal.jsonl").write_bytes(b"")
    error = cli(*COMMANDS["train"]).error
    assert error.startswith("error: run/journal.jsonl was cut or altered, and the run's results are computed from it.")
    for command in ("evaluate", "export"):
        said = cli(*COMMANDS[command])
        assert said.code == 0
        assert "note: run/journal.jsonl was cut or altered: nothing here depends on it" in said.err
    assert "run/journal.jsonl was cut or altered" in cli("compare", "run").error


@pytest.mark.parametrize("text", [None, "[]", "{"])
def test_inputs(cli, run, text):
    (run / "inputs.json").unlink()
    if text is not None:
        (run / "inputs.json").write_text(text)
    said = cli(*COMMANDS["train"])
    assert said.code == 0
    assert "note: run/inputs.json was lost or altered: it is written again from the checkpoint" in said.out
    assert json.loads((run / "inputs.json").read_text()).keys() == {"dataset", "model"}


def test_an_altered_model(cli, copied):
    model = copied() / "model.safetensors"
    sound = model.read_bytes()
    model.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    for command in ("evaluate", "export"):
        assert "note: run/model.safetensors was altered" in cli(*COMMANDS[command]).err
    said = cli(*COMMANDS["train"])
    assert "note: run/model.safetensors was altered: it is made again from the checkpoint" in said.out
    assert model.read_bytes() == sound


def test_measurements_that_were_altered_are_made_again(cli, copied):
    path = copied()
    first = cli(*COMMANDS["evaluate"], "--json").json
    (kept,) = (path / "evaluation").glob("*.jsonl")
    lines = [json.loads(line) for line in kept.read_text().splitlines() if line]
    kept.write_text("".join(json.dumps({**line, "clean": line["samples"]}) + "\n" for line in lines))
    assert cli(*COMMANDS["evaluate"], "--json").json == first
