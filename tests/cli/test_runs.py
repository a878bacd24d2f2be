"""`fedprophet runs`: a run moves to another folder, as if that were another machine."""

import json

import pytest

OUTCOME = ("journal.jsonl", "model.safetensors", "results.json")


@pytest.fixture
def run(copied):
    """A finished run, in the folder `run`."""
    return copied()


@pytest.fixture
def unfinished(run):
    """The same run before its closing evaluation, and what it left."""
    kept = {name: (run / name).read_bytes() for name in OUTCOME}
    for name in ("results.json", "model.safetensors"):
        (run / name).unlink()
    return kept


def test_a_run_moves_and_goes_on(cli, run, unfinished):
    said = cli("runs", "pack", "run", "--part", "16MiB")
    assert said.code == 0
    assert said.out.splitlines()[-1] == "On the other machine: fedprophet runs unpack run.pack"
    assert "to be resumed" in said.out
    assert [path.name for path in (run.parent / "run.pack").iterdir()] == ["part-001.fedpack"]
    said = cli("runs", "unpack", "run.pack")
    assert said.code == 0
    assert said.out.splitlines()[-1] == "Resume it with: fedprophet train --resume runs/run"
    assert cli("train", "--resume", "runs/run").code == 0
    assert {name: (run.parent / "runs" / "run" / name).read_bytes() for name in OUTCOME} == unfinished


def test_json(cli, run):
    packed = cli("runs", "pack", "run", "--out", "parts", "--json").json
    assert packed.keys() == {
        "run", "round", "finished", "parts", "bytes", "unpacked_bytes", "left_out", "notes",
    }  # fmt: skip
    assert (packed["run"], packed["finished"], packed["parts"]) == ("run", True, ["parts/part-001.fedpack"])
    assert packed["bytes"] == (run.parent / "parts" / "part-001.fedpack").stat().st_size < packed["unpacked_bytes"]
    unpacked = cli("runs", "unpack", "parts", "--out", "there", "--json").json
    assert unpacked == {
        "run": "there", "round": packed["round"], "finished": True, "bytes": packed["unpacked_bytes"], "notes": [],
    }  # fmt: skip
    assert json.loads((run.parent / "there" / "results.json").read_text())["rounds"] == packed["round"]


def test_a_run_that_is_the_current_folder_is_packed_beside_it(cli, run, monkeypatch):
    monkeypatch.chdir(run)
    assert cli("runs", "pack", ".").code == 0
    (run.parent / "empty").mkdir()
    monkeypatch.chdir(run.parent / "empty")
    assert cli("runs", "unpack", "../run.pack", "--out", ".").code == 0
    assert (run.parent / "empty" / "config.toml").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("pack", "run", "--part", "much"), "error: --part: 'much' is not a size"),
        (("pack", "run", "--part", "1kB"), "error: --part: a part has at least 65536 bytes, not 1000"),
        (("pack", "run", "--most", "1kB"), "error: --most: the parts take"),
        (("pack", "run", "--most", "0"), "error: --most: a size must be positive"),
        (("pack", "run", "--round", "last"), "error: --round: 'last' is neither a round's number nor best"),
        (("pack", "run", "--round", "77"), "error: there is no checkpoint of round 77"),
        (("pack", "run", "--out", "run"), "error: run is not empty, and nothing is overwritten"),
        (("pack", "nowhere"), "error: there is no run in nowhere"),
        (("unpack", "run"), "error: there is no part of a packed run in run"),
        (("unpack", "nowhere"), "error: cannot read nowhere: No such file"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(cli, run, words, said):
    assert cli("runs", *words).error.startswith(said)
    assert not (run.parent / "run.pack").exists()
