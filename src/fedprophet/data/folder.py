"""Images in class folders: ROOT/CLASS/*.jpg or *.png.

Every image becomes RGB, is resized so that its shorter side has 256/224 of the size asked for, and cropped in its
centre. That is done once: see `fedprophet.data.cache`.
"""

import importlib.util
import logging
import os
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedprophet.data.cache import MOST_BROKEN, CachedImages, CacheEntry, ImageFile, Pixels, of_each
from fedprophet.data.dataset import Dataset
from fedprophet.data.examples import LocalExamples, TensorExamples
from fedprophet.data.registry import Findings, dataset
from fedprophet.errors import DataError
from fedprophet.progress import progress_bar
from fedprophet.settings.section import MOST
from fedprophet.settings.toml import shown

SIZE, MOST_PIXELS = 224, 10_000
"""Side of an image in pixels: the default and the largest."""
CACHE = ".fedprophet-cache"
"""Where decoded images are kept, below the root."""
SUFFIXES = (".jpg", ".jpeg", ".png")
NO_PILLOW = "reading images needs Pillow, which is not installed: pip install 'fedprophet[images]'"
TEST_PART = 5
"""By default, one in this many images of a class is for test."""

logger = logging.getLogger(__name__)


def check_number(option: str, value: object, most: int = MOST) -> None:
    """Raise DataError if an option is not a positive whole number of at most `most`."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        text = f"data.options.{option} must be a positive whole number, not {shown(value)}"
        raise DataError(f"{text}. The most is {most}")


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
class Images:
    """A tree of images as a dataset.

    `size` is the side of an image in pixels, `test_per_class` the number of test images of each class (None: a fifth),
    `cache` the folder for decoded images. Folders named in `drop` do not count; `problems` says what is wrong with a
    tree that can still be read.
    """

    name: str
    root: Path
    size: int = SIZE
    test_per_class: int | None = None
    cache: str | Path | None = None
    drop: tuple[str, ...] = ()
    problems: Callable[[Tree], Sequence[str]] = lambda tree: ()

    def __post_init__(self) -> None:
        check_number("size", self.size, MOST_PIXELS)
        if self.test_per_class is not None:
            check_number("test_per_class", self.test_per_class)
        if not isinstance(self.cache, str | Path | None) or "\0" in str(self.cache):
            raise DataError(f"data.options.cache must be a folder's path, not {self.cache!r}")

    def load(self) -> Dataset:
        """Return the dataset; images that are not decoded yet are decoded first."""
        tree = scan(self.root, self.drop)
        found = self._decoded(tree)
        problems = list(self.problems(tree))
        if found.broken:
            broken = f"{len(found.broken)} of {len(tree.files)} images in {self.root} cannot be read and are left out"
            problems.append(f"{broken}, the first is {found.broken[0]}")
        for problem in problems:
            logger.warning("warning: %s: %s", self.name, problem)
        held_out = self._held_out(found.labels, tree)
        train, test = np.flatnonzero(~held_out), np.flatnonzero(held_out)
        every = TensorExamples(found.images, found.labels)
        shape = tuple(found.images.shape[1:])
        parts = LocalExamples(every, train), LocalExamples(every, test)
        return Dataset(self.name, *parts, len(tree.classes), shape, *found.statistics(train), names=tree.classes)

    def check(self) -> Findings:
        """Say what the tree holds."""
        try:
            tree = scan(self.root, self.drop)
        except DataError as error:
            return Findings(self.root if self.root.exists() else None, (str(error),))
        found = self._entry(tree).read()
        problems = list(self.problems(tree))
        labels, broken = tree.labels, tuple[str, ...]()
        notes = [f"not decoded to {self.size}×{self.size} yet: the first run does that"]
        if found is not None:
            labels, broken = found.labels, found.broken
            notes = [f"decoded to {self.size}×{self.size} in {self._entry(tree).path}"]
        elif _has_pillow():
            labels, broken = _opened(tree)
            notes[0] += ". Of each image only the header was read"
        else:
            problems.append(NO_PILLOW)
        if broken:
            refused = len(broken) > MOST_BROKEN * len(tree.files)
            what = f"more than {MOST_BROKEN:.0%}: repair or remove them" if refused else "they are left out"
            count = f"{len(broken)} of {len(tree.files)} images cannot be read"
            (problems if refused else notes).append(f"{count}, {what}. The first is {broken[0]}")
        test = 0
        try:
            test = int(self._held_out(labels, tree).sum())
        except DataError as error:
            problems.append(str(error))
        images = dict(zip(tree.classes, np.bincount(labels, minlength=len(tree.classes)).tolist(), strict=True))
        return Findings(self.root, tuple(problems), len(labels) - test, test, images, notes=tuple(notes))

    def _entry(self, tree: Tree) -> CacheEntry:
        cache = Path(self.cache).expanduser() if self.cache else tree.root / CACHE
        return CacheEntry(cache, tree.root, tree.files, (3, self.size, self.size))

    def _decoded(self, tree: Tree) -> CachedImages:
        entry = self._entry(tree)
        found = entry.read()
        if found is None:
            if not _has_pillow():
                raise DataError(NO_PILLOW)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Pillow warns about odd but readable images
                entry.fill(partial(decode, size=self.size))
            found = entry.read()
        if found is None:
            raise DataError(f"the decoded images in {entry.path} have been removed or damaged just now. Try again")
        return found

    def _held_out(self, labels: npt.NDArray[np.int64], tree: Tree) -> npt.NDArray[np.bool_]:
        """Return which images are the test set: the first of each class."""
        held_out = np.zeros(len(labels), dtype=bool)
        for label, name in enumerate(tree.classes):
            rows = np.flatnonzero(labels == label)
            count = self.test_per_class or max(1, len(rows) // TEST_PART)
            if len(rows) <= count:
                raise DataError(
                    f"class {name} has {len(rows)} readable images and {count} of each class are for test: at least "
                    f"{count + 1} are needed. Add images, remove the class, or change data.options.test_per_class"
                )
            held_out[rows[:count]] = True
        return held_out


def check(root: Path | None, **options: Any) -> Findings:
    """Say what a folder of images holds."""
    return Images("folder", _given(root), **options).check()


@dataset(
    "folder",
    "images of your own: ROOT/CLASS/*.jpg or *.png",
    check=check,
    get="your own images in ROOT/CLASS/*.jpg or *.png: there is nothing to fetch",
)
def folder(
    root: Path | None, *, size: int = SIZE, test_per_class: int | None = None, cache: str | Path | None = None
) -> Dataset:
    """Return the images of a folder; by default the first fifth of each class, by name, is the test set."""
    return Images("folder", _given(root), size, test_per_class, cache).load()


def _given(root: Path | None) -> Path:
    if root is None:
        raise DataError("folder needs the folder of your images: give it as data.root (--root)")
    return root


def scan(root: Path, drop: Collection[str] = ()) -> Tree:
    """Return the class folders and images below a root. Hidden files and other formats are left out."""
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


def _has_pillow() -> bool:
    return importlib.util.find_spec("PIL") is not None


def _opened(tree: Tree) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
    """Return the labels of the images that can be opened, and which ones cannot and why."""
    total, readable, broken = len(tree.files), [], []
    with warnings.catch_warnings(), progress_bar() as watch:
        warnings.simplefilter("ignore")
        for number, (file, fault) in enumerate(zip(tree.files, of_each(tree.files, _fault), strict=True), start=1):
            if fault:
                broken.append(f"{file.path}: {fault}")
            else:
                readable.append(file.label)
            watch("opening images", number, total)
    return np.array(readable, dtype=np.int64), tuple(broken)


def _fault(path: Path) -> str:
    """Return why an image cannot be opened, as far as its header tells; nothing where it can."""
    from PIL import Image  # an extra that only image folders need

    try:
        with Image.open(path):
            return ""
    except Exception as error:  # as in `decode`
        return _said(error)


def _said(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


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
        return _said(error)


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
