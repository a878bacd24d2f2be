"""Frozen modules on a node's disk, by the hash of their parameters: each travels to a node once.

Several processes may use one folder. Files appear whole and are read without a lock: a module that another process
deletes at that moment is asked for again. Writing and deleting hold the folder's lock.
"""

import logging
import os
import re
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from safetensors import SafetensorError

from fedprophet.errors import CheckpointError
from fedprophet.flower.protocol import ProtocolError, Tensors
from fedprophet.messages.modules import digest
from fedprophet.storage.files import (
    TRY_AGAIN,
    make_folder,
    tensors_from_bytes,
    tensors_to_bytes,
    write_atomic,
    write_error,
)
from fedprophet.storage.locks import folder_lock

log = logging.getLogger("fedprophet")

_DIGEST = re.compile(r"[0-9a-f]{32}")
_OURS = re.compile(r"\.?[0-9a-f]{32}\.safetensors(\.tmp)?")
"""The files that are counted and deleted. A temporary one found under the lock was left by a killed process."""


class ModuleCache:
    """The frozen modules in a folder, at most `limit` bytes: the least recently used are deleted first.

    The modification time of a file says when it was last used, so that the order outlives the process.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder = folder
        self._limit = limit

    def collect(
        self, needed: Iterable[str], attached: Mapping[str, Tensors] = MappingProxyType({})
    ) -> tuple[dict[str, Tensors], tuple[str, ...]]:
        """Return the modules that a task needs, by digest, and the digests of those that have to be asked for.

        Modules that came `attached` to the task are checked and kept. What the task needs is kept even above the limit,
        until another task needs something else.
        """
        names = tuple(dict.fromkeys(needed))
        for name in (*names, *attached):
            self._path(name)
        for name, tensors in attached.items():
            _expect_digest(name, tensors)
        try:
            make_folder(self._folder)
        except OSError as error:
            raise write_error(self._folder, error, TRY_AGAIN) from error
        found = {name: attached[name] if name in attached else self._read(name) for name in names}
        if attached or self.size > self._limit:
            with folder_lock(self._folder):
                for name, tensors in attached.items():
                    self._write(name, tensors)
                self._shrink(needed=names)
        modules = {name: tensors for name, tensors in found.items() if tensors is not None}
        return modules, tuple(name for name in names if name not in modules)

    @property
    def size(self) -> int:
        """How many bytes the files take."""
        return sum(size for _, _, size in self._files())

    def _path(self, name: str) -> Path:
        if not _DIGEST.fullmatch(name):
            raise ProtocolError(f"{ascii(name)[:80]} is no digest of a module: these are 32 hexadecimal digits")
        return self._folder / f"{name}.safetensors"

    def _read(self, name: str) -> Tensors | None:
        """Return a module; None if it is not there, or damaged, which deletes it."""
        path = self._path(name)
        try:
            tensors = tensors_from_bytes(path.read_bytes())
            damage = None if digest(tensors) == name else "its content is not what its name says"
        except FileNotFoundError:
            return None
        except (OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
            damage = str(error)
        if damage is not None:
            log.warning("the cached module %s is damaged and will be asked for again: %s", path, damage)
            with suppress(OSError):
                path.unlink()
            return None
        self._touch(path)
        return tensors

    def _write(self, name: str, tensors: Tensors) -> None:
        """Keep a module, unless another process has done so. One that cannot be kept is used all the same."""
        if self._read(name) is not None:
            return
        try:
            write_atomic(self._path(name), tensors_to_bytes(tensors))
        except CheckpointError as error:
            log.warning("a module is not kept, and will have to be sent again: %s", error)
        else:
            self._touch(self._path(name))

    def _touch(self, path: Path) -> None:
        """Make a file the most recently used one, even if the clock went back or has not moved."""
        newest = max((time_ns for time_ns, _, _ in self._files()), default=0)
        now = max(time.time_ns(), newest + 1)
        with suppress(OSError):  # a wrong order costs one more transfer
            os.utime(path, ns=(now, now))

    def _shrink(self, needed: tuple[str, ...]) -> None:
        """Delete what a killed process left half written, then the least recently used modules above the limit."""
        spared = {self._path(name) for name in needed}
        excess = self.size - self._limit
        for _, path, size in sorted(self._files(), key=lambda file: (file[1].suffix != ".tmp", file)):
            if path.suffix == ".tmp" or (excess > 0 and path not in spared):
                with suppress(OSError):
                    path.unlink()
                    excess -= size

    def _files(self) -> list[tuple[int, Path, int]]:
        """Return when each file was last used, its path and its size."""
        found = []
        for path in self._folder.iterdir() if self._folder.is_dir() else ():
            if _OURS.fullmatch(path.name):
                with suppress(FileNotFoundError):  # another process has just deleted it
                    state = path.stat()
                    found.append((state.st_mtime_ns, path, state.st_size))
        return found


def _expect_digest(name: str, tensors: Tensors) -> None:
    try:
        found = digest(tensors)
    except (TypeError, RuntimeError) as error:
        raise ProtocolError(f"the module {name} has parameters of a type that no module has: {error}") from error
    if found != name:
        raise ProtocolError(f"the module {name} has arrived damaged: its parameters hash to {found}. Send it again")
