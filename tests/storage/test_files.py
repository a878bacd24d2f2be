"""Files that are whole or not there at all."""

import os
import stat

import pytest
import torch
from safetensors.torch import load

from fedprophet.errors import CheckpointError
from fedprophet.storage.files import parse_json, tensor_pieces, write_atomic


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
