"""What stays on a client between rounds: versions of its own (norm) layers, in memory and on disk.

A version is the round that made it, and which versions count is said by a `Timeline`. So a run that goes back to an
older checkpoint finds the layers of that time: it asks for versions before the round it repeats, and overwrites the
later ones.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from safetensors import SafetensorError, safe_open
from torch import Tensor

from fedprophet.errors import CheckpointError
from fedprophet.messages.task import Timeline
from fedprophet.storage.files import how_to_resume, tensors_from_bytes, tensors_to_bytes, write_atomic_all

CLIENTS_PER_FOLDER = 1000
Key = tuple[str, int]
Layers = Mapping[str, Tensor]


@dataclass
class _Client:
    """A client in memory; `dirty` until its file holds the same."""

    versions: dict[int, Layers] = field(default_factory=dict)
    dirty: bool = False

    @property
    def size(self) -> int:
        return sum(tensor.nbytes for layers in self.versions.values() for tensor in layers.values())


class ClientStore:
    """The own layers of all clients that have trained; clients that have not cost nothing.

    With a directory, at most about `memory_limit` bytes of layers stay in memory, and what was flushed is found again
    by the next store on the same directory. Flush before writing a checkpoint that relies on the layers. Without a
    directory everything stays in memory.
    """

    def __init__(self, directory: Path | None, memory_limit: int) -> None:
        self._directory = directory
        self._limit = memory_limit
        self._clients: OrderedDict[Key, _Client] = OrderedDict()
        self._size = 0

    def get(self, architecture: str, client: int, timeline: Timeline, before: int) -> Layers | None:
        """Return the newest layers that count, made before round `before`; they must not be changed in place."""
        found = self._find((architecture, client))
        version = timeline.newest(found.versions, before) if found else None
        layers = found.versions[version] if found and version is not None else None
        self._shrink()
        return layers

    def put(self, architecture: str, client: int, round: int, tensors: Layers, timeline: Timeline) -> None:
        """Store a copy of the layers that a client has after `round`; drop its versions of no further use."""
        key = (architecture, client)
        found = self._find(key) or _Client()
        copy = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
        self._size -= found.size if key in self._clients else 0
        found.versions = {**_useful(found.versions, round, timeline), round: MappingProxyType(copy)}
        found.dirty = True
        self._size += found.size
        self._clients[key] = found
        self._clients.move_to_end(key)
        self._shrink()

    def flush(self) -> None:
        """Write every client that has changed; when this returns, all of it is on the disk."""
        self._write([key for key, client in self._clients.items() if client.dirty])

    def _find(self, key: Key) -> _Client | None:
        if key not in self._clients and self._directory is not None:
            versions = _read_versions(self._path(key))
            if versions is None:
                return None
            self._clients[key] = _Client(versions)
            self._size += self._clients[key].size
        found = self._clients.get(key)
        if found is not None:
            self._clients.move_to_end(key)
        return found

    def _shrink(self) -> None:
        """Forget the least recently used clients above the limit; one that has changed is written first."""
        while self._directory is not None and self._size > self._limit and self._clients:
            key, client = next(iter(self._clients.items()))
            if client.dirty:
                self._write([key])
            self._size -= client.size
            del self._clients[key]

    def _write(self, keys: list[Key]) -> None:
        if self._directory is None:
            return
        advice = f"Make room there, then go on with: {how_to_resume(self._directory.parent)}"
        write_atomic_all(((self._path(key), _to_bytes(self._clients[key].versions)) for key in keys), advice)
        for key in keys:
            self._clients[key].dirty = False

    def _path(self, key: Key) -> Path:
        assert self._directory is not None
        architecture, client = key
        return self._directory / architecture / str(client // CLIENTS_PER_FOLDER) / f"{client}.safetensors"


def _useful(versions: Mapping[int, Layers], round: int, timeline: Timeline) -> dict[int, Layers]:
    """Return the versions that can still be asked for when a new one of `round` is stored.

    Versions of `round` and later are what an interrupted run left. A resume may go back as far as the timeline's floor:
    a version that was discarded after it is still needed there.
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
    # Names are listed apart, because a version of a model without norm layers has no tensors.
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
        raise _damaged(path, error) from error
    return {version: MappingProxyType(tensors) for version, tensors in layers.items()}


def _read_header(path: Path) -> tuple[int, ...]:
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
    try:
        return tuple(map(int, metadata["versions"].split()))
    except (KeyError, ValueError) as error:
        raise SafetensorError("it does not say which versions it holds") from error


def _damaged(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"the stored layers in {path} cannot be read: {error}. Put the file back from a copy, or start the run anew"
    )
