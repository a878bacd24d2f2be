"""Which command goes on with a run."""

import os
import stat

import pytest
import torch
from safetensors.torch import load

from fedprophet.errors import CheckpointError
from fedprophet.settings.values import CUSTOM
from fedprophet.storage.files import OWN, how_to_resume, in_python, is_deployed, parse_json, tensor_pieces, write_atomic


@pytest.mark.parametrize("where", ["pilot/runs/run 1", "alone/run 1"])
def test_how_a_deployed_run_goes_on(tmp_path, where):
    path = tmp_path / where
    path.mkdir(parents=True)
    assert how_to_resume(path) == f"fedprophet train --resume '{path}'"
    (tmp_path / "pilot").mkdir(exist_ok=True)
    (tmp_path / "pilot" / "deploy.toml").touch()
    (path / "flower.json").write_text('{"run": "ab", "deployed": true}')
    assert (
        how_to_resume(path)
        == {
            "pilot/runs/run 1": f"fedprophet deploy run {tmp_path}/pilot --name 'run 1' --resume",
            "alone/run 1": f"flwr run APP SERVER --run-config 'out=\"{path}\" resume=true'",
        }[where]
    )
    (path / "flower.json").write_text('{"run": "ab", "deployed": false}')
    assert how_to_resume(path) == f"fedprophet train --resume '{path}'"
    (path / "flower.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"flower\.json is damaged. Put it back from a copy"):
        is_deployed(path)


def test_a_pilots_run_is_known_before_its_first_task(tmp_path):
    (tmp_path / "deploy.toml").touch()
    assert "deploy run" in how_to_resume(tmp_path / "runs" / "run-1")
    assert "train --resume" in how_to_resume(tmp_path / "other" / "run-1")


@pytest.mark.parametrize(
    ("model", "data", "again"),
    [("custom", "custom", "model=…, data=…"), ("custom", "digits", "model=…"), ("vgg-small", "custom", "data=…")],
)
def test_a_run_of_ones_own_model_or_data_goes_on_in_python(tmp_path, model, data, again):
    path = tmp_path / "run 1"
    path.mkdir()
    (path / "config.toml").write_text(f'[model]\nname = "{model}"\n[data]\nname = "{data}"\n')
    assert how_to_resume(path) == f"fedprophet.resume('{path}', {again})"
    assert how_to_resume(path, round=3) == f"fedprophet.resume('{path}', from_round=3, {again})"
    assert (
        in_python("evaluate", path, "clean", samples=2) == f"fedprophet.evaluate('{path}', 'clean', samples=2, {again})"
    )


@pytest.mark.parametrize("text", ['[model]\nname = "cnn3"\n[data]\nname = "digits"\n', "", "model = 3", "[", "\x00"])
def test_other_runs_go_on_by_a_command(tmp_path, text):
    (tmp_path / "config.toml").write_text(text)
    assert OWN == CUSTOM
    assert in_python("evaluate", tmp_path) == ""
    assert how_to_resume(tmp_path) == f"fedprophet train --resume {tmp_path}"


def test_what_is_no_file_is_not_replaced_by_one(tmp_path):
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    for path in (pipe, link):
        with pytest.raises(CheckpointError, match="it is a device or a pipe"):
            write_atomic(path, b"model")
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert link.is_symlink()


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, b"\xff"])
def test_what_is_no_json_is_a_value_error(text):
    with pytest.raises(ValueError):  # noqa: PT011
        parse_json(text)


def test_pieces_make_up_a_safetensors_file_without_a_copy_of_the_tensors():
    tensors = {
        "flag": torch.tensor([True, False]),
        "half": torch.arange(3, dtype=torch.bfloat16),
        "count": torch.tensor(7),
        "none": torch.empty(0, 4),
        "turned": torch.arange(6.0).reshape(2, 3).T,
        "whole": torch.arange(6.0).reshape(2, 3),
    }
    pieces = tensor_pieces(tensors)
    read = load(b"".join(pieces))
    assert read.keys() == tensors.keys()
    for name, value in tensors.items():
        assert (read[name].dtype, read[name].shape) == (value.dtype, value.shape)
        assert read[name].equal(value)
    tensors["whole"].fill_(9)
    assert load(b"".join(pieces))["whole"].equal(tensors["whole"])
    assert load(b"".join(tensor_pieces({}))) == {}
