"""`fedprophet data` as a person and as a program call it."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from fedprophet.cli.data import data_app
from fedprophet.data import caltech256, cifar10
from fedprophet.errors import DataError

NAMES = [f"data_batch_{number}.bin" for number in range(1, 6)]


def call(*arguments):
    return CliRunner().invoke(data_app, [str(argument) for argument in arguments], env={"TERM": "dumb"})


def document(*arguments, code=0):
    result = call(*arguments, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


@pytest.fixture
def root(tmp_path, monkeypatch):
    """CIFAR-10 with ten records in each file, one of each class."""
    monkeypatch.setattr(cifar10, "RECORDS", 10)
    place = tmp_path / "cifar-10-batches-bin"
    place.mkdir()
    records = np.zeros((10, 3073), dtype=np.uint8)
    records[:, 0] = np.arange(10)
    for name in [*NAMES, "test_batch.bin"]:
        (place / name).write_bytes(records.tobytes())
    return tmp_path


@pytest.fixture
def images(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for number in range(6 if name == "cat" else 10):
            image.new("RGB", (4, 4)).save(tmp_path / name / f"{number}.png")
    return tmp_path


def test_check_of_what_is_complete(root):
    place = root / "cifar-10-batches-bin"
    answer = document("check", "cifar10", "--root", root)
    assert answer == {
        "dataset": "cifar10",
        "root": str(root),
        "found": str(place),
        "complete": True,
        "problems": [],
        "train": 50,
        "test": 10,
        "classes": 10,
        "images_per_class": dict.fromkeys(cifar10.NAMES, 6),
        "files": dict.fromkeys([*NAMES, "test_batch.bin"], "10 images"),
        "notes": [],
        "advice": None,
    }
    result = call("check", "cifar10", "--root", root)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == f"cifar10: complete in {place}"
    assert lines[1:7] == [f"  {name}: 10 images" for name in [*NAMES, "test_batch.bin"]]
    assert lines[7:] == [
        "50 training images, 10 test images",
        "10 classes with 6 images each: airplane, automobile, bird, cat, deer, dog, frog, horse, ship, truck",
    ]


def test_check_says_what_is_missing(root):
    place = root / "cifar-10-batches-bin"
    (place / NAMES[1]).unlink()
    (place / NAMES[3]).write_bytes(b"\0" * 3073)
    answer = document("check", "cifar10", "--root", root, code=2)
    assert not answer["complete"]
    assert [problem[:32] for problem in answer["problems"]] == [
        "data_batch_2.bin is missing",
        "data_batch_4.bin is truncated: i",
    ]
    assert (answer["train"], answer["test"]) == (30, 10)
    assert f"fedprophet data get cifar10 --root {root}" in answer["advice"]
    result = call("check", "cifar10", "--root", root)
    assert result.exit_code == 2
    assert result.stdout.startswith(f"cifar10: not complete in {place}\n")
    assert result.stdout.count("data_batch_2.bin") == 1
    assert "  data_batch_2.bin: is missing\n" in result.stdout
    assert result.stdout.rstrip().endswith(f"fedprophet data get cifar10 --root {root}")


@pytest.mark.parametrize("name", ["cifar10", "caltech256"])
def test_check_of_an_empty_root(tmp_path, name):
    answer = document("check", name, "--root", tmp_path / "none", code=2)
    assert (answer["found"], answer["train"], answer["classes"]) == (None, 0, 0)
    assert answer["problems"] == [f"there is no data in {tmp_path / 'none'}"]
    assert call("check", name, "--root", tmp_path / "none").stdout.startswith(f"{name}: not complete\n")


def test_check_of_a_folder(images):
    answer = document("check", "folder", "--root", images, "--size", "8")
    assert (answer["train"], answer["test"], answer["images_per_class"]) == (13, 3, {"cat": 6, "dog": 10})
    assert answer["notes"] == [
        "not decoded to 8×8 yet: the first run does that. Of each image only the header was read"
    ]
    assert document("check", "folder", "--root", images, "--test-per-class", "4")["test"] == 8
    answer = document("check", "folder", "--root", images, "--test-per-class", "6", code=2)
    assert answer["problems"][0].startswith("class cat has 6 readable images and 6 of each class are for test")
    assert "2 classes with 6 to 10 images each: cat, dog" in call("check", "folder", "--root", images).stdout


def test_digits_are_always_there():
    answer = document("check", "digits")
    assert (answer["complete"], answer["train"], answer["test"], answer["classes"]) == (True, 1437, 360, 10)
    assert sum(answer["images_per_class"].values()) == 1797
    result = call("get", "digits")
    assert result.exit_code == 0
    assert "nothing to fetch" in result.stdout


def test_get(root, tmp_path, monkeypatch):
    assert call("get", "cifar10", "--root", root).stdout == f"cifar10 is there already: {root}/cifar-10-batches-bin\n"
    asked = []
    monkeypatch.setattr(cifar10, "fetch", lambda remote, where, otherwise: asked.append(where) or where / remote.name)
    monkeypatch.chdir(tmp_path)
    result = call("get", "cifar10")
    assert result.exit_code == 0
    assert result.stdout.startswith("fetched and verified data/cifar-10-binary.tar.gz")
    assert [str(where) for where in asked] == ["data"]


def test_get_without_a_network(tmp_path, monkeypatch):
    for module, name in ((cifar10, "ARCHIVE"), (caltech256, "ARCHIVE")):
        remote = getattr(module, name)
        monkeypatch.setattr(module, name, type(remote)(f"http://127.0.0.1:9/{remote.name}", "md5", remote.digest))
    monkeypatch.setenv("no_proxy", "*")
    for name, file in (("cifar10", "cifar-10-binary.tar.gz"), ("caltech256", "256_ObjectCategories.tar")):
        result = call("get", name, "--root", tmp_path)
        assert isinstance(result.exception, DataError)
        assert f"cannot fetch http://127.0.0.1:9/{file}" in str(result.exception)
        assert "Without a network: put " in str(result.exception)
        assert "\n" not in str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["check", "cifar11"], "unknown dataset 'cifar11'. Did you mean 'cifar10'?"),
        (["get", "cifar11"], "unknown dataset 'cifar11'. Did you mean 'cifar10'?"),
        (["get", "folder"], "there is nothing to fetch"),
        (["check", "folder"], "give it as data.root (--root)"),
        (["check", "cifar10", "--size", "64"], "data.options: unknown option of cifar10 'size'"),
        (
            ["check", "folder", "--root", ".", "--size", "-1"],
            "data.options.size must be a positive whole number",
        ),
    ],
)
def test_errors(arguments, text):
    result = call(*arguments)
    assert isinstance(result.exception, DataError), result.output
    assert text in str(result.exception)
    assert result.stdout == ""


@pytest.mark.parametrize("command", ["check", "get"])
def test_help_has_an_example(command):
    result = call(command, "--help")
    assert result.exit_code == 0
    assert f"fedprophet data {command} cifar10 --root data" in " ".join(result.stdout.split())
