"""A run's folder that was damaged: what would lead to another model or result is refused, the rest is made again."""

import json
import os
import shutil
from collections import defaultdict

import pytest
import torch
from safetensors.torch import load

from fedprophet.data.dataset import from_tensors
from fedprophet.engines import make_engine
from fedprophet.errors import CheckpointError
from fedprophet.messages.modules import digest
from fedprophet.runs.export import write_model
from fedprophet.runs.observer import Observer
from fedprophet.runs.play import play
from fedprophet.runs.run import RunStoppedError, open_to_read, reopen, start
from fedprophet.storage.files import tensors_to_bytes

ANEW = "Put it back from a copy, or start the run anew"


def flip(file, position):
    whole = bytearray(file.read_bytes())
    whole[position] ^= 1
    file.write_bytes(whole)


class Notes(Observer):
    def __init__(self):
        self.notes = []

    def note(self, text):
        self.notes.append(text)


# The clients' own layers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("open_", [reopen, open_to_read])
def test_lost_layers_are_missed_before_anything_is_computed(stopped, open_):
    files = sorted((stopped / "clients").rglob("*.safetensors"))
    kept = files[0].read_bytes()
    files[0].unlink()
    with pytest.raises(CheckpointError, match=rf"missing: {files[0]}\. .*Put back {stopped / 'clients'} from a copy"):
        open_(stopped)
    files[0].write_bytes(kept)
    shutil.rmtree(stopped / "clients")
    with pytest.raises(CheckpointError, match=rf"missing: {files[0]} and {len(files) - 1} other files\. "):
        open_(stopped)


def altered_bit(file):
    flip(file, -1)


def altered_value(file):
    """A sound safetensors file, in which somebody has changed a number, the digest in its header included."""
    tensors, versions = load(file.read_bytes()), defaultdict(dict)
    for name, value in tensors.items():
        if name.endswith("running_var"):
            value += 1
        version, _, layer = name.partition("/")
        versions[version][layer] = value
    digests = " ".join(map(digest, versions.values()))
    file.write_bytes(tensors_to_bytes(tensors, {"versions": " ".join(versions), "digests": digests}))


def without_layers(file):
    file.write_bytes(tensors_to_bytes({}, {"versions": "", "digests": ""}))


@pytest.mark.parametrize("damage", [altered_bit, altered_value, without_layers])
def test_altered_layers_are_refused(stopped, tmp_path, damage):
    file = sorted((stopped / "clients").rglob("*.safetensors"))[1]
    damage(file)
    with pytest.raises(CheckpointError, match=str(file)) as caught:
        play(reopen(stopped))
    assert ANEW in str(caught.value)
    with pytest.raises(CheckpointError, match=str(file)):
        write_model(open_to_read(stopped), tmp_path / "model.safetensors")
    assert not (tmp_path / "model.safetensors").exists()


def test_layers_of_an_earlier_copy_are_refused(tiny, small, stop, tmp_path):
    """A backup of clients/ from the round before is not what the newest checkpoint is about."""
    path = tmp_path / "run"
    everybody = tiny({**small, "population.clients": 6, "population.cohort": 6})
    with pytest.raises(RunStoppedError):
        play(start(everybody, path), stop(after_round=1))
    shutil.copytree(path / "clients", tmp_path / "copy")
    with pytest.raises(RunStoppedError):
        play(reopen(path), stop(after_round=2))
    shutil.rmtree(path / "clients")
    shutil.copytree(tmp_path / "copy", path / "clients")
    with pytest.raises(CheckpointError, match=r"does not hold the layers that client \d+ had after round 2"):
        play(reopen(path))


# The journal ---------------------------------------------------------------------------------------------------------


def cut(file):
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:-1]))


def edited(file):
    file.write_text(file.read_text().replace('"round":2', '"round":2 ', 1))


def emptied(file):
    os.truncate(file, 0)


def deleted(file):
    file.unlink()


def without_first(file):
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[1:]))


DAMAGE = [cut, edited, emptied, deleted, without_first]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_journal_is_refused_but_the_model_can_still_be_read(stopped, damage):
    damage(stopped / "journal.jsonl")
    with pytest.raises(CheckpointError, match=rf"journal\.jsonl was cut or altered.*{ANEW}"):
        reopen(stopped)
    (note,) = open_to_read(stopped).notes
    assert "journal.jsonl was cut or altered: nothing here depends on it" in note


def test_lines_behind_the_checkpoint_do_not_matter_whatever_they_are(stopped, contents, undisturbed):
    with (stopped / "journal.jsonl").open("ab") as journal:
        journal.write(b'{"round":4,"forged":true}\nnonsense\n{"round":5}\n{"rou')
    play(reopen(stopped))
    assert contents(stopped) == undisturbed


@pytest.mark.parametrize("damage", [*DAMAGE, lambda file: flip(file, 3)])
def test_damaged_timings_are_noted_and_the_run_goes_on(stopped, contents, undisturbed, damage):
    damage(stopped / "timings.jsonl")
    watcher = Notes()
    play(reopen(stopped), watcher)
    assert "timings.jsonl was cut or altered" in watcher.notes[0]
    same = contents(stopped)
    assert all(same[name] == undisturbed[name] for name in ("journal.jsonl", "model.safetensors"))
    assert reopen(stopped).notes == (), "the next checkpoint knows them as they are"


# Small files ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [None, "", "{", "[]", "3", "{}", '{"dataset": "ab"}', "[" * 100_000])
def test_inputs_are_written_again_from_the_checkpoint(stopped, contents, undisturbed, text):
    file = stopped / "inputs.json"
    before = file.read_bytes()
    file.unlink()
    if text is not None:
        file.write_text(text)
    run = reopen(stopped)
    assert run.notes == (f"{file} was lost or altered: it is written again from the checkpoint",)
    play(run)
    assert file.read_bytes() == before
    assert contents(stopped) == undisturbed


def test_inputs_of_other_data_do_not_let_other_data_in(stopped):
    """Whoever replaces the data and inputs.json with it is still found out."""
    images, labels = torch.rand(400, 1, 8, 8), torch.arange(400) % 10
    other = from_tensors(images, labels, images[:50], labels[:50])
    file = stopped / "inputs.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "dataset": other.digest()}))
    with pytest.raises(CheckpointError, match="was started with a different dataset"):
        play(reopen(stopped, dataset=other))


def test_the_identity_of_a_run_on_other_machines_is_written_again(tiny, small, stop, tmp_path):
    """Without it, the run would go on here, with layers of clients that never trained."""
    path, identity = tmp_path / "run", '{"run": "ab", "deployed": true}\n'
    run = start(tiny(small), path)
    run.files.flower.write_text(identity)
    with pytest.raises(RunStoppedError):
        play(run, stop(after_round=1))
    run.files.flower.unlink()
    with pytest.raises(CheckpointError, match=r"flower\.json was lost or altered\. It is written again"):
        open_to_read(path)
    assert run.files.flower.read_text() == identity
    with pytest.raises(CheckpointError, match="on other machines"):
        open_to_read(path)


# A finished run ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", [altered_bit, emptied])
def test_an_altered_model_is_made_again(finished, contents, undisturbed, tmp_path, damage):
    damage(finished / "model.safetensors")
    (note,) = open_to_read(finished).notes
    assert "model.safetensors was altered" in note
    write_model(open_to_read(finished), tmp_path / "exported")
    assert (tmp_path / "exported").read_bytes() == undisturbed["model.safetensors"], "it is made from the checkpoint"
    watcher = Notes()
    play(reopen(finished), watcher)
    assert "model.safetensors was altered: it is made again" in watcher.notes[0]
    assert contents(finished) == undisturbed


def test_an_altered_model_of_real_devices_is_refused(finished, tmp_path):
    (finished / "flower.json").write_text('{"run": "ab", "deployed": true}')
    write_model(open_to_read(finished), tmp_path / "exported")
    altered_bit(finished / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors was altered.*Put it back from a copy, or delete"):
        write_model(open_to_read(finished), tmp_path / "exported")
    with pytest.raises(CheckpointError, match=r"model\.safetensors was altered"):
        play(reopen(finished, engine=lambda parts: make_engine(parts)))
