"""A run is packed, unpacked somewhere else, and goes on there as if it had never moved."""

import errno
import json
import os
import shutil

import pytest
import torch

from fedprophet.client.layer_store import ClientStore
from fedprophet.errors import CheckpointError, ConfigError
from fedprophet.messages.values import Timeline
from fedprophet.runs import pack as pack_module
from fedprophet.runs.export import write_model
from fedprophet.runs.pack import pack, unpack
from fedprophet.runs.play import play
from fedprophet.runs.run import RunStoppedError, open_to_read, reopen, start
from fedprophet.storage.files import file_hash
from fedprophet.storage.locks import folder_lock
from fedprophet.storage.parts import LEAST_PART, parts_of, read_parts, write_parts
from fedprophet.storage.squeeze import squeeze

PART = 2**20
SLOW = pytest.mark.slow


def files_of(path):
    return {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}


# There and back ------------------------------------------------------------------------------------------------------


def test_a_run_that_moved_ends_with_the_bytes_of_one_that_stayed(stopped, tmp_path, contents, undisturbed):
    packed = pack(stopped, tmp_path / "parts", LEAST_PART)
    assert (packed.round, packed.finished) == (3, False)
    assert packed.bytes == sum(path.stat().st_size for path in (tmp_path / "parts").iterdir())
    assert packed.left_out == ("checkpoints/round-000002",)
    assert all(path.stat().st_size <= LEAST_PART for path in packed.parts)
    shutil.rmtree(stopped)
    unpacked = unpack(tmp_path / "parts", tmp_path / "there" / "run")
    assert (unpacked.run, unpacked.round, unpacked.finished) == (tmp_path / "there" / "run", 3, False)
    assert unpacked.notes == ()
    run = reopen(unpacked.run)
    assert (run.state.round, run.notes) == (3, ())
    play(run)
    assert contents(unpacked.run) == undisturbed


def test_a_run_that_moved_goes_on_in_its_logs(stopped, tmp_path):
    (stopped / "tracking.json").write_text('{"mlflow": {"run_id": "1"}}')
    pack(stopped, tmp_path / "parts", PART)
    unpacked = unpack(tmp_path / "parts", tmp_path / "run")
    assert (unpacked.run / "tracking.json").read_text() == '{"mlflow": {"run_id": "1"}}'


@pytest.mark.parametrize("method", ["fedprophet", "jfat", *(pytest.param(m, marks=SLOW) for m in ("feddf", "fedrbn"))])
def test_a_run_goes_on_from_any_of_its_rounds(tiny, small, stop, tmp_path, contents, method):
    """Also between a best round and the round that restores it, whose layers the clients must still have then."""
    settings = {**small, "method": method, "rounds": 3, "population.clients": 6, "evaluate.clients": 4}
    settings |= {"distillation.iterations": 2} if method == "feddf" else {"evaluate.test_samples": 40}
    settings |= {"convergence.gate": 1} if method == "fedprophet" else {}
    config = tiny({**settings, "checkpoint.keep": 99})
    play(start(config, tmp_path / "whole"))
    rounds = len((tmp_path / "whole" / "journal.jsonl").read_text().splitlines())
    for number in range(1, rounds, 3):
        pack(tmp_path / "whole", tmp_path / f"parts-{number}", PART, round=number)
        unpacked = unpack(tmp_path / f"parts-{number}", tmp_path / f"run-{number}")
        assert unpacked.round == number
        assert not (unpacked.run / "results.json").exists(), "it goes back"
        play(reopen(unpacked.run))
        assert contents(unpacked.run) == contents(tmp_path / "whole")


def test_a_finished_run_is_packed_with_its_results_and_model(finished, tmp_path, contents, undisturbed):
    (finished / "evaluation.json").write_text("{}")
    packed = pack(finished, tmp_path / "parts", PART)
    assert packed.finished
    assert packed.left_out == ("checkpoints/round-000003", "evaluation.json")
    unpacked = unpack(tmp_path / "parts", tmp_path / "run")
    assert contents(tmp_path / "run") == undisturbed
    assert play(reopen(unpacked.run)) == json.loads(undisturbed["results.json"])
    write_model(open_to_read(unpacked.run), tmp_path / "exported")
    assert (tmp_path / "exported").read_bytes() == undisturbed["model.safetensors"]


def test_a_finished_baseline_is_packed_as_it_is_though_an_earlier_round_is_the_best(tiny, small, tmp_path, contents):
    config = tiny({**small, "method": "jfat", "rounds": 3, "evaluate.every": 1, "checkpoint.keep": 9, "seed": 2})
    play(start(config, tmp_path / "run"))
    assert reopen(tmp_path / "run").state.best.round < 3
    packed = pack(tmp_path / "run", tmp_path / "parts", PART, round="best")
    assert (packed.round, packed.finished) == (3, True)
    unpack(tmp_path / "parts", tmp_path / "there")
    assert contents(tmp_path / "there") == contents(tmp_path / "run")


def test_a_model_that_is_the_checkpoints_costs_next_to_nothing(finished, tmp_path):
    with_model = pack(finished, tmp_path / "with", PART).bytes
    size = (finished / "model.safetensors").stat().st_size
    (finished / "model.safetensors").unlink()
    assert with_model - pack(finished, tmp_path / "without", PART).bytes < 0.4 * size


def test_an_altered_model_is_left_out_and_made_again(finished, tmp_path, contents, undisturbed):
    (finished / "model.safetensors").write_bytes(b"altered")
    assert "model.safetensors" in pack(finished, tmp_path / "parts", PART).left_out
    play(reopen(unpack(tmp_path / "parts", tmp_path / "run").run))
    assert contents(tmp_path / "run") == undisturbed


def test_only_layers_that_may_be_asked_for_are_packed(tmp_path):
    """Versions 1 to 5, of which 4 was discarded: after round 3 the client has 3, after round 5 it has 5."""
    store = ClientStore(tmp_path, 10**6)
    for number in range(1, 6):
        store.put("backbone", 7, number, {"mean": torch.full((3,), float(number))}, Timeline())
    (tmp_path / "copy").mkdir()
    for path, content in store.files(Timeline(((3, 4),)), [4, 5]):
        assert path == "backbone/0/7.safetensors"
        (tmp_path / "copy/backbone/0").mkdir(parents=True)
        (tmp_path / "copy" / path).write_bytes(content)
    copy = ClientStore(tmp_path / "copy", 10**6)
    copy.expect(store.digests(5))
    assert copy.get("backbone", 7, Timeline(((3, 4),)), 5)["mean"].tolist() == [3, 3, 3]
    assert copy.get("backbone", 7, Timeline(((3, 4),)), 6)["mean"].tolist() == [5, 5, 5]
    with pytest.raises(CheckpointError, match="does not hold the layers that client 7 had after round 2"):
        copy.get("backbone", 7, Timeline(), 3)


def test_the_best_model_takes_no_room_while_there_is_no_best_round(tiny, small, stop, tmp_path):
    """Before the gate nothing is the best: the best model of the stage before is of no use any more."""
    config = tiny({**small, "rounds": 5, "convergence.gate": 3})
    with pytest.raises(RunStoppedError):
        play(start(config, tmp_path / "run"), stop(after_round=7))
    state = reopen(tmp_path / "run").state
    assert state.best is None
    different = [name for name in state.model if state.model[name] is not state.best_model[name]]
    assert different
    pack(tmp_path / "run", tmp_path / "parts", PART)
    there = reopen(unpack(tmp_path / "parts", tmp_path / "there").run).state
    assert all(there.model[name] is there.best_model[name] for name in there.model)
    assert all(there.model[name].equal(state.model[name]) for name in there.model)


# What is refused -----------------------------------------------------------------------------------------------------


def test_a_limit_on_all_parts_together(tiny, small, stop, tmp_path):
    """Round 2 is the best of the first stage's three: its checkpoint is still there, and has one model."""
    config = tiny({**small, "rounds": 4, "evaluate.every": 2})
    with pytest.raises(RunStoppedError):
        play(start(config, tmp_path / "run"), stop(after_round=3))
    whole = pack(tmp_path / "run", tmp_path / "parts", PART).bytes
    assert whole == sum(file.stat().st_size for file in (tmp_path / "parts").iterdir())
    with pytest.raises(ConfigError, match=f"the parts take {whole} bytes .*, and {whole - 1} are allowed"):
        pack(tmp_path / "run", tmp_path / "other", PART, most=whole - 1)
    said = (
        r"--most: the parts take \d+ bytes .*, and 1000 are allowed\. The checkpoint of the best round, 2, takes less"
    )
    with pytest.raises(ConfigError, match=said):
        pack(tmp_path / "run", tmp_path / "other", PART, most=1000)
    assert not (tmp_path / "other").exists()
    packed = pack(tmp_path / "run", tmp_path / "best", PART, round="best", most=whole)
    assert packed.round == 2
    assert packed.bytes < whole


def test_the_checkpoint_of_the_best_round_stays_and_a_run_goes_on_from_it(tiny, small, stop, tmp_path, contents):
    """Round 3 alone was evaluated: two rounds later its checkpoint is still there, and the layers of its time."""
    settings = {**small, "rounds": 7, "evaluate.every": 3, "convergence.patience": 6, "population.clients": 4}
    config = tiny({**settings, "checkpoint.keep": 1, "memory.budget": "100%"})
    play(start(config, tmp_path / "whole"))
    with pytest.raises(RunStoppedError):
        play(start(config, tmp_path / "run"), stop(after_round=5))
    assert reopen(tmp_path / "run").state.best.round == 3
    assert pack(tmp_path / "run", tmp_path / "parts", PART, round="best").round == 3
    play(reopen(unpack(tmp_path / "parts", tmp_path / "there").run))
    assert contents(tmp_path / "there") == contents(tmp_path / "whole")


def test_a_part_that_is_too_small(stopped, tmp_path):
    with pytest.raises(ConfigError, match="--part: a part has at least 65536 bytes, not 1000"):
        pack(stopped, tmp_path / "parts", 1000)


def test_folders_that_are_not_empty_stay_as_they_are(stopped, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("mine")
    with pytest.raises(ConfigError, match="mine is not empty, and nothing is overwritten"):
        pack(stopped, tmp_path / "mine", PART)
    pack(stopped, tmp_path / "parts", PART)
    with pytest.raises(ConfigError, match="mine is not empty, and nothing is overwritten"):
        unpack(tmp_path / "parts", tmp_path / "mine")
    with pytest.raises(ConfigError, match="file is a file, and nothing is overwritten"):
        unpack(tmp_path / "parts", tmp_path / "mine" / "file")
    assert files_of(tmp_path / "mine") == {"file"}
    (tmp_path / "empty").mkdir()
    unpack(tmp_path / "parts", tmp_path / "empty")
    assert reopen(tmp_path / "empty").state.round == 3


def test_a_damaged_run_is_not_packed(stopped, tmp_path):
    layers = sorted((stopped / "clients").rglob("*.safetensors"))
    layers[0].write_bytes(layers[0].read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match=str(layers[0])):
        pack(stopped, tmp_path / "parts", PART)
    (stopped / "journal.jsonl").write_text("")
    with pytest.raises(CheckpointError, match=r"journal\.jsonl was cut or altered"):
        pack(stopped, tmp_path / "parts", PART)
    with pytest.raises(CheckpointError, match="there is no run in"):
        pack(tmp_path, tmp_path / "parts", PART)
    assert not (tmp_path / "parts").exists()


def test_a_damaged_checkpoint_is_passed_over_with_a_note(stopped, tmp_path):
    (stopped / "checkpoints" / "round-000003" / "state.json").write_text("{")
    packed = pack(stopped, tmp_path / "parts", PART)
    assert packed.round == 2
    assert "went back to the checkpoint of round 2" in packed.notes


def test_a_run_that_another_process_plays_is_not_packed(stopped, tmp_path):
    with folder_lock(stopped), pytest.raises(CheckpointError, match="another process is working on"):
        pack(stopped, tmp_path / "parts", PART)


def forged(stopped, tmp_path, change):
    """Pack a run and change what the parts say of it, with right digests everywhere."""
    pack(stopped, tmp_path / "parts", PART)
    stream = read_parts(tmp_path / "parts")
    manifest, rest = pack_module._read_manifest(memoryview(stream))
    files = [{"path": file.path, "bytes": file.bytes, "digest": file.digest} for file in manifest.files]
    document = {**vars(manifest), "files": files, "pieces": [list(piece) for piece in manifest.pieces]}
    change(document)
    text = json.dumps(document).encode()
    short = squeeze(text, 1)
    lengths = b"".join(len(data).to_bytes(8, "little") for data in (text, short))
    shutil.rmtree(tmp_path / "parts")
    write_parts(parts_of(lengths + short + bytes(rest), PART), tmp_path / "parts")
    return tmp_path / "parts"


@pytest.mark.parametrize(
    "path",
    ["../escaped", "clients/../../escaped", "/tmp/escaped", "clients//x", "clients/./x", "escaped", "clients/a\\b", ""],
)
def test_a_path_that_leads_out_of_the_run_is_refused(stopped, tmp_path, path):
    parts = forged(stopped, tmp_path, lambda document: document["files"][0].update(path=path))
    with pytest.raises(CheckpointError, match=r"is no run, or was altered .* is no file of a run"):
        unpack(parts, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert not list(tmp_path.rglob("escaped"))


CHANGES = {
    "a name that is a path": lambda d: d.update(name="../run"),
    "no name": lambda d: d.update(name=".."),
    "a field too many": lambda d: d.update(more=1),
    "a field too few": lambda d: d.pop("round"),
    "a number as text": lambda d: d.update(round="3"),
    "a file twice": lambda d: d["files"].append(d["files"][0]),
    "another digest": lambda d: d["files"][1].update(digest="ab"),
    "another length": lambda d: d["files"][1].update(bytes=5),
    "a negative length": lambda d: d["pieces"][0].__setitem__(0, -1),
    "a piece like itself": lambda d: d["pieces"][0].__setitem__(2, 0),
    "a piece like one before the first": lambda d: d["pieces"][3].__setitem__(2, -1),
    "a piece like one of another length": lambda d: d["pieces"][1].__setitem__(2, 0),
    "another width": lambda d: d["pieces"][0].__setitem__(1, 3),
    "a shorter piece": lambda d: d["pieces"][0].__setitem__(3, d["pieces"][0][3] - 1),
    "a piece too few": lambda d: d["pieces"].pop(),
    "no table": lambda d: d.update(files={}),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_what_nobody_packs_is_refused(stopped, tmp_path, change):
    parts = forged(stopped, tmp_path, change)
    with pytest.raises(CheckpointError, match="is no run, or was altered"):
        unpack(parts, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_another_version_is_noted(stopped, tmp_path):
    parts = forged(stopped, tmp_path, lambda document: document.update(version="9.9"))
    assert "9.9" in unpack(parts, tmp_path / "run").notes[0]


def test_a_full_disk_leaves_no_half_of_a_run(stopped, tmp_path, monkeypatch):
    pack(stopped, tmp_path / "parts", PART)
    real, seen = os.fsync, []

    def full(number):
        seen.append(number)
        if len(seen) > 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(number)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match=r"cannot write .*run: No space left on device\. Make room there"):
            unpack(tmp_path / "parts", tmp_path / "there" / "run")
    assert list((tmp_path / "there").iterdir()) == []
    unpack(tmp_path / "parts", tmp_path / "there" / "run")


def test_a_kill_leaves_no_half_of_a_run(stopped, tmp_path, monkeypatch, killed):
    pack(stopped, tmp_path / "parts", PART)
    with monkeypatch.context() as patch:
        patch.setattr(pack_module, "sync_folder", lambda _: (_ for _ in ()).throw(killed))
        with pytest.raises(killed):
            unpack(tmp_path / "parts", tmp_path / "run")
    assert not (tmp_path / "run").exists()
    unpack(tmp_path / "parts", tmp_path / "run")
    assert reopen(tmp_path / "run").state.round == 3
    assert not list(tmp_path.glob(".run*"))


def test_the_digests_of_the_parts_are_those_of_their_files(stopped, tmp_path):
    (part,) = pack(stopped, tmp_path / "parts", PART).parts
    line, _, data = part.read_bytes().partition(b"\n")
    assert json.loads(line)["digest"] == file_hash(data).hexdigest()
