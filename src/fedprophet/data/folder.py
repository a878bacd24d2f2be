"""Images in class folders, ROOT/CLASS/*.jpg or *.png, and Caltech-256 as one such tree.

Every image becomes RGB, is resized so that its shorter side has 256/224 of the size asked for, and cropped in its
centre. That is done once: see `fedprophet.data.cache`.
"""

import importlib.util
import logging
import os
import re
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shlex import quote

import numpy as np
import numpy.typing as npt

from fedprophet.data import cache
from fedprophet.data.cache import CachedImages, ImageFile, Pixels
from fedprophet.data.dataset import Dataset, LocalExamples, TensorExamples
from fedprophet.data.fetch import Remote, fetch, unpack
from fedprophet.data.options import DataOptions, Findings
from fedprophet.errors import DataError

SIZE = 224
"""Side of an image in pixels, where nothing else is asked for."""
CACHE = ".fedprophet-cache"
"""Where decoded images are kept, below the root."""
SUFFIXES = (".jpg", ".jpeg", ".png")
NO_PILLOW = "reading images needs Pillow, which is not installed: pip install 'fedprophet[images]'"
TEST_PART = 5
"""One in this many images of a class is for test, where nothing else is asked for."""

CALTECH_FOLDER = "256_ObjectCategories"
CALTECH_CLUTTER = "257.clutter"
CALTECH_CLASSES = 256
CALTECH_IMAGES = 29_780
"""Without the clutter."""
CALTECH_TEST = 25
CALTECH_ARCHIVE = Remote(
    "https://data.caltech.edu/records/nyy15-4j048/files/256_ObjectCategories.tar",
    "md5",
    "67b4f42ca05d46448c6bb8ecd2220f6d",
)
_CALTECH_CLASS = re.compile(r"[0-9]{3}\..+")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tree:
    """The class folders below a root, sorted by name, and all their images, by class and then by name."""

    root: Path
    classes: tuple[str, ...]
    files: tuple[ImageFile, ...]

    @property
    def labels(self) -> npt.NDArray[np.int64]:
        """The label of each image."""
        return np.array([file.label for file in self.files], dtype=np.int64)


@dataclass(frozen=True)
class Kind:
    """A sort of tree: how many images of a class are for test, which folders do not count, what may be wrong."""

    name: str
    test: int | None = None
    drop: tuple[str, ...] = ()
    problems: Callable[[Tree], Sequence[str]] = lambda tree: ()


def folder(options: DataOptions) -> Dataset:
    """Return the images of a folder; the first fifth of each class, by name, is the test set."""
    return _load(_given(options), options, FOLDER)


def caltech256(options: DataOptions) -> Dataset:
    """Return Caltech-256 without its clutter; 25 images of each class, the first by name, are the test set."""
    root = _caltech_root(options.place)
    if root is None:
        raise DataError(f"caltech256: there is no data in {options.place}. {_caltech_advice(options.place)}")
    return _load(root, options, CALTECH)


def check(options: DataOptions) -> Findings:
    """Say what a folder of images holds."""
    return _check(_given(options), options, FOLDER)


def check_caltech256(options: DataOptions) -> Findings:
    """Say what is there of Caltech-256 and what is missing."""
    root = _caltech_root(options.place)
    if root is None:
        return Findings(None, (f"there is no data in {options.place}",), advice=_caltech_advice(options.place))
    return _check(root, options, CALTECH)


def get_caltech256(root: Path) -> str:
    """Fetch and unpack Caltech-256, unless it is there; return a line that says what was done."""
    there = _caltech_root(root)
    if there is not None:
        return f"caltech256 is there already: {there}"
    otherwise = (
        f"Without a network: put the folder {CALTECH_FOLDER} in {root}, or {CALTECH_ARCHIVE.name} and run this again"
    )
    archive = fetch(CALTECH_ARCHIVE, root, otherwise)
    unpacked = unpack(archive, root, CALTECH_FOLDER)
    return f"fetched, verified and unpacked into {unpacked}; {archive} is not needed any more"


def scan(root: Path, drop: Collection[str] = ()) -> Tree:
    """Return the class folders and images below a root. What is hidden, or neither JPEG nor PNG, is left out."""
    layout = f"Images belong into class folders: {root}/CLASS/*.jpg or *.png"
    if not root.is_dir():
        raise DataError(f"{root} is not a folder. {layout}")
    names = sorted(p.name for p in root.iterdir() if p.is_dir() and not p.name.startswith(".") and p.name not in drop)
    if len(names) < 2:
        raise DataError(f"{root} holds {len(names)} class folders, at least 2 are needed. {layout}")
    files: list[ImageFile] = []
    for label, name in enumerate(names):
        found = _images(root / name, label)
        if not found:
            raise DataError(f"the class folder {root / name} holds no JPEG or PNG. Put images there or remove it")
        files += found
    return Tree(root, tuple(names), tuple(files))


def _images(place: Path, label: int) -> list[ImageFile]:
    found = []
    for entry in os.scandir(place):
        if entry.name.lower().endswith(SUFFIXES) and not entry.name.startswith(".") and entry.is_file():
            status = entry.stat()
            found.append(ImageFile(place / entry.name, label, status.st_size, status.st_mtime_ns))
    return sorted(found, key=lambda file: file.path.name)


def _given(options: DataOptions) -> Path:
    if options.root is None:
        raise DataError("folder needs the folder of your images: give it as data.root (--root)")
    return options.root


def _load(root: Path, options: DataOptions, kind: Kind) -> Dataset:
    tree = scan(root, kind.drop)
    found = _decoded(tree, options)
    problems = list(kind.problems(tree))
    if found.broken:
        broken = f"{len(found.broken)} of {len(tree.files)} images in {root} cannot be read and are left out"
        problems.append(f"{broken}, the first is {found.broken[0]}")
    for problem in problems:
        logger.warning("warning: %s: %s", kind.name, problem)
    held_out = _held_out(found.labels, tree, options.test_per_class or kind.test)
    train, test = np.flatnonzero(~held_out), np.flatnonzero(held_out)
    every = TensorExamples(found.images, found.labels)
    shape = tuple(found.images.shape[1:])
    parts = LocalExamples(every, train), LocalExamples(every, test)
    return Dataset(kind.name, *parts, len(tree.classes), shape, *found.statistics(train), names=tree.classes)


def _entry(tree: Tree, options: DataOptions) -> tuple[Path, tuple[int, int, int]]:
    shape = (3, options.size or SIZE, options.size or SIZE)
    return cache.entry_of(options.cache or tree.root / CACHE, tree.root, tree.files, shape), shape


def _decoded(tree: Tree, options: DataOptions) -> CachedImages:
    entry, shape = _entry(tree, options)
    found = cache.read(entry, tree.files, shape)
    if found is None:
        decode_one = _decoder(shape[1])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow has lines of its own for odd but readable images
            cache.fill(entry, tree.root, tree.files, shape, decode_one)
        found = cache.read(entry, tree.files, shape)
    if found is None:
        raise DataError(f"the decoded images in {entry} have been removed or damaged just now. Try again")
    return found


def _held_out(labels: npt.NDArray[np.int64], tree: Tree, test: int | None) -> npt.NDArray[np.bool_]:
    """Return which images are the test set: the first of each class."""
    held_out = np.zeros(len(labels), dtype=bool)
    for label, name in enumerate(tree.classes):
        rows = np.flatnonzero(labels == label)
        count = test or max(1, len(rows) // TEST_PART)
        if len(rows) <= count:
            raise DataError(_too_few(name, len(rows), count))
        held_out[rows[:count]] = True
    return held_out


def _too_few(name: str, images: int, test: int) -> str:
    return (
        f"class {name} has {images} readable images and {test} of each class are for test: at least {test + 1} are "
        "needed. Add images, remove the class, or change data.test_per_class"
    )


def _check(root: Path, options: DataOptions, kind: "Kind") -> Findings:
    try:
        tree = scan(root, kind.drop)
    except DataError as error:
        return Findings(root if root.exists() else None, (str(error),))
    entry, shape = _entry(tree, options)
    found = cache.read(entry, tree.files, shape)
    labels = tree.labels if found is None else found.labels
    problems = list(kind.problems(tree))
    if found is None and not _has_pillow():
        problems.append(NO_PILLOW)
    test = 0
    try:
        test = int(_held_out(labels, tree, options.test_per_class or kind.test).sum())
    except DataError as error:
        problems.append(str(error))
    images = dict(zip(tree.classes, np.bincount(labels, minlength=len(tree.classes)).tolist(), strict=True))
    return Findings(root, tuple(problems), len(labels) - test, test, images, notes=(_decoding(found, entry, shape),))


def _decoding(found: CachedImages | None, entry: Path, shape: tuple[int, int, int]) -> str:
    if found is None:
        return f"not decoded to {shape[1]}×{shape[2]} yet: the first run does that"
    broken = f", {len(found.broken)} broken ones left out" if found.broken else ""
    return f"decoded to {shape[1]}×{shape[2]} in {entry}{broken}"


def _decoder(size: int) -> Callable[[Path], Pixels | str]:
    if not _has_pillow():
        raise DataError(NO_PILLOW)
    return partial(decode, size=size)


def _has_pillow() -> bool:
    return importlib.util.find_spec("PIL") is not None


def decode(path: Path, size: int) -> Pixels | str:
    """Return an image as 3 × size × size, or the reason why it cannot be read."""
    from PIL import Image  # an extra that only image folders need

    try:
        with Image.open(path) as image:
            picture: Image.Image = image
            if image.mode.startswith("I"):  # 16 bits of grey, which convert() would clip to 255
                picture = Image.fromarray((np.asarray(image).clip(0, 65535) // 256).astype(np.uint8))
            box = _crop(*picture.size, size)
            resized = picture.convert("RGB").resize((size, size), Image.Resampling.BILINEAR, box=box)
            return np.ascontiguousarray(np.moveaxis(np.asarray(resized), 2, 0))
    except MemoryError:
        raise
    except Exception as error:  # a decoder raises whatever a broken file makes it stumble over
        return " ".join(str(error).split()) or type(error).__name__


def _crop(width: int, height: int, size: int) -> tuple[float, float, float, float]:
    """Return the part of an image that is left when its shorter side becomes size · 256/224 and its centre is cropped.

    Only that part is resized: a long strip of an image would else take gigabytes.
    """
    short = (size * 256 + 112) // 224
    scaled = [short * side // min(width, height) for side in (width, height)]
    starts = [round((side - size) / 2) for side in scaled]
    (left, right), (top, bottom) = (
        (start * side / long, (start + size) * side / long)
        for side, long, start in zip((width, height), scaled, starts, strict=True)
    )
    return left, top, right, bottom


def _caltech_root(root: Path) -> Path | None:
    """Return the folder of Caltech-256's class folders: in the root, or the root itself."""
    if (root / CALTECH_FOLDER).is_dir():
        return root / CALTECH_FOLDER
    if root.is_dir() and any(_CALTECH_CLASS.fullmatch(p.name) and p.is_dir() for p in root.iterdir()):
        return root
    return None


def _caltech_problems(tree: Tree) -> list[str]:
    problems = []
    if len(tree.classes) != CALTECH_CLASSES:
        problems.append(f"{tree.root} holds {len(tree.classes)} classes besides the clutter, not {CALTECH_CLASSES}")
    if len(tree.files) != CALTECH_IMAGES:
        problems.append(f"{tree.root} holds {len(tree.files)} images besides the clutter, not {CALTECH_IMAGES}")
    return problems


def _caltech_advice(root: Path) -> str:
    command = f"fedprophet data get caltech256 --root {quote(str(root))}"
    if (root / CALTECH_ARCHIVE.name).is_file():
        return f"{CALTECH_ARCHIVE.name} is there but not unpacked: run {command}"
    return f"Put the folder {CALTECH_FOLDER} there ({CALTECH_ARCHIVE.url}, unpacked), or run: {command}"


FOLDER = Kind("folder")
CALTECH = Kind("caltech256", CALTECH_TEST, (CALTECH_CLUTTER,), _caltech_problems)
