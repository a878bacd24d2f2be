"""A lock between processes: a hidden file in the folder that it protects."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

LOCK = ".lock"
"""The lock's file. It stays in the folder: deleting it would let two processes hold different locks."""


@contextmanager
def folder_lock(folder: Path, on_wait: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Hold a folder's lock; the operating system releases it when the process ends, however it ends.

    If another process holds it, `on_wait` is called before waiting; to refuse instead of waiting, it raises. On a
    file system without locks the block runs without one.
    """
    lock = FileLock(folder / LOCK, fallback_to_soft=False)
    try:
        try:
            lock.acquire(blocking=False)
        except Timeout:
            on_wait()
            lock.acquire()
    except OSError:
        pass  # a file system without locks
    try:
        yield
    finally:
        lock.release()
