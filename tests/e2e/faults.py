"""Faults of a process's file system at a point that has a number: each operation that changes a folder is one.

A write has two: before it, and in the middle of it. There the process dies, or the disk is full from then on.
"""

import errno
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEAD = 77
"""The exit code of a process that died at a point."""
OPERATIONS = ("fsync", "ftruncate", "link", "mkdir", "rename", "replace", "rmdir", "unlink")
NEED_ROOM = ("fsync", "link", "mkdir", "open", "write", "half")


class Faults:
    """Counts the points in `names`; `happens`, "die" or "full", is what happens at number `at` (from 0)."""

    def __init__(self, folder: str, happens: str = "", at: int | None = None) -> None:
        self.folder, self.happens, self.at = Path(folder), happens, at
        self.names: list[str] = []

    def install(self) -> None:
        """Take the place of the operations that change files, in this process."""
        for name in OPERATIONS:
            setattr(os, name, self._counted(name, getattr(os, name)))
        write, opened = os.write, io.open

        def write_counted(number: int, data: Any) -> int:
            return self.write(number, data, lambda part: write(number, part))

        def open_counted(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
            if not set(mode) & set("wax+"):
                return opened(file, mode, *arguments, **options)
            self._pass("open", file)
            return _File(opened(file, mode, *arguments, **options), self)

        os.write, io.open = write_counted, open_counted

    def write(self, number: int, data: Any, real: Callable[[Any], int]) -> int:
        """Write to an open file, or half of it."""
        self._pass("write", number)
        self._pass("half", number, lambda: real(memoryview(data)[: len(data) // 2]))
        return real(data)

    def _counted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def counted(what: Any, *arguments: Any, **options: Any) -> Any:
            self._pass(name, what, folder=options.get("dir_fd"))
            return real(what, *arguments, **options)

        return counted

    def _pass(
        self, name: str, what: Any, first: Callable[[], object] = lambda: None, folder: int | None = None
    ) -> None:
        """Pass a point, unless it is the one; `first` is what still gets done there."""
        path = _path_of(what) if isinstance(what, int) else (_path_of(folder) if folder else Path.cwd()) / what
        if not path.is_relative_to(self.folder):
            return
        number = len(self.names)
        self.names.append(name)
        if self.at is None or number < self.at:
            return
        if number == self.at:
            first()
        if self.happens == "die":
            os._exit(DEAD)
        if name in NEED_ROOM:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class _File:
    """A file whose writes pass the points."""

    def __init__(self, file: Any, faults: Faults) -> None:
        self._file, self._faults = file, faults

    def write(self, data: Any) -> int:
        def now(part: Any) -> int:
            count: int = self._file.write(part)
            self._file.flush()
            return count

        return self._faults.write(self._file.fileno(), data, now)

    def __enter__(self) -> "_File":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _path_of(number: int) -> Path:
    try:
        return Path(f"/proc/self/fd/{number}").readlink()
    except OSError:
        return Path()
