"""Tensors whose memory is a file: the system may take it back at any time, as nothing is lost by that.

A file has no name any more as soon as it is mapped, so that nothing is left behind, however the process ends. It lies
where Python puts temporary files (TMPDIR). A process that is forked shares the memory with its parent.
"""

import math
import os
import re
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from fedprophet.errors import TemporaryFileError

MOUNTS = Path("/proc/self/mounts")
"""Where Linux lists its file systems, a line for each: device, folder, type, …; the one mounted last comes last."""
IN_MEMORY = frozenset({"tmpfs", "ramfs"})
"""The types of file systems whose files are memory."""


def empty_in_file(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor of zeros in a file of its own; TemporaryFileError where it cannot be written."""
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    try:
        with tempfile.NamedTemporaryFile(prefix="fedprophet-") as file:
            # A disk that is full must be noticed here: writing to the mapping would end the process without a word.
            os.posix_fallocate(file.fileno(), 0, count * dtype.itemsize)
            return torch.from_file(file.name, shared=True, size=count, dtype=dtype).view(shape)
    except OSError as error:
        raise TemporaryFileError(
            f"cannot write {count * dtype.itemsize} bytes to a temporary file in {tempfile.tempdir or 'any folder'}: "
            f"{error.strerror}. Make room there, or set TMPDIR to another folder"
        ) from error


def copied_to_file(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor in a file of its own."""
    return empty_in_file(tuple(tensor.shape), tensor.dtype).copy_(tensor.detach())


def expect_chosen_folder() -> None:
    """Raise TemporaryFileError if TMPDIR names no folder that can be written to: Python would take another one."""
    chosen = os.environ.get("TMPDIR")
    if chosen and not (Path(chosen).is_dir() and os.access(chosen, os.W_OK | os.X_OK)):
        raise TemporaryFileError(
            f"TMPDIR is {chosen}, which is no folder that can be written to, so that temporary files would lie in "
            f"{tempfile.gettempdir()}. Make that folder, or unset TMPDIR"
        )


def files_in_memory() -> str | None:
    """Return the type of the file system of temporary files where that is memory; None on a disk, or if not known."""
    try:
        lines = [line.split() for line in MOUNTS.read_text().splitlines()]
    except OSError:  # not Linux
        return None
    place = Path(tempfile.gettempdir()).resolve()
    # The innermost folder counts and, of file systems that were mounted there one upon the other, the last.
    mounted = {Path(_unescaped(folder)): kind for _, folder, kind, *_ in lines}
    kind = next((mounted[folder] for folder in (place, *place.parents) if folder in mounted), None)
    return kind if kind in IN_MEMORY else None


def _unescaped(folder: str) -> str:
    """Return a folder as it is named: in the list, blanks and the like are written as \\040."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), folder)
