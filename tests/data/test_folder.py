"""Image folders: what counts as an image, how it is cut, which ones are for test, and the cache of decoded ones."""

import json
import os
import sys
import time
import warnings

import numpy as np
import pytest
import torch

from fedprophet.data import cache, folder, load
from fedprophet.errors import DataError

Image = pytest.importorskip("PIL.Image")


def save(path, pixels):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.asarray(pixels, dtype=np.uint8)).save(path)


def flat(path, *colour, side=8):
    """Write an image of one colour, which resizing does not change."""
    save(path, np.broadcast_to(np.array(colour, dtype=np.uint8), (side, side, 3)))


def everything(examples):
    return examples.fetch(torch.arange(len(examples)))


def reds(examples):
    """The red value of each image of one colour."""
    return everything(examples)[:, 0, 0, 0].mul(255).round().int().tolist()


def entries(place):
    """What a cache holds besides its lock."""
    return [path for path in place.iterdir() if path.name != ".lock"]


@pytest.fixture
def tree(tmp_path):
    """Two classes of ten images: the red value is 100 · class + number; names are not written in order."""
    for label, name in enumerate(("cat", "dog")):
        for number in reversed(range(10)):
            flat(tmp_path / "tree" / name / f"{number:02}.png", 100 * label + number, 7, 250 - number)
    return tmp_path / "tree"


@pytest.fixture
def decoded(monkeypatch):
    """The names of the files that are decoded."""
    seen = []
    original = folder.decode

    def decode(path, size):
        seen.append(path.name)
        return original(path, size)

    monkeypatch.setattr(folder, "decode", decode)
    return seen


# ---------------------------------------------------------------- the tree


def test_classes_and_images_by_name_and_the_first_fifth_for_test(tree):
    dataset = load("folder", tree, size=8)
    assert (dataset.name, dataset.classes, dataset.shape) == ("folder", 2, (3, 8, 8))
    assert reds(dataset.test) == [0, 1, 100, 101]
    assert dataset.test.labels.tolist() == [0, 0, 1, 1]
    assert reds(dataset.train) == [*range(2, 10), *range(102, 110)]
    assert dataset.train.labels.tolist() == [0] * 8 + [1] * 8
    assert everything(dataset.train)[0, :, 3, 5].mul(255).round().tolist() == [2, 7, 248]


def test_test_images_per_class(tree):
    assert reds(load("folder", tree, size=8, test_per_class=9).train) == [9, 109]
    with pytest.raises(DataError, match=r"class cat has 10 readable images and 10 of each class are for test: .* 11"):
        load("folder", tree, size=8, test_per_class=10)


def test_what_is_hidden_or_no_image_does_not_count(tree):
    for name in ("cat/.hidden.png", ".git/a.png", ".git/b.png", "top.png"):
        flat(tree / name, 200, 200, 200)
    (tree / "cat" / "notes.txt").write_text("nothing")
    (tree / "cat" / "nested.png").mkdir()
    (tree / "cat" / "greg").mkdir()
    flat(tree / "cat" / "greg" / "deeper.png", 200, 200, 200)
    assert len(folder.scan(tree).files) == 20
    dataset = load("folder", tree, size=8)
    assert (dataset.classes, dataset.names) == (2, ("cat", "dog"))


def test_suffixes_in_any_case(tree):
    for name in ("a.JPG", "b.jpeg", "c.PnG", "d.Jpg", "e.gif", "f.bmp"):
        flat(tree / "cat" / name, 10, 10, 10)
    found = [file.path.name for file in folder.scan(tree).files if file.label == 0]
    assert found == [f"{n:02}.png" for n in range(10)] + ["a.JPG", "b.jpeg", "c.PnG", "d.Jpg"]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda root: None, r"is not a folder\. Images belong into class folders"),
        (lambda root: root.mkdir(), "holds 0 class folders, at least 2 are needed"),
        (lambda root: flat(root / "a.png", 1, 1, 1), "holds 0 class folders"),
        (lambda root: flat(root / "only" / "a.png", 1, 1, 1), "holds 1 class folders"),
        (lambda root: [(root / n).mkdir(parents=True) for n in "ab"], r"the class folder .*a holds no JPEG or PNG"),
    ],
)
def test_a_root_without_images(tmp_path, make, text):
    root = tmp_path / "root"
    make(root)
    with pytest.raises(DataError, match=text):
        load("folder", root)
    findings = folder.check(root)
    assert not findings.complete
    assert len(findings.problems) == 1


def test_no_root():
    with pytest.raises(DataError, match=r"give it as data\.root"):
        load("folder")


@pytest.mark.parametrize("option", [{"size": 0}, {"size": -3}, {"size": True}, {"size": 2.5}, {"test_per_class": 0}])
def test_options_that_make_no_sense(tree, option):
    with pytest.raises(DataError, match=f"data.options.{next(iter(option))} must be a positive whole number"):
        load("folder", tree, **option)


# ---------------------------------------------------------------- pixels


def test_the_centre_is_cut_out_without_resizing_where_the_size_fits(tmp_path):
    # 32 · 256/224 = 36.57: an image whose shorter side is 37 keeps its pixels. (37 − 32) / 2 rounds to 2.
    rows, columns = np.mgrid[0:37, 0:51]
    save(tmp_path / "a.png", np.stack([rows, columns, rows + columns], axis=2))
    image = folder.decode(tmp_path / "a.png", 32)
    assert image.shape == (3, 32, 32)
    assert image.dtype == np.uint8
    assert image[0, :, 0].tolist() == list(range(2, 34))
    assert image[1, 0].tolist() == list(range(10, 42))  # (51 − 32) / 2 = 9.5 rounds to 10
    assert (image[2] == image[0] + image[1]).all()


@pytest.mark.parametrize("shape", [(300, 500), (500, 300), (120, 90), (33, 200), (256, 256)])
def test_resizing_to_256_and_cropping_224(tmp_path, shape):
    save(tmp_path / "a.png", np.random.default_rng(0).integers(0, 256, (*shape, 3)))
    short = min(shape)
    height, width = (256 * side // short for side in shape)
    whole = Image.open(tmp_path / "a.png").resize((width, height), Image.Resampling.BILINEAR)
    left, top = round((width - 224) / 2), round((height - 224) / 2)
    expected = np.asarray(whole.crop((left, top, left + 224, top + 224))).astype(int)
    found = folder.decode(tmp_path / "a.png", 224).transpose(1, 2, 0).astype(int)
    assert np.abs(found - expected).max() <= 1  # the two passes round between them, in either order


def test_a_strip_does_not_take_gigabytes(tmp_path):
    save(tmp_path / "a.png", np.full((1, 60_000, 3), 9))
    start = time.process_time()
    assert (folder.decode(tmp_path / "a.png", 224) == 9).all()
    assert time.process_time() - start < 2


def test_every_mode_becomes_three_channels(tmp_path):
    grey = Image.new("L", (8, 8), 77)
    pictures = {
        "grey": (grey, [77, 77, 77]),
        "alpha": (Image.new("RGBA", (8, 8), (1, 2, 3, 128)), [1, 2, 3]),
        "grey-alpha": (Image.new("LA", (8, 8), (40, 0)), [40, 40, 40]),
        "palette": (Image.new("RGB", (8, 8), (5, 6, 7)).convert("P", palette=Image.Palette.ADAPTIVE), [5, 6, 7]),
        "bits": (Image.new("1", (8, 8), 1), [255, 255, 255]),
        "deep": (Image.fromarray(np.full((8, 8), 0x4D12, dtype=np.uint16)), [0x4D] * 3),
    }
    for name, (picture, expected) in pictures.items():
        picture.save(tmp_path / f"{name}.png")
        assert folder.decode(tmp_path / f"{name}.png", 8)[:, 4, 4].tolist() == expected, name
    Image.new("CMYK", (8, 8), (0, 0, 0, 0)).save(tmp_path / "print.jpg")
    assert folder.decode(tmp_path / "print.jpg", 8)[:, 4, 4].tolist() == [255, 255, 255]


def test_224_is_the_default(tree):
    assert load("folder", tree).shape == (3, 224, 224)


def test_statistics_are_those_of_the_training_images(tmp_path):
    pixels = np.random.default_rng(1).integers(0, 256, (12, 9, 9, 3))
    for number, image in enumerate(pixels):
        save(tmp_path / f"class{number % 2}" / f"{number:02}.png", image)
    dataset = load("folder", tmp_path, size=8)
    images = everything(dataset.train).double()
    assert len(images) == 10
    assert dataset.mean == pytest.approx(images.mean((0, 2, 3)).tolist(), abs=1e-7)
    assert dataset.std == pytest.approx(images.std((0, 2, 3), correction=0).tolist(), abs=1e-7)


def test_a_channel_that_never_changes_can_be_divided_by(tree):
    assert load("folder", tree, size=8).std[1] == 1.0


# ---------------------------------------------------------------- broken images


@pytest.fixture
def hundred(tmp_path):
    for label in range(2):
        for number in range(50):
            flat(tmp_path / f"class{label}" / f"{number:02}.png", 100 * label + number, 0, 0, side=2)
    return tmp_path


def truncate(path):
    path.write_bytes(path.read_bytes()[:-30])


def test_one_in_a_hundred_may_be_broken(hundred, caplog):
    truncate(hundred / "class1" / "00.png")
    dataset = load("folder", hundred, size=2, test_per_class=2)
    assert len(caplog.messages) == 1
    assert "1 of 100 images" in caplog.messages[0]
    assert f"{hundred / 'class1' / '00.png'}: " in caplog.messages[0]
    assert "\n" not in caplog.messages[0]
    # The next image takes its place in the test set.
    assert reds(dataset.test) == [0, 1, 101, 102]
    assert reds(dataset.train) == [*range(2, 50), *range(103, 150)]
    load("folder", hundred, size=2, test_per_class=2)
    assert len(caplog.messages) == 2  # it is said in every run, not only where the image was decoded
    findings = folder.check(hundred, size=2)
    assert findings.images == {"class0": 50, "class1": 49}
    assert findings.notes[1].startswith("1 of 100 images cannot be read, they are left out. The first is ")


def test_a_check_opens_images_that_are_not_decoded(hundred, decoded):
    first, second = hundred / "class0" / "05.png", hundred / "class1" / "07.png"
    first.write_bytes(b"no image at all")
    findings = folder.check(hundred, size=2)
    assert (findings.complete, findings.images) == (True, {"class0": 49, "class1": 50})
    assert findings.notes[1].startswith(
        f"1 of 100 images cannot be read, they are left out. The first is {first}: cannot identify"
    )
    second.write_bytes(b"")
    findings = folder.check(hundred, size=2)
    assert findings.problems[0].startswith(
        f"2 of 100 images cannot be read, more than 1%: repair or remove them. The first is {first}: "
    ), "the run would not start"
    assert decoded == [], "it takes the headers"


@pytest.mark.parametrize("content", [b"", b"no image at all", b"\x89PNG\r\n\x1a\n" + b"\0" * 50])
def test_more_is_an_error(hundred, content):
    (hundred / "class0" / "05.png").write_bytes(content)
    (hundred / "class1" / "07.png").write_bytes(content)
    with pytest.raises(DataError) as caught:
        load("folder", hundred, size=2)
    text = str(caught.value)
    assert text.startswith(f"more than 1% of the 100 images in {hundred} cannot be read: 2 so far, the first is ")
    assert str(hundred / "class0" / "05.png") in text
    assert "\n" not in text
    assert entries(hundred / ".fedprophet-cache") == []


def test_too_little_memory_is_not_a_broken_image(tree, monkeypatch):
    def fail(path):
        raise MemoryError

    monkeypatch.setattr(Image, "open", fail)
    with pytest.raises(MemoryError):
        load("folder", tree, size=8)


def test_odd_images_print_nothing(tree, capfd):
    Image.new("P", (8, 8)).save(tree / "cat" / "p.png", transparency=b"\x10\x20")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load("folder", tree, size=8)
    assert capfd.readouterr() == ("", "")


# ---------------------------------------------------------------- the cache


def test_images_are_decoded_once(tree, decoded):
    digest = load("folder", tree, size=8).digest()
    assert len(decoded) == 20
    assert load("folder", tree, size=8).digest() == digest
    load("folder", tree, size=8, test_per_class=3)
    assert len(decoded) == 20
    load("folder", tree, size=9)
    assert len(decoded) == 40
    assert len(entries(tree / ".fedprophet-cache")) == 2


def test_images_stay_on_the_disk(tree):
    load("folder", tree, size=8)
    files = folder.scan(tree).files
    entry = cache.CacheEntry(tree / ".fedprophet-cache", tree, files, (3, 8, 8))
    images = entry.read().images
    assert isinstance(images, np.memmap)
    assert images.dtype == np.uint8
    assert (entry.path / "images.bin").stat().st_size == 20 * 3 * 64
    images[:] = 0  # a mistake of ours must not reach the file
    images.flush()
    assert reds(load("folder", tree, size=8).test) == [0, 1, 100, 101]


@pytest.mark.parametrize(
    "change",
    [
        lambda tree: flat(tree / "cat" / "new.png", 50, 0, 0),
        lambda tree: (tree / "cat" / "03.png").rename(tree / "cat" / "30.png"),
        lambda tree: (tree / "cat").rename(tree / "cow"),
        lambda tree: (tree / "dog" / "09.png").unlink(),
        lambda tree: flat(tree / "dog" / "09.png", 50, 0, 0),
        lambda tree: os.utime(tree / "dog" / "09.png", ns=(0, 10**18)),
    ],
)
def test_a_change_is_noticed_and_the_old_images_are_removed(tree, decoded, change):
    load("folder", tree, size=8)
    load("folder", tree, size=9)
    change(tree)
    decoded.clear()
    load("folder", tree, size=8)
    assert len(decoded) in (19, 20, 21)
    kept = sorted(path.name[:3] for path in entries(tree / ".fedprophet-cache"))
    assert kept == ["8x8", "9x9"]


def test_a_folder_for_the_cache(tree, tmp_path, decoded):
    for size in (8, 9):
        load("folder", tree, size=size, cache=tmp_path / "elsewhere" / "cache")
    assert not (tree / ".fedprophet-cache").exists()
    assert len(entries(tmp_path / "elsewhere" / "cache")) == 2
    other = tmp_path / "other"
    for name in ("a", "b"):
        for number in range(2):
            flat(other / name / f"{number}.png", number, 0, 0)
    load("folder", other, size=8, cache=tmp_path / "elsewhere" / "cache")
    decoded.clear()
    load("folder", tree, size=8, cache=tmp_path / "elsewhere" / "cache")
    assert decoded == []  # the images of another folder are left alone


def test_a_place_that_cannot_be_written_to(tree):
    (tree / ".fedprophet-cache").write_text("in the way")
    with pytest.raises(DataError, match=r"cannot write the decoded images to .*Give another .* data\.options\.cache"):
        load("folder", tree, size=8)


def test_too_little_room_is_found_before_the_work(tree, decoded, monkeypatch):
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 3839})())
    with pytest.raises(DataError, match=r"need 3\.8 kB, and .* has room for 3\.8 kB"):
        load("folder", tree, size=8)
    assert decoded == []
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 20 * 3 * 64})())
    load("folder", tree, size=8)


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("images.bin", lambda content: None),
        ("images.bin", lambda content: content[:-1]),
        ("images.bin", lambda content: content + b"0"),
        ("moments.npy", lambda content: None),
        ("moments.npy", lambda content: content[:-1]),
        ("index.json", lambda content: None),
        ("index.json", lambda content: content[:-1]),
        ("index.json", lambda content: b"[]"),
    ],
)
def test_a_damaged_entry_is_made_again(tree, decoded, name, spoil):
    digest = load("folder", tree, size=8).digest()
    (entry,) = entries(tree / ".fedprophet-cache")
    content = spoil((entry / name).read_bytes())
    (entry / name).unlink()
    if content is not None:
        (entry / name).write_bytes(content)
    assert load("folder", tree, size=8).digest() == digest
    assert len(decoded) == 40


def test_work_that_is_stopped_leaves_nothing(tree, monkeypatch):
    original = folder.decode

    def decode(path, size):
        if path.name == "07.png":
            raise KeyboardInterrupt
        return original(path, size)

    monkeypatch.setattr(folder, "decode", decode)
    with pytest.raises(KeyboardInterrupt):
        load("folder", tree, size=8)
    assert entries(tree / ".fedprophet-cache") == []
    monkeypatch.undo()
    assert reds(load("folder", tree, size=8).test) == [0, 1, 100, 101]


def test_what_a_kill_leaves_is_cleared_away(tree):
    load("folder", tree, size=8)
    (entry,) = entries(tree / ".fedprophet-cache")
    entry.rename(entry.with_name(f".{entry.name}.part"))
    (entry.with_name(f".{entry.name}.part") / "images.bin").write_bytes(b"half")
    load("folder", tree, size=8)
    assert entries(tree / ".fedprophet-cache") == [entry]


def test_images_come_in_order_however_long_each_takes(tmp_path):
    files = [cache.ImageFile(tmp_path / str(number), 0, 0, 0) for number in range(60)]

    def decode(path):
        number = int(path.name)
        time.sleep(0.01 if number % 7 == 0 else 0)
        return np.full((1, 2, 2), number, dtype=np.uint8)

    entry = cache.CacheEntry(tmp_path / "cache", tmp_path, files, (1, 2, 2))
    entry.fill(decode)
    found = entry.read()
    assert found.images[:, 0, 1, 1].tolist() == list(range(60))
    assert found.moments[7].tolist() == [[28], [4 * 49]]


def test_the_index_is_plain_json(tree):
    load("folder", tree, size=8)
    (entry,) = entries(tree / ".fedprophet-cache")
    assert sorted(path.name for path in entry.iterdir()) == ["images.bin", "index.json", "moments.npy"]
    index = json.loads((entry / "index.json").read_text())
    assert index == {"format": 1, "root": str(tree), "shape": [3, 8, 8], "broken": []}


def test_pillow_is_needed_to_decode_and_for_nothing_else(tree, monkeypatch):
    load("folder", tree, size=8)
    monkeypatch.setitem(sys.modules, "PIL", None)
    load("folder", tree, size=8)
    with pytest.raises(DataError, match=r"needs Pillow, which is not installed: pip install 'fedprophet\[images\]'"):
        load("folder", tree, size=9)
    assert folder.check(tree, size=8).complete
    assert "Pillow" in folder.check(tree, size=9).problems[0]
