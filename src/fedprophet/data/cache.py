"""Decoded images on disk: made once, in parallel, and memory-mapped from then on.

An entry is a folder named by a digest of what it was made from. It holds the images as plain bytes, sums over each of
them, and a JSON index; it is written under another name and renamed when it is whole.
"""

import hashlib
import json
import math
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from fedprophet.data.dataset import mean_and_std
from fedprophet.data.fetch import alone
from fedprophet.errors import DataError
from fedprophet.progress import progress_bar
from fedprophet.sizes import format_size
from fedprophet.storage.files import parse_json

FORMAT = 1
"""Part of every digest: a change of how images are decoded or stored raises it."""
MOST_BROKEN = 0.01
"""The largest part of all images that may be unreadable."""
IMAGES, MOMENTS, INDEX = "images.bin", "moments.npy", "index.json"
_MOST_THREADS = 32

T = TypeVar("T")
Pixels = npt.NDArray[np.uint8]
Decode = Callable[[Path], Pixels | str]
"""Returns channels × height × width, or why an image cannot be read."""


@dataclass(frozen=True)
class ImageFile:
    """An image on disk, with what tells that it has changed."""

    path: Path
    label: int
    size: int
    modified: int


@dataclass(frozen=True)
class CachedImages:
    """The images that can be read, in order; `moments` has each one's sums of its channels and of their squares."""

    images: Pixels
    moments: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    broken: tuple[str, ...]

    def statistics(self, rows: npt.NDArray[np.int64]) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return each channel's mean and standard deviation over some of the images, as values in [0, 1]."""
        count = len(rows) * self.images.shape[2] * self.images.shape[3] * 255
        total, squares = self.moments[rows].sum(axis=0)
        return mean_and_std(total / count, squares / (count * 255))


@dataclass(frozen=True)
class CacheEntry:
    """The decoded images of some files below `root`, whether they are there or not; `shape` is that of one image."""

    cache: Path
    root: Path
    files: Sequence[ImageFile]
    shape: tuple[int, int, int]

    @cached_property
    def path(self) -> Path:
        """The entry's folder."""
        digest = hashlib.blake2b(repr((FORMAT, self.shape)).encode(), digest_size=12)
        for file in self.files:
            name = os.fsencode(file.path.relative_to(self.root))
            digest.update(b"%d %d %d %s" % (file.size, file.modified, len(name), name))
        return self.cache / f"{self.shape[1]}x{self.shape[2]}-{digest.hexdigest()}"

    def read(self) -> CachedImages | None:
        """Return the images, memory-mapped; None if the entry is missing or incomplete."""
        try:
            index = parse_json((self.path / INDEX).read_bytes())
            broken = {int(position): str(text) for position, text in index["broken"]}
            readable = [position for position in range(len(self.files)) if position not in broken]
            # Copy on write: the mapping is never written to, but torch wants arrays that could be.
            images = np.memmap(self.path / IMAGES, dtype=np.uint8, mode="c", shape=(len(readable), *self.shape))
            moments = np.load(self.path / MOMENTS, allow_pickle=False)
        except (OSError, ValueError, KeyError, TypeError):
            return None
        if moments.shape != (len(readable), 2, self.shape[0]) or (self.path / IMAGES).stat().st_size != images.nbytes:
            return None
        labels = np.array([self.files[position].label for position in readable], dtype=np.int64)
        return CachedImages(images, moments, labels, tuple(broken.values()))

    def fill(self, decode: Decode) -> None:
        """Decode all files. If another process does the same at the same time, wait for it and use what it made."""
        part = self.cache / f".{self.path.name}.part"
        try:
            self.cache.mkdir(parents=True, exist_ok=True)
            with alone(self.cache):
                if self.read() is not None:
                    return
                for leftover in (part, self.path):
                    shutil.rmtree(leftover, ignore_errors=True)
                self._check_room()
                part.mkdir()
                try:
                    self._write(part, decode)
                    os.sync()  # the content before the name
                    part.rename(self.path)
                finally:
                    shutil.rmtree(part, ignore_errors=True)
                self._remove_older()
        except OSError as error:
            raise DataError(
                f"cannot write the decoded images to {self.cache}: {error.strerror or error}. "
                "Give another folder for them with data.options.cache (--cache)"
            ) from error

    def _check_room(self) -> None:
        needed, free = len(self.files) * math.prod(self.shape), shutil.disk_usage(self.cache).free
        if free < needed:
            raise DataError(
                f"the decoded images need {format_size(needed)}, and {self.cache} has room for {format_size(free)}. "
                "Make room there, give another folder with data.options.cache (--cache), or ask for smaller images "
                "with data.options.size"
            )

    def _write(self, part: Path, decode: Decode) -> None:
        broken: list[tuple[int, str]] = []
        moments: list[npt.NDArray[np.int64]] = []
        total = len(self.files)
        with (part / IMAGES).open("wb") as out, progress_bar() as watch:
            for position, (file, image) in enumerate(zip(self.files, of_each(self.files, decode), strict=True)):
                if isinstance(image, str):
                    broken.append((position, f"{file.path}: {image}"))
                else:
                    out.write(image.tobytes())
                    moments.append(_moments(image))
                # Checked as they come: a folder with this many is not what the user takes it for.
                if len(broken) > MOST_BROKEN * total:
                    raise DataError(
                        f"more than {MOST_BROKEN:.0%} of the {total} images in {self.root} cannot be read: "
                        f"{len(broken)} so far, the first is {broken[0][1]}. Repair or remove them"
                    )
                watch("decoding images", position + 1, total)
        np.save(part / MOMENTS, np.array(moments, dtype=np.int64).reshape(-1, 2, self.shape[0]), allow_pickle=False)
        index = {"format": FORMAT, "root": str(self.root.resolve()), "shape": list(self.shape), "broken": broken}
        (part / INDEX).write_bytes(json.dumps(index).encode())

    def _remove_older(self) -> None:
        """Remove what was made of the same folder, in the same size, before its files changed."""
        ours = _origin(self.path)
        for other in self.cache.iterdir():
            if other != self.path and not other.is_symlink() and ours is not None and _origin(other) == ours:
                shutil.rmtree(other, ignore_errors=True)


def _moments(image: Pixels) -> npt.NDArray[np.int64]:
    values = image.reshape(len(image), -1).astype(np.int64)
    return np.stack([values.sum(axis=1), np.square(values).sum(axis=1)])


def of_each(files: Iterable[ImageFile], work: Callable[[Path], T]) -> Iterator[T]:
    """Yield what work makes of each file, in parallel and in order.

    Threads are enough: the decoders work outside of Python's lock.
    """
    threads = min(len(os.sched_getaffinity(0)), _MOST_THREADS)
    waiting: deque[Future[T]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for file in files:
            # A bound on what is under way is a bound on memory, should the disk be slower than the decoder.
            if len(waiting) >= 4 * threads:
                yield waiting.popleft().result()
            waiting.append(pool.submit(work, file.path))
        while waiting:
            yield waiting.popleft().result()


def _origin(entry: Path) -> tuple[Any, Any] | None:
    try:
        index: Mapping[str, Any] = parse_json((entry / INDEX).read_bytes())
        return index["root"], index["shape"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
