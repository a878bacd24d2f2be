"""A content in several files: put together again in any order, and never if anything is wrong with them."""

import json
import random
import shutil

import pytest

from fedprophet.errors import CheckpointError
from fedprophet.storage.parts import LEAST_PART, parts_of, read_parts, write_parts

CONTENT = random.Random(0).randbytes(200_000)  # four parts


@pytest.fixture
def folder(tmp_path):
    write_parts(parts_of(CONTENT, LEAST_PART), tmp_path / "parts")
    return tmp_path / "parts"


def test_no_part_is_larger_than_it_may_be_and_together_they_are_the_content(folder):
    names = [f"part-{number:03d}.fedpack" for number in (1, 2, 3, 4)]
    assert sorted(path.name for path in folder.iterdir()) == names
    assert max(path.stat().st_size for path in folder.iterdir()) <= 65536
    assert read_parts(folder) == CONTENT


def test_names_order_and_copies_of_parts_do_not_matter(folder):
    (folder / "part-001.fedpack").rename(folder / "z.fedpack")
    shutil.copy(folder / "part-003.fedpack", folder / "part-003 (1).fedpack")
    (folder / "README").write_text("another file")
    assert read_parts(folder) == CONTENT


def test_missing_parts_are_named(folder):
    for number in (2, 4):
        (folder / f"part-{number:03d}.fedpack").unlink()
    with pytest.raises(CheckpointError, match=r"of the 4 parts, .*/parts lacks these: 2, 4\. Copy them"):
        read_parts(folder)


@pytest.mark.parametrize("position", [0, 10, 100, 400, 5000, -1])
def test_an_altered_part_is_named(folder, position):
    part = folder / "part-002.fedpack"
    content = bytearray(part.read_bytes())
    content[position] ^= 1
    part.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"part-002\.fedpack|do not make up"):
        read_parts(folder)


@pytest.mark.parametrize("size", [0, 5, 300, 40_000])
def test_a_part_that_was_cut_is_named(folder, size):
    part = folder / "part-002.fedpack"
    part.write_bytes(part.read_bytes()[:size])
    with pytest.raises(CheckpointError, match=r"part-002\.fedpack is damaged"):
        read_parts(folder)


def test_parts_of_two_contents_are_not_mixed(folder, tmp_path):
    write_parts(parts_of(CONTENT[::-1], LEAST_PART), tmp_path / "other")
    shutil.copy(tmp_path / "other" / "part-002.fedpack", folder / "part-002.fedpack")
    with pytest.raises(CheckpointError, match=r"part-001\.fedpack and part-002\.fedpack in .* are of two packed runs"):
        read_parts(folder)


def rewrite(file, **changes):
    line, _, data = file.read_bytes().partition(b"\n")
    file.write_bytes(json.dumps({**json.loads(line), **changes}).encode() + b"\n" + data)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"format": 2}, "has format 2, and this version of FedProphet reads 1"),
        ({"part": 0}, "is damaged"),
        ({"part": 9}, "is damaged"),
        ({"part": "1"}, "is damaged"),
        ({"parts": True}, "is damaged"),
        ({"whole": 3}, "is damaged"),
        ({"more": 3}, "is damaged"),
        ({"part": 2}, "lacks these: 1"),
    ],
)
def test_a_header_that_nobody_writes(folder, changes, said):
    rewrite(folder / "part-001.fedpack", **changes)
    with pytest.raises(CheckpointError, match=said):
        read_parts(folder)


def test_parts_that_are_each_whole_and_do_not_fit_together(folder):
    """Somebody has exchanged their numbers."""
    for number in (1, 2):
        rewrite(folder / f"part-{number:03d}.fedpack", part=3 - number)
    with pytest.raises(CheckpointError, match="do not make up a packed run"):
        read_parts(folder)


def test_a_folder_without_parts(tmp_path):
    with pytest.raises(CheckpointError, match=r"there is no part of a packed run in .*: they are called part-001"):
        read_parts(tmp_path)
    with pytest.raises(CheckpointError, match=r"cannot read .*: No such file"):
        read_parts(tmp_path / "nowhere")
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match=r"cannot read .*: Not a directory"):
        read_parts(tmp_path / "file")
