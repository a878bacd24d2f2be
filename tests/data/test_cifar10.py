"""CIFAR-10's binary format, with small files of the same layout."""

import io
import tarfile

import numpy as np
import pytest
import torch

from fedprophet.data import cifar10, load
from fedprophet.errors import DataError

COUNT = 4
FOLDER = "cifar-10-batches-bin"
FILES = ["data_batch_1.bin", "data_batch_2.bin", "data_batch_3.bin", "data_batch_4.bin", "data_batch_5.bin"]


def record(number: int, label: int) -> bytes:
    """A record whose red plane counts rows, whose green plane counts columns, and whose blue plane is its number."""
    rows, columns = np.divmod(np.arange(1024), 32)
    planes = np.concatenate([rows, columns, np.full(1024, number)])
    return bytes([label]) + planes.astype(np.uint8).tobytes()


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(cifar10, "RECORDS", COUNT)


@pytest.fixture
def root(tmp_path, small):
    """A root with five training files of four records, numbered 0 … 19, and a test file, numbered 100 … 103."""
    folder = tmp_path / FOLDER
    folder.mkdir()
    for place, name in enumerate(FILES):
        numbers = range(COUNT * place, COUNT * (place + 1))
        (folder / name).write_bytes(b"".join(record(number, number % 10) for number in numbers))
    (folder / "test_batch.bin").write_bytes(b"".join(record(100 + n, n) for n in range(COUNT)))
    (folder / "batches.meta.txt").write_text("airplane\n")
    return tmp_path


def packed(root, prefix=f"{FOLDER}/"):
    """Put the files into the archive, and remove them."""
    with tarfile.open(root / "cifar-10-binary.tar.gz", "w:gz") as tar:
        for path in sorted((root / FOLDER).iterdir()):
            tar.add(path, prefix + path.name)
            path.unlink()
    (root / FOLDER).rmdir()
    return root / "cifar-10-binary.tar.gz"


def test_planes_rows_labels_and_the_order_of_files(root):
    dataset = load("cifar10", root)
    images = dataset.train.fetch(torch.arange(20))
    assert images.dtype == torch.float32
    assert images.shape == (20, 3, 32, 32)
    assert images[:, 2, 0, 0].mul(255).tolist() == pytest.approx(list(range(20)))
    assert float(images[7, 0, 5, 9]) == pytest.approx(5 / 255)
    assert float(images[7, 1, 5, 9]) == pytest.approx(9 / 255)
    assert dataset.train.labels.tolist() == [n % 10 for n in range(20)]
    assert dataset.test.fetch(torch.tensor([3]))[0, 2, 0, 0].item() == pytest.approx(103 / 255)
    assert dataset.test.labels.tolist() == [0, 1, 2, 3]
    assert (dataset.name, dataset.classes, dataset.shape) == ("cifar10", 10, (3, 32, 32))


def test_there_are_ten_classes_whatever_the_labels(root):
    for name in FILES:
        (root / FOLDER / name).write_bytes(record(0, 0) + record(1, 3) * 3)
    assert load("cifar10", root).classes == 10


@pytest.mark.parametrize("prefix", [f"{FOLDER}/", f"./{FOLDER}/"])
def test_the_same_from_the_folder_itself_and_from_the_archive(root, prefix):
    digest = load("cifar10", root).digest()
    assert load("cifar10", root / FOLDER).digest() == digest
    archive = packed(root, prefix=prefix)
    assert load("cifar10", root).digest() == digest
    assert load("cifar10", archive).digest() == digest
    assert list(root.iterdir()) == [archive]  # nothing was unpacked


def test_a_complete_archive_beats_a_folder_that_is_not(root):
    digest = load("cifar10", root).digest()
    archive = packed(root)
    (root / FOLDER).mkdir()
    (root / FOLDER / FILES[0]).write_bytes(b"1")
    assert load("cifar10", root).digest() == digest
    assert cifar10.check(root).found == archive


def test_real_sizes():
    assert cifar10.RECORDS * cifar10.RECORD == 30_730_000
    assert cifar10.ARCHIVE.digest == "c32a1d4ab5d03f1284b67883e8d87530"
    assert cifar10.ARCHIVE.name == "cifar-10-binary.tar.gz"


def test_files_of_the_real_size(tmp_path):
    for name in [*FILES, "test_batch.bin"]:
        with (tmp_path / name).open("wb") as file:
            file.truncate(30_730_000 - (name == FILES[4]))
    findings = cifar10.check(tmp_path)
    assert (findings.train, findings.test, findings.images["airplane"]) == (40_000, 10_000, 50_000)
    assert findings.problems == (
        "data_batch_5.bin is truncated: it has 30729999 bytes instead of 30730000 (10000 records of 3073)",
    )


# ---------------------------------------------------------------- what is wrong


def missing(path):
    path.unlink()


def short(path):
    path.write_bytes(path.read_bytes()[:-1])


def long(path):
    path.write_bytes(path.read_bytes() + b"\0")


def labelled(path):
    path.write_bytes(record(0, 9) + record(1, 10) + path.read_bytes()[2 * 3073 :])


@pytest.mark.parametrize("name", [FILES[2], "test_batch.bin"])
@pytest.mark.parametrize("in_archive", [False, True])
@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (missing, "is missing"),
        (short, "is truncated: it has 12291 bytes instead of 12292 (4 records of 3073)"),
        (long, "is too long: it has 12293 bytes instead of 12292"),
        (labelled, "is not of CIFAR-10: record 1 has label 10, labels go from 0 to 9"),
    ],
)
def test_a_file_that_is_not_right_is_named(root, name, in_archive, spoil, text):
    spoil(root / FOLDER / name)
    place = packed(root) if in_archive else root / FOLDER
    with pytest.raises(DataError) as caught:
        load("cifar10", root)
    assert str(caught.value).startswith(f"cifar10: {place} is not complete: {name} {text}")
    assert "fedprophet data get cifar10 --root" in str(caught.value)
    assert "\n" not in str(caught.value)
    findings = cifar10.check(root)
    assert findings.found == place
    assert findings.problems[0].startswith(f"{name} {text}")
    assert (findings.train, findings.test) == ((20, 0) if name == "test_batch.bin" else (16, 4))
    assert findings.files[FILES[0]] == "4 images"
    assert text in findings.files[name]


def test_a_long_file_is_not_read(root):
    with (root / FOLDER / FILES[0]).open("wb") as file:
        file.truncate(10**12)  # more than any memory; it takes no room on the disk
    with pytest.raises(DataError, match="is too long"):
        load("cifar10", root)


def test_the_names_of_classes_may_be_missing(root):
    (root / FOLDER / "batches.meta.txt").unlink()
    assert cifar10.check(root).complete


@pytest.mark.parametrize("cut", [20, 200])
def test_an_archive_that_breaks_off(root, cut):
    archive = packed(root)
    archive.write_bytes(archive.read_bytes()[:-cut])
    with pytest.raises(DataError, match=r"cifar-10-binary\.tar\.gz is damaged or not whole"):
        load("cifar10", root)


def test_an_archive_that_is_none(root):
    packed(root).write_bytes(b"<html>not found</html>" * 40)
    findings = cifar10.check(root)
    assert not findings.complete
    assert "is damaged or not whole" in findings.problems[0]


def test_a_link_in_an_archive_is_not_followed(root, tmp_path):
    outside = tmp_path / "outside.bin"
    outside.write_bytes(b"".join(record(n, n) for n in range(COUNT)))
    archive = packed(root)
    with tarfile.open(archive) as tar:
        contents = {m.name: tar.extractfile(m).read() for m in tar if m.isreg()}
    with tarfile.open(archive, "w:gz") as tar:
        for name, content in contents.items():
            entry = tarfile.TarInfo(name)
            if name.endswith(FILES[0]):
                entry.type, entry.linkname = tarfile.SYMTYPE, str(outside)
                tar.addfile(entry)
            else:
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
    assert cifar10.check(root).problems == (f"{FILES[0]} is missing",)


def test_only_the_folder_of_the_binary_version_counts_in_an_archive(root):
    packed(root, prefix="../")
    assert cifar10.check(root).problems[0] == f"{FILES[0]} is missing"


@pytest.mark.parametrize("exists", [True, False])
def test_a_root_without_data_says_what_to_put_where(tmp_path, exists):
    root = tmp_path if exists else tmp_path / "nothing"
    with pytest.raises(DataError) as caught:
        load("cifar10", root)
    text = str(caught.value)
    assert text.startswith(f"cifar10: there is no data in {root}. Put cifar-10-binary.tar.gz or the folder {FOLDER}")
    assert f"fedprophet data get cifar10 --root {root}" in text
    assert "\n" not in text


def test_the_pickled_version_is_recognised_and_not_read(tmp_path):
    (tmp_path / "cifar-10-batches-py").mkdir()
    with pytest.raises(DataError, match="cifar-10-batches-py is the Python version, which is not read"):
        load("cifar10", tmp_path)


def test_no_root_means_the_folder_data(root, monkeypatch):
    expected = load("cifar10", root).digest()
    (root / FOLDER).rename(root / "moved")
    (root / "data").mkdir()
    (root / "moved").rename(root / "data" / FOLDER)
    monkeypatch.chdir(root)
    assert load("cifar10").digest() == expected


def test_options_of_image_folders_are_refused(root):
    with pytest.raises(DataError, match=r"data\.options: unknown option of cifar10 'size'\. Known: none"):
        load("cifar10", root, size=64)


# ---------------------------------------------------------------- get


def test_get_fetches_nothing_that_is_there(root, monkeypatch):
    monkeypatch.setattr(cifar10, "fetch", None)
    assert cifar10.get(root) == f"cifar10 is there already: {root / FOLDER}"


def test_get_fetches_the_archive(root, monkeypatch):
    asked = []
    missing(root / FOLDER / FILES[0])

    def fetch(remote, folder, otherwise):
        asked.append((remote.url, folder, otherwise))
        return folder / remote.name

    monkeypatch.setattr(cifar10, "fetch", fetch)
    assert "fetched and verified" in cifar10.get(root)
    ((url, folder, otherwise),) = asked
    assert url == "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
    assert folder == root
    assert otherwise.startswith("Without a network: put cifar-10-binary.tar.gz")
