"""Tensors in files: what they hold, where their memory is, and what a full disk leads to."""

import errno
import os
import tempfile
from pathlib import Path

import pytest
import torch

from fedprophet.errors import TemporaryFileError
from fedprophet.storage import mapped
from fedprophet.storage.mapped import copied_to_file, empty_in_file, expect_chosen_folder, files_in_memory


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
    with pytest.raises(TemporaryFileError, match=r"cannot write 40 bytes .*No space left on device.*TMPDIR"):
        empty_in_file((10,), torch.float32)


def test_no_folder_for_temporary_files_is_an_error_too(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(TemporaryFileError, match=r"cannot write 40 bytes .*missing: No such file or directory\."):
        empty_in_file((10,), torch.float32)


def test_a_folder_that_is_not_there_is_not_exchanged_for_another_one(tmp_path, monkeypatch) -> None:
    (tmp_path / "file").touch()
    for wrong in ("missing", "file"):
        monkeypatch.setenv("TMPDIR", str(tmp_path / wrong))
        with pytest.raises(TemporaryFileError, match=rf"TMPDIR is .*{wrong}, which is no folder .*unset TMPDIR"):
            expect_chosen_folder()
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    expect_chosen_folder()
    monkeypatch.delenv("TMPDIR")
    expect_chosen_folder()


MOUNTS = r"""
/dev/root / ext4 rw,relatime 0 0
tmpfs /dev/shm tmpfs rw 0 0
tmpfs /mnt/my\040tmp tmpfs rw,nosuid 0 0
/dev/sdb /mnt/my\040tmp/disk xfs rw 0 0
none /ram ramfs rw 0 0
tmpfs /twice tmpfs rw 0 0
/dev/sdc /twice btrfs rw 0 0
""".lstrip()


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("/var/tmp", None),
        ("/dev/shm/mine", "tmpfs"),
        ("/dev/shm2", None),
        ("/mnt/my tmp", "tmpfs"),
        ("/mnt/my tmp/disk/tmp", None),
        ("/ram", "ramfs"),
        ("/twice", None),
    ],
)
def test_files_are_memory_by_the_innermost_file_system(tmp_path, monkeypatch, folder: str, kind: str | None) -> None:
    (tmp_path / "mounts").write_text(MOUNTS)
    monkeypatch.setattr(mapped, "MOUNTS", tmp_path / "mounts")
    monkeypatch.setattr(tempfile, "tempdir", folder)
    assert files_in_memory() == kind


def test_where_no_list_of_file_systems_is_nothing_is_said(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(mapped, "MOUNTS", tmp_path / "missing")
    assert files_in_memory() is None
