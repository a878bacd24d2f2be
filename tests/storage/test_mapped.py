"""Tensors in files: what they hold, where their memory is, and what a full disk leads to."""

import errno
import os
import tempfile
from pathlib import Path

import pytest
import torch

from fedprophet.errors import DataError
from fedprophet.storage.mapped import copied_to_file, empty_in_file


def _mappings(tensor: torch.Tensor) -> list[list[str]]:
    """Return what the system knows of the memory of a tensor: address, flags, …, file."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    ranges = [(tuple(int(end, 16) for end in line[0].split("-")), line) for line in lines]
    return [line for (first, last), line in ranges if first <= tensor.data_ptr() < last]


def test_the_memory_is_a_shared_mapping_of_a_file_that_has_no_name(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    original = torch.arange(6.0).view(2, 3)
    copy = copied_to_file(original)
    assert torch.equal(copy, original)
    assert copy.dtype == original.dtype
    (mapping,) = _mappings(copy)
    assert mapping[1] == "rw-s"
    assert mapping[5].startswith(str(tmp_path))
    assert mapping[6] == "(deleted)"
    assert list(tmp_path.iterdir()) == []
    copy += 1
    assert torch.equal(copy, original + 1)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,)])
def test_every_shape(shape: tuple[int, ...]) -> None:
    made = empty_in_file(shape, torch.int64)
    assert made.shape == shape
    assert made.dtype == torch.int64
    assert not made.any()


def test_a_parameter_keeps_nothing_of_its_graph() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    assert not copied_to_file(parameter).requires_grad


def test_a_full_disk_is_an_error_and_not_the_end_of_the_process(monkeypatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DataError, match=r"cannot write 40 bytes .*No space left on device.*TMPDIR"):
        empty_in_file((10,), torch.float32)
