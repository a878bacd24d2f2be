"""CIFAR-10 from the files of its official binary version: no pickle is read.

A file holds 10,000 records of 3,073 bytes: one of label, then 32×32 pixels as a red, a green and a blue plane.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote

import numpy as np
import numpy.typing as npt

from fedprophet.data.dataset import Dataset, from_tensors
from fedprophet.data.fetch import Remote, fetch, members
from fedprophet.data.registry import DEFAULT_ROOT, Findings, dataset
from fedprophet.errors import DataError

NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
SHAPE = (3, 32, 32)
RECORD = 1 + 3 * 32 * 32
RECORDS = 10_000
"""Records in each file."""
TRAIN = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST = "test_batch.bin"
FILES = (*TRAIN, TEST)
"""All that is read: the names in batches.meta.txt are known."""
FOLDER = "cifar-10-batches-bin"
ARCHIVE = Remote("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz", "md5", "c32a1d4ab5d03f1284b67883e8d87530")
_PICKLED = ("cifar-10-batches-py", "cifar-10-python.tar.gz")

Records = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Contents:
    """What one place holds: the records of each sound file, what is wrong with the others, and that in sentences."""

    place: Path
    records: Mapping[str, Records]
    faults: Mapping[str, str]
    problems: tuple[str, ...]


def check(root: Path | None) -> Findings:
    """Say what exists of CIFAR-10 and what is missing."""
    root = root or DEFAULT_ROOT
    contents = _find(root)
    if contents is None:
        return Findings(None, (f"there is no data in {root}",), advice=_advice(root))
    sound = contents.records
    counts = np.bincount(_labels(list(sound.values())), minlength=len(NAMES))
    return Findings(
        contents.place,
        contents.problems,
        train=sum(len(sound[name]) for name in TRAIN if name in sound),
        test=len(sound.get(TEST, ())),
        images=dict(zip(NAMES, counts.tolist(), strict=True)),
        files={name: f"{len(sound[name])} images" for name in FILES if name in sound} | dict(contents.faults),
        advice=_advice(root) if contents.problems else "",
    )


def get(root: Path) -> str:
    """Fetch the archive of the binary version if the data is not there; return a line that says what was done."""
    contents = _find(root)
    if contents is not None and not contents.problems:
        return f"cifar10 is there already: {contents.place}"
    offline = f"Without a network: put {ARCHIVE.name} or the folder {FOLDER} of the binary version in {root}"
    return f"fetched and verified {fetch(ARCHIVE, root, offline)}; it is read as it is, there is nothing to unpack"


@dataset("cifar10", "CIFAR-10: 60,000 images of 3×32×32, 10 classes", check=check, get=get)
def cifar10(root: Path | None) -> Dataset:
    """Return CIFAR-10: 50,000 images for training, 10,000 for test."""
    root = root or DEFAULT_ROOT
    contents = _find(root)
    if contents is None:
        raise DataError(f"cifar10: there is no data in {root}. {_advice(root)}")
    if contents.problems:
        problems = "; ".join(contents.problems)
        raise DataError(f"cifar10: {contents.place} is not complete: {problems}. {_advice(root)}")
    train, test = ([contents.records[name] for name in names] for names in (TRAIN, (TEST,)))
    found = from_tensors(_images(train), _labels(train), _images(test), _labels(test), name="cifar10")
    return replace(found, classes=len(NAMES))


def _advice(root: Path) -> str:
    pickled = next((name for name in _PICKLED if (root / name).exists()), None)
    hint = f"{pickled} is the Python version, which is not read: the binary one is needed. " if pickled else ""
    return (
        f"{hint}Put {ARCHIVE.name} or the folder {FOLDER} there ({ARCHIVE.url}), "
        f"or run: fedprophet data get cifar10 --root {quote(str(root))}"
    )


def _find(root: Path) -> Contents | None:
    """Return what the first complete place below a root holds, else the first that has anything, else None."""
    first = None
    for place in _places(root):
        contents = _read(place)
        if not contents.problems:
            return contents
        first = first or contents
    return first


def _places(root: Path) -> Iterator[Path]:
    """Yield where CIFAR-10 may lie: the folder of its files, inside the root or the root itself, or the archive."""
    for folder in (root / FOLDER, root):
        if any((folder / name).is_file() for name in FILES):
            yield folder
    for archive in (root / ARCHIVE.name, root):
        if archive.is_file():
            yield archive


def _read(place: Path) -> Contents:
    """Read all files of a folder or an archive, and note what is wrong with them."""
    records: dict[str, Records] = {}
    faults: dict[str, str] = {}
    try:
        for name, size, content in _files(place):
            fault = _size_fault(size)
            found = np.frombuffer(b"" if fault else content(), dtype=np.uint8).reshape(-1, RECORD)
            fault = fault or _label_fault(found)
            if fault:
                faults[name] = fault
            else:
                records[name] = found
    except DataError as error:
        return Contents(place, {}, {}, (str(error),))  # an archive that breaks off
    faults = {name: faults.get(name, "is missing") for name in FILES if name not in records}
    return Contents(place, records, faults, tuple(f"{name} {fault}" for name, fault in faults.items()))


def _files(place: Path) -> Iterator[tuple[str, int, Callable[[], bytes]]]:
    """Yield name, size and content of the files that matter; the content is read only when it is asked for."""
    if place.is_dir():
        for path in (place / name for name in FILES):
            if path.is_file():
                yield path.name, path.stat().st_size, path.read_bytes
        return
    for member in members(place):
        folder, _, name = member.name.removeprefix("./").rpartition("/")
        if folder == FOLDER and name in FILES:
            yield name, member.size, member.read


def _size_fault(size: int) -> str:
    if size == RECORDS * RECORD:
        return ""
    how = "is truncated: it has" if size < RECORDS * RECORD else "is too long: it has"
    return f"{how} {size} bytes instead of {RECORDS * RECORD} ({RECORDS} records of {RECORD})"


def _label_fault(records: Records) -> str:
    wrong = np.flatnonzero(records[:, 0] >= len(NAMES))
    if not len(wrong):
        return ""
    return f"is not of CIFAR-10: record {wrong[0]} has label {records[wrong[0], 0]}, labels go from 0 to 9"


def _images(batches: Sequence[Records]) -> npt.NDArray[np.uint8]:
    return np.concatenate([records[:, 1:] for records in batches]).reshape(-1, *SHAPE)


def _labels(batches: Sequence[Records]) -> npt.NDArray[np.int64]:
    empty = np.empty((0, RECORD), dtype=np.uint8)
    return np.concatenate([records[:, 0] for records in (empty, *batches)]).astype(np.int64)
