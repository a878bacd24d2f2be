"""Decoded images on disk: made once, in parallel, and memory-mapped from then on.

An entry is a folder named by a digest of what it was made from. It holds the images as plain bytes, sums over each of
them, and a JSON index; it is written under another name and renamed when it is whole.
"""

import hashlib
import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedprophet.data.fetch import alone
from fedprophet.errors import DataError
from fedprophet.progress import progress_bar
from fedprophet.sizes import format_size

FORMAT = 1
"""Part of every digest: a change of how images are decoded or stored raises it."""
MOST_BROKEN = 0.01
"""The largest part of all images that may be unreadable."""
IMAGES, MOMENTS, INDEX = "images.bin", "moments.npy", "index.json"
_MOST_THREADS = 32

Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class ImageFile:
    """An image on disk, with what tells that it has changed."""

    path: Path
    label: int
    size: int
    modified: int


@dataclass(frozen=True)
class CachedImages:
    """The readable ones of some files, in their order.

    `moments` has for each image the sums of its channels and of their squares, in whole numbers.
    """

    images: Pixels
    moments: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    broken: tuple[str, ...]

    def statistics(self, rows: npt.NDArray[np.int64]) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return each channel's mean and standard deviation over some of the images, as values in [0, 1]."""
        count = len(rows) * self.images.shape[2] * self.images.shape[3] * 255
        total, squares = self.moments[rows].sum(axis=0)
        mean = total / count
        std = np.sqrt(np.maximum(squares / (count * 255) - np.square(mean), 0.0))
        return tuple(mean.tolist()), tuple(np.where(std < 1e-6, 1.0, std).tolist())


def entry_of(cache: Path, root: Path, files: Sequence[ImageFile], shape: tuple[int, int, int]) -> Path:
    """Return the folder of a cache entry, whether it is there or not."""
    digest = hashlib.blake2b(repr((FORMAT, shape)).encode(), digest_size=12)
    for file in files:
        name = os.fsencode(file.path.relative_to(root))
        digest.update(b"%d %d %d %s" % (file.size, file.modified, len(name), name))
    return cache / f"{shape[1]}x{shape[2]}-{digest.hexdigest()}"


def read(entry: Path, files: Sequence[ImageFile], shape: tuple[int, int, int]) -> CachedImages | None:
    """Return the images of an entry, memory-mapped; None where it is not there or not whole."""
    try:
        index = json.loads((entry / INDEX).read_bytes())
        broken = {int(position): str(text) for position, text in index["broken"]}
        kept = [position for position in range(len(files)) if position not in broken]
        # Copy on write: the mapping is never written to, but torch wants arrays that could be.
        images = np.memmap(entry / IMAGES, dtype=np.uint8, mode="c", shape=(len(kept), *shape))
        moments = np.load(entry / MOMENTS, allow_pickle=False)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if moments.shape != (len(kept), 2, shape[0]) or (entry / IMAGES).stat().st_size != images.nbytes:
        return None
    labels = np.array([files[position].label for position in kept], dtype=np.int64)
    return CachedImages(images, moments, labels, tuple(broken.values()))


def fill(
    entry: Path,
    root: Path,
    files: Sequence[ImageFile],
    shape: tuple[int, int, int],
    decode: Callable[[Path], Pixels | str],
) -> None:
    """Decode all files into an entry; `decode` returns channels × height × width, or why an image cannot be read.

    Another process may do the same at the same time: one works, the others wait and use what it made.
    """
    part = entry.with_name(f".{entry.name}.part")
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with alone(entry.parent):
            if read(entry, files, shape) is not None:
                return
            for leftover in (part, entry):
                shutil.rmtree(leftover, ignore_errors=True)
            _check_room(entry.parent, len(files) * int(np.prod(shape)))
            part.mkdir()
            try:
                _write(part, root, files, shape, decode)
                os.sync()  # the content before the name
                part.rename(entry)
            finally:
                shutil.rmtree(part, ignore_errors=True)
            _remove_older(entry)
    except OSError as error:
        raise DataError(
            f"cannot write the decoded images to {entry.parent}: {error.strerror or error}. "
            "Give another folder for them with data.options.cache (--cache)"
        ) from error


def _check_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DataError(
            f"the decoded images need {format_size(needed)}, and {folder} has room for {format_size(free)}. "
            "Make room there, give another folder with data.options.cache (--cache), or ask for smaller images with "
            "data.options.size"
        )


def _write(
    part: Path,
    root: Path,
    files: Sequence[ImageFile],
    shape: tuple[int, int, int],
    decode: Callable[[Path], Pixels | str],
) -> None:
    """Write the files of an entry."""
    broken: list[tuple[int, str]] = []
    moments: list[npt.NDArray[np.int64]] = []
    with (part / IMAGES).open("wb") as out, progress_bar() as watch:
        for position, (file, image) in enumerate(zip(files, _decode_all(files, decode), strict=True)):
            if isinstance(image, str):
                broken.append((position, f"{file.path}: {image}"))
                _check_broken(root, broken, len(files))
            else:
                out.write(image.tobytes())
                moments.append(_moments(image))
            watch("decoding images", position + 1, len(files))
    np.save(part / MOMENTS, np.array(moments, dtype=np.int64).reshape(-1, 2, shape[0]), allow_pickle=False)
    index = {"format": FORMAT, "root": str(root.resolve()), "shape": list(shape), "broken": broken}
    (part / INDEX).write_bytes(json.dumps(index).encode())


def _moments(image: Pixels) -> npt.NDArray[np.int64]:
    values = image.reshape(len(image), -1).astype(np.int64)
    return np.stack([values.sum(axis=1), np.square(values).sum(axis=1)])


def _check_broken(root: Path, broken: Sequence[tuple[int, str]], total: int) -> None:
    """Stop as soon as too many images are broken: the folder is then not what it is taken for."""
    if len(broken) > MOST_BROKEN * total:
        raise DataError(
            f"more than {MOST_BROKEN:.0%} of the {total} images in {root} cannot be read: {len(broken)} so far, the "
            f"first is {broken[0][1]}. Repair or remove them"
        )


def _decode_all(files: Iterable[ImageFile], decode: Callable[[Path], Pixels | str]) -> Iterator[Pixels | str]:
    """Decode in parallel and in order. Threads are enough: the decoders work outside of Python's lock."""
    threads = min(len(os.sched_getaffinity(0)), _MOST_THREADS)
    waiting: deque[Future[Pixels | str]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for file in files:
            # A bound on what is under way is a bound on memory, should the disk be slower than the decoder.
            if len(waiting) >= 4 * threads:
                yield waiting.popleft().result()
            waiting.append(pool.submit(decode, file.path))
        while waiting:
            yield waiting.popleft().result()


def _remove_older(entry: Path) -> None:
    """Remove what was made of the same folder, in the same size, before its files changed."""
    ours = _origin(entry)
    for other in entry.parent.iterdir():
        if other != entry and not other.is_symlink() and ours is not None and _origin(other) == ours:
            shutil.rmtree(other, ignore_errors=True)


def _origin(entry: Path) -> tuple[Any, Any] | None:
    try:
        index: Mapping[str, Any] = json.loads((entry / INDEX).read_bytes())
        return index["root"], index["shape"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
