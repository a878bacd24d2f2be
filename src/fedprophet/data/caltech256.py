"""Caltech-256: a tree of class folders, without its clutter."""

import re
from pathlib import Path
from shlex import quote
from typing import Any

from fedprophet.data.dataset import Dataset
from fedprophet.data.fetch import Remote, fetch, unpack
from fedprophet.data.folder import SIZE, Images, Tree
from fedprophet.data.registry import DEFAULT_ROOT, Findings, dataset
from fedprophet.errors import DataError

FOLDER = "256_ObjectCategories"
CLUTTER = "257.clutter"
CLASSES = 256
IMAGES = 29_780
"""Without the clutter."""
TEST = 25
ARCHIVE = Remote(
    "https://data.caltech.edu/records/nyy15-4j048/files/256_ObjectCategories.tar",
    "md5",
    "67b4f42ca05d46448c6bb8ecd2220f6d",
)
_CLASS = re.compile(r"[0-9]{3}\..+")


def check(root: Path | None, **options: Any) -> Findings:
    """Say what exists of Caltech-256 and what is missing."""
    root = root or DEFAULT_ROOT
    found = _find(root)
    if found is None:
        return Findings(None, (f"there is no data in {root}",), advice=_advice(root))
    return _images(found, **options).check()


def get(root: Path) -> str:
    """Fetch and unpack Caltech-256 if it is not there; return a line that says what was done."""
    there = _find(root)
    if there is not None:
        return f"caltech256 is there already: {there}"
    offline = f"Without a network: put the folder {FOLDER} in {root}, or {ARCHIVE.name} and run this again"
    archive = fetch(ARCHIVE, root, offline)
    unpacked = unpack(archive, root, FOLDER)
    return f"fetched, verified and unpacked into {unpacked}; {archive} is not needed any more"


@dataset("caltech256", "Caltech-256 without its clutter: 29,780 photographs, 256 classes", check=check, get=get)
def caltech256(
    root: Path | None, *, size: int = SIZE, test_per_class: int = TEST, cache: str | Path | None = None
) -> Dataset:
    """Return Caltech-256 without its clutter; by default 25 images of each class, the first by name, are for test."""
    root = root or DEFAULT_ROOT
    found = _find(root)
    if found is None:
        raise DataError(f"caltech256: there is no data in {root}. {_advice(root)}")
    return _images(found, size=size, test_per_class=test_per_class, cache=cache).load()


def _images(root: Path, **options: Any) -> Images:
    options = {"test_per_class": TEST, **options}
    return Images("caltech256", root, drop=(CLUTTER,), problems=_problems, **options)


def _find(root: Path) -> Path | None:
    """Return the folder of Caltech-256's class folders: in the root, or the root itself."""
    if (root / FOLDER).is_dir():
        return root / FOLDER
    if root.is_dir() and any(_CLASS.fullmatch(p.name) and p.is_dir() for p in root.iterdir()):
        return root
    return None


def _problems(tree: Tree) -> list[str]:
    counts = (("classes", len(tree.classes), CLASSES), ("images", len(tree.files), IMAGES))
    return [
        f"{tree.root} holds {found} {what} besides the clutter, not {published}"
        for what, found, published in counts
        if found != published
    ]


def _advice(root: Path) -> str:
    command = f"fedprophet data get caltech256 --root {quote(str(root))}"
    if (root / ARCHIVE.name).is_file():
        return f"{ARCHIVE.name} is there but not unpacked: run {command}"
    return f"Put the folder {FOLDER} there ({ARCHIVE.url}, unpacked), or run: {command}"
