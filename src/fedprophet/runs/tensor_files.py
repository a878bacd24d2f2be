"""The tensors of checkpoints in files that are written once: what has not changed is linked, not written again.

A method's state shares with the state before it the tensors that a round did not touch, such as fixed modules and the
best model, as the same objects: tensors of a state are never changed in place. So a tensor that was written with the
last checkpoint is known by its identity, and nothing is compared or hashed for that.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fedprophet.storage.files import file_hash, tensor_pieces, write_synced

Names = dict[str, dict[str, str]]
"""For each file, by its digest: the names of a state's tensors, and their names in the file."""


class _Place(NamedTuple):
    """Where a tensor is on the disk. The tensor is held, so that no other has its identity."""

    tensor: Tensor
    digest: str
    name: str


@dataclass(frozen=True)
class Snapshot:
    """A state's tensors: those that are in files of the last checkpoint, and groups that are to be written as files.

    A group has the tensors as they are in the host's memory.
    """

    tensors: Mapping[str, Tensor]
    stored: Mapping[str, _Place]
    groups: tuple[Mapping[str, Tensor], ...]


class TensorFiles:
    """Which tensors the files of the last checkpoint hold."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._places: dict[int, _Place] = {}
        self._bytes: dict[str, int] = {}
        """How many bytes of tensors each file has."""

    def snapshot(self, tensors: Mapping[str, Tensor]) -> Snapshot:
        """Return what has to be written of a state's tensors; training may go on as soon as this returns.

        A file of which less than half is still needed is not kept for that: what is needed is written again, apart from
        what is new, since it will probably last.
        """
        here = {digest for digest in self._bytes if self._folder and (self._folder / file_name(digest)).exists()}
        found = {name: self._places[id(value)] for name, value in tensors.items() if id(value) in self._places}
        needed = dict.fromkeys(here, 0)
        for place in found.values():
            needed[place.digest] = needed.get(place.digest, 0) + place.tensor.nbytes
        dense = {digest for digest in here if 2 * needed[digest] >= self._bytes[digest]}
        stored = {name: place for name, place in found.items() if place.digest in dense}
        lasting = [name for name in found if name not in stored]
        new = [name for name in tensors if name not in found]
        groups = [{name: tensors[name] for name in names} for names in (lasting, new) if names]
        return Snapshot(tensors, stored, tuple(map(_on_host, groups)))

    def write(self, folder: Path, snapshot: Snapshot) -> Names:
        """Write or link the files of a snapshot into a folder; return what they hold."""
        names: Names = {}
        for name, place in snapshot.stored.items():
            names.setdefault(place.digest, {})[name] = place.name
        for digest in names:
            self._link(digest, folder)
        for group in snapshot.groups:
            pieces = tensor_pieces(group)
            digest = digest_of(pieces)
            if digest not in names:  # never into a file that is there already: an older checkpoint shares it
                write_synced(folder / file_name(digest), *pieces)
            names.setdefault(digest, {}).update({name: name for name in group})
        return names

    def written(self, folder: Path, snapshot: Snapshot, names: Names) -> None:
        """Remember a snapshot whose files are in a folder that is on the disk now."""
        sizes = {digest: self._bytes[digest] for digest in names if digest in self._bytes}
        for digest, inside in names.items():
            sizes.setdefault(digest, sum(snapshot.tensors[name].nbytes for name in inside))
        places = {
            name: _Place(snapshot.tensors[name], digest, stored)
            for digest, inside in names.items()
            for name, stored in inside.items()
        }
        self._folder, self._bytes = folder, sizes
        self._places = {id(place.tensor): place for place in places.values()}

    def _link(self, digest: str, folder: Path) -> None:
        assert self._folder is not None
        old, new = self._folder / file_name(digest), folder / file_name(digest)
        try:
            new.hardlink_to(old)
        except OSError:  # some file systems have no such links
            write_synced(new, old.read_bytes())


def file_name(digest: str) -> str:
    """Return the name of the file with this digest."""
    return f"tensors-{digest[:16]}.safetensors"


def digest_of(pieces: Iterable[memoryview]) -> str:
    """Return the digest of a file that is written in pieces."""
    hasher = file_hash()
    for piece in pieces:
        hasher.update(piece)
    return hasher.hexdigest()


def _on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors in the host's memory. Those of a GPU are copied, all at once, and waited for."""
    copies = {name: value.detach().to("cpu", non_blocking=True) for name, value in tensors.items()}
    for device in {value.device for value in tensors.values() if value.is_cuda}:
        torch.cuda.synchronize(device)
    return copies
