"""A lock between processes: a hidden file in the folder that it protects."""

import errno
import fcntl
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from filelock import FileLock, Timeout

log = logging.getLogger("fedprophet")
LOCK = ".lock"
"""The lock's file. It stays in the folder: deleting it would let two processes hold different locks."""

MOMENT = 1.0
"""Seconds in which a lock must be had before another process counts as its holder: who only looks is gone by then."""


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
            lock.acquire(timeout=MOMENT, poll_interval=MOMENT / 50)
        except Timeout:
            on_wait()
            lock.acquire()
    except OSError as error:
        _warn(folder, error.strerror or str(error))
    try:
        yield
    finally:
        lock.release()


def is_locked(folder: Path) -> bool | None:
    """Whether a process holds a folder's lock; None if that cannot be told, as on a file system without locks.

    The system tells it only to those who try. A look shares the lock with other looks, for an instant in which
    `folder_lock` waits for it, and needs no permission to write.
    """
    try:
        file = os.open(folder / LOCK, os.O_RDONLY)
    except OSError as error:
        return False if error.errno == errno.ENOENT else None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return True if error.errno in (errno.EAGAIN, errno.EACCES) else None
    finally:
        os.close(file)
    return False
