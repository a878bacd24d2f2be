"""A lock between processes: a hidden file in the folder that it protects."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from filelock import FileLock, Timeout

log = logging.getLogger("fedprophet")
LOCK = ".lock"
"""The lock's file. It stays in the folder: deleting it would let two processes hold different locks."""


@cache
def _warn(folder: Path, reason: str) -> None:
    log.warning("%s is used without a lock: %s", folder, reason)


@contextmanager
def folder_lock(folder: Path, on_wait: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Hold a folder's lock; the operating system releases it when the process ends, however it ends.

    If another process holds it, `on_wait` is called before waiting; to refuse instead of waiting, it raises. Where no
    lock can be had, as on a file system without locks or in a folder of another user, the block runs without one, and
    a warning says so.
    """
    lock = FileLock(folder / LOCK, mode=0o666, fallback_to_soft=False)
    try:
        try:
            lock.acquire(blocking=False)
        except Timeout:
            on_wait()
            lock.acquire()
    except OSError as error:
        _warn(folder, error.strerror or str(error))
    try:
        yield
    finally:
        lock.release()
