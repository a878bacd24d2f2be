"""What stays on a client between rounds: versions of its own (norm) layers, in memory and on disk.

A version is the round that made it; a `Timeline` says which versions count. So a run that goes back to an older
checkpoint finds the layers of that time: it asks for versions before the round it repeats, and overwrites later ones.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from safetensors import SafetensorError, safe_open
from torch import Tensor

from fedprophet.errors import CheckpointError
from fedprophet.messages.values import Timeline
from fedprophet.storage.bounded import BoundedCache
from fedprophet.storage.files import how_to_resume, tensors_from_bytes, tensors_to_bytes, write_atomic_all

CLIENTS_PER_FOLDER = 1000
Key = tuple[str, int]
Layers = Mapping[str, Tensor]


@dataclass
class _Client:
    """A client in memory; `dirty` until its file has the same content."""

    versions: dict[int, Layers] = field(default_factory=dict)
    dirty: bool = False

    @property
    def size(self) -> int:
        return sum(tensor.nbytes for layers in self.versions.values() for tensor in layers.values())


class ClientStore:
    """The own layers of all clients that have trained; clients that have not cost nothing.

    With a directory, about `memory_limit` bytes of layers stay in memory at most, and the next store on the same
    directory finds what was flushed. Flush before writing a checkpoint that relies on the layers. Without a directory
    everything stays in memory.
    """

    def __init__(self, directory: Path | None, memory_limit: int) -> None:
        self._directory = directory
        limit = math.inf if directory is None else memory_limit
        self._clients: BoundedCache[Key, _Client] = BoundedCache(limit, lambda client: client.size, self._leave)

    def get(self, architecture: str, client: int, timeline: Timeline, before: int) -> Layers | None:
        """Return the newest layers that count, made before round `before`; they must not be changed in place."""
        found = self._find((architecture, client))
        version = timeline.newest(found.versions, before) if found else None
        return found.versions[version] if found and version is not None else None

    def put(self, architecture: str, client: int, round: int, tensors: Layers, timeline: Timeline) -> None:
        """Store a copy of the layers that a client has after `round`; drop its versions of no further use."""
        found = self._find((architecture, client)) or _Client()
        copy = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
        found.versions = {**_useful(found.versions, round, timeline), round: MappingProxyType(copy)}
        found.dirty = True
        self._clients.put((architecture, client), found)

    def flush(self) -> None:
        """Write every client that has changed; when this returns, all of it is on the disk."""
        self._write({key: client for key, client in self._clients.items() if client.dirty})

    def _find(self, key: Key) -> _Client | None:
        found = self._clients.get(key)
        if found is None and self._directory is not None:
            versions = _read_versions(self._path(key))
            found = None if versions is None else self._clients.put(key, _Client(versions))
        return found

    def _leave(self, key: Key, client: _Client) -> None:
        """A client that has changed is written before it leaves memory."""
        if client.dirty:
            self._write({key: client})

    def _write(self, clients: Mapping[Key, _Client]) -> None:
        if self._directory is None:
            return
        advice = f"Make room there, then go on with: {how_to_resume(self._directory.parent)}"
        write_atomic_all(((self._path(key), _to_bytes(client.versions)) for key, client in clients.items()), advice)
        for client in clients.values():
            client.dirty = False

    def _path(self, key: Key) -> Path:
        assert self._directory is not None
        architecture, client = key
        return self._directory / architecture / str(client // CLIENTS_PER_FOLDER) / f"{client}.safetensors"


def _useful(versions: Mapping[int, Layers], round: int, timeline: Timeline) -> dict[int, Layers]:
    """Return the versions that can still be asked for when a new one of `round` is stored.

    Versions of `round` and later were left by an interrupted run. A resume may go back as far as the timeline's floor,
    where a version that was discarded later still counts.
    """
    earlier = {version: layers for version, layers in versions.items() if version < round}
    oldest = timeline.newest(earlier, timeline.floor + 1)
    settled = replace(timeline, discarded=tuple(span for span in timeline.discarded if span[1] <= timeline.floor))
    return {
        version: layers
        for version, layers in earlier.items()
        if (oldest is None or version >= oldest) and settled.newest({version: None}, version + 1) is not None
    }


def _to_bytes(versions: Mapping[int, Layers]) -> bytes:
    tensors = {f"{version}/{name}": value for version, layers in versions.items() for name, value in layers.items()}
    # Versions are listed apart, because a version of a model without norm layers has no tensors.
    return tensors_to_bytes(tensors, {"versions": " ".join(map(str, versions))})


def _read_versions(path: Path) -> dict[int, Layers] | None:
    """Return the layers in a client's file; None where it has none."""
    try:
        layers: dict[int, dict[str, Tensor]] = {version: {} for version in _read_header(path)}
        for key, value in tensors_from_bytes(path.read_bytes()).items():
            version, _, name = key.partition("/")
            layers[int(version)][name] = value
    except FileNotFoundError:
        return None
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"the stored layers in {path} cannot be read: {error}. Put the file back from a copy or start the run again"
        ) from error
    return {version: MappingProxyType(tensors) for version, tensors in layers.items()}


def _read_header(path: Path) -> tuple[int, ...]:
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
    try:
        return tuple(map(int, metadata["versions"].split()))
    except (KeyError, ValueError) as error:
        raise SafetensorError("it does not say which versions it holds") from error
