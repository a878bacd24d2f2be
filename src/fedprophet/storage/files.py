"""Files that are whole or not there at all, whenever the process or the machine stops."""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from fedprophet.errors import CheckpointError

IDENTITY = "flower.json"
"""A run's file on Flower: the id that its nodes know it by, and whether they are real devices."""
CONFIG = "config.toml"
"""A run's configuration."""
TRY_AGAIN = "Make room there or correct its permissions, then try again"


def file_hash(data: bytes | memoryview = b"") -> "hashlib.blake2b":
    """Return the hash by which the files of a run are known, begun with some data."""
    return hashlib.blake2b(data, digest_size=32)


def write_atomic(path: Path, data: bytes, advice: str = TRY_AGAIN) -> None:
    """Write a file through a temporary one beside it: a reader finds the old content or the new, never a part."""
    write_atomic_all([(path, data)], advice)


def write_json(path: Path, table: Mapping[str, Any], advice: str = TRY_AGAIN) -> None:
    """Write a table as indented JSON, like `write_atomic`."""
    write_atomic(path, (json.dumps(table, indent=2) + "\n").encode(), advice)


def parse_json(text: str | bytes) -> Any:
    """Return what a JSON text holds; ValueError if it is none, however it is damaged."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def write_atomic_all(contents: Iterable[tuple[Path, bytes]], advice: str = TRY_AGAIN) -> None:
    """Write several files like `write_atomic`; their folders are synced once, at the end."""
    folders: dict[Path, None] = {}
    for path, data in contents:
        temporary = path.with_name(f".{path.name}.tmp")
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise CheckpointError(f"cannot write {path}: it is a device or a pipe, which stays. Give another path")
        try:
            make_folder(path.parent)
            write_synced(temporary, data)
            temporary.replace(path)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise write_error(path, error, advice) from error
        folders[path.parent] = None
    for folder in folders:
        try:
            sync_folder(folder)
        except OSError as error:
            raise write_error(folder, error, advice) from error


def write_error(path: Path, error: OSError, advice: str) -> CheckpointError:
    """Return the error of a file that could not be written."""
    return CheckpointError(f"cannot write {path}: {error.strerror or error}. {advice}")


def write_synced(path: Path, *pieces: bytes | memoryview) -> None:
    """Write a file, of one piece or several, and wait until it is on the disk."""
    with path.open("wb") as file:
        for piece in pieces:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())


def append_synced(path: Path, data: bytes) -> None:
    """Add to a file, or start it, and wait until it is on the disk; if that fails, remove the part that was written."""
    new = not path.exists()
    make_folder(path.parent)
    with path.open("ab", buffering=0) as file:
        before = file.tell()
        try:
            while data:
                data = data[os.write(file.fileno(), data) :]
            os.fsync(file.fileno())
        except OSError:
            os.ftruncate(file.fileno(), before)
            raise
    if new:
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Wait until a folder's entries are on the disk: only then does a new or renamed file survive a power cut."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents, durably."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def tensors_to_bytes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the content of a safetensors file; the same tensors and metadata always give the same bytes.

    safetensors writes metadata in an order that changes from process to process, so it is put into the header here.
    """
    plain = save(_apart(tensors))
    if not metadata:
        return plain
    length = int.from_bytes(plain[:8], "little")
    header = {"__metadata__": dict(sorted(metadata.items())), **json.loads(plain[8 : 8 + length])}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + plain[8 + length :]


def tensor_pieces(tensors: Mapping[str, Tensor]) -> list[memoryview]:
    """Return the content of a safetensors file as a header and the tensors' own memory, of which no copy is made.

    What writes or hashes such pieces lets other threads go on meanwhile, unlike `tensors_to_bytes`.
    """
    # Wide types first: every tensor begins at a multiple of its type's size.
    flat = {name: value.detach().contiguous() for name, value in tensors.items()}
    ordered = sorted(flat, key=lambda name: (-flat[name].itemsize, name))
    header, end = {}, 0
    for name in ordered:
        begin, end = end, end + flat[name].nbytes
        kind, shape = _type_name(flat[name].dtype), list(flat[name].shape)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    values = [flat[name].reshape(-1).view(torch.uint8).numpy().data for name in ordered]
    return [memoryview(len(text).to_bytes(8, "little") + text), *values]


@cache
def _type_name(kind: torch.dtype) -> str:
    """Return what safetensors calls a type of tensors."""
    name: str = json.loads(save({"": torch.empty(0, dtype=kind)})[8:])[""]["dtype"]
    return name


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors as safetensors takes them: contiguous, and copied if two share memory."""
    seen: set[int] = set()
    found: dict[str, Tensor] = {}
    for name, value in tensors.items():
        flat = value.detach().cpu().contiguous()
        memory = flat.untyped_storage().data_ptr()
        found[name] = flat.clone() if memory in seen else flat
        seen.add(memory)
    return found


def tensors_from_bytes(data: bytes) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, each with memory of its own, aligned like any other tensor."""
    found = load(data)
    return {name: found.pop(name).clone() for name in list(found)}  # each original is freed at once


def is_deployed(run: Path) -> bool:
    """Whether a run's clients are real nodes of Flower, which keep their own layers."""
    file = run / IDENTITY
    try:
        return parse_json(file.read_bytes())["deployed"] is True
    except FileNotFoundError:
        return False
    except (OSError, ValueError, KeyError, TypeError):
        raise CheckpointError(f"{file} is damaged. Put it back from a copy, or start the run anew") from None
