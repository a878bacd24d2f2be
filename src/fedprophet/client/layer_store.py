"""What stays on a client between rounds: versions of its own (norm) layers, in memory and on disk.

A version is the round that made it; a `Timeline` says which versions count. So a run that goes back to an older
checkpoint finds the layers of that time: it asks for versions before the round it repeats, and overwrites later ones.

Each version has a digest. A client's file has those of its versions, and a checkpoint those of all clients: a file that
is lost, altered or older than the checkpoint is never mistaken for the client's layers.
"""

import math
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor

from fedprophet.errors import CheckpointError
from fedprophet.going_on import how_to_resume
from fedprophet.messages.modules import digest
from fedprophet.messages.values import Timeline
from fedprophet.storage.bounded import BoundedCache
from fedprophet.storage.files import tensors_from_bytes, tensors_to_bytes, write_atomic_all

CLIENTS_PER_FOLDER = 1000
ENDING = ".safetensors"
Key = tuple[str, int]
Layers = Mapping[str, Tensor]
LayerDigests = Mapping[str, Mapping[int, Mapping[int, str]]]
"""The digest of each version of each client's layers, by architecture."""
RESTORE = "Put it back from a copy, or start the run anew"


@dataclass
class _Client:
    """A client in memory; `dirty` until its content is in its file, or handed out to be written."""

    versions: dict[int, Layers] = field(default_factory=dict)
    dirty: bool = False

    @property
    def size(self) -> int:
        return sum(tensor.nbytes for layers in self.versions.values() for tensor in layers.values())


class _Content(NamedTuple):
    """What a client's file is to hold. Neither table is ever changed: the store replaces them."""

    versions: Mapping[int, Layers]
    digests: Mapping[int, str]


class ClientStore:
    """The own layers of all clients that have trained; clients that have not cost nothing.

    With a directory, about `memory_limit` bytes of layers stay in memory at most, and the next store on the same
    directory finds what was flushed. Flush before writing a checkpoint that relies on the layers. Without a directory
    everything stays in memory.

    Files are believed as they are found, until the store is told what to `expect`.
    """

    def __init__(self, directory: Path | None, memory_limit: int) -> None:
        self.directory = directory
        limit = math.inf if directory is None else memory_limit
        self._clients: BoundedCache[Key, _Client] = BoundedCache(limit, lambda client: client.size, self._leave)
        self._digests: dict[Key, dict[int, str]] = {}
        self._complete = directory is None
        """Whether `_digests` has every client: then the files of others are left by an interrupted run."""
        self._lent: set[Key] = set()
        self._unwritten: dict[Key, _Content] = {}
        """What was handed out to be written and is not on the disk yet: until then it is found here."""
        self._writing = threading.Lock()

    def expect(self, digests: LayerDigests) -> None:
        """Hold the files against a checkpoint from now on; CheckpointError if some are missing."""
        self._digests = {
            (architecture, client): dict(versions)
            for architecture, clients in digests.items()
            for client, versions in clients.items()
        }
        self._complete = True
        paths = [self._path(key) for key in self._digests]
        here = {folder: _names(folder) for folder in {path.parent for path in paths}}
        missing = [path for path in paths if path.name not in here[path.parent]]
        if missing:
            others = f" and {len(missing) - 1} other files" if len(missing) > 1 else ""
            raise CheckpointError(
                f"missing: {min(missing)}{others}. Without the clients' layers the model would be another. Put back "
                f"{self.directory} from a copy, or start the run anew"
            )

    def digests(self, round: int) -> LayerDigests:
        """Return the digests of all versions up to a round, for the checkpoint of that round."""
        if self.directory is not None:
            found = set() if self._complete else _keys(self.directory) - self._digests.keys()
            for key in found | self._lent:
                self._digests[key] = _read_digests(self._path(key))
            self._complete, self._lent = True, set()
        table: dict[str, dict[int, dict[int, str]]] = {}
        for (architecture, client), versions in sorted(self._digests.items()):
            settled = {version: versions[version] for version in sorted(versions) if version <= round}
            if settled:
                table.setdefault(architecture, {})[client] = settled
        return table

    def lend(self, architecture: str, client: int, timeline: Timeline, before: int) -> None:
        """Check the file of a client that another process is going to read and write; `digests` looks at it again."""
        key = (architecture, client)
        if self.directory is not None and key not in self._lent:
            self.get(architecture, client, timeline, before)
            self._clients.pop(key)
            self._lent.add(key)

    def get(self, architecture: str, client: int, timeline: Timeline, before: int) -> Layers | None:
        """Return the newest layers that count, made before round `before`; they must not be changed in place."""
        key = (architecture, client)
        found = self._find(key)
        version = timeline.newest(self._digests.get(key, {}), before)
        if version is None:
            return None
        if found is None or version not in found.versions:
            raise self._other(key, version)
        return found.versions[version]

    def put(self, architecture: str, client: int, round: int, tensors: Layers, timeline: Timeline) -> None:
        """Store a copy of the layers that a client has after `round`; drop its versions of no further use."""
        key = (architecture, client)
        found = self._find(key) or _Client()
        copy = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
        versions = {**_useful(found.versions, round, timeline), round: MappingProxyType(copy)}
        known = {**self._digests.get(key, {}), round: digest(copy)}
        self._digests[key] = {version: known[version] for version in versions}
        found.versions = versions
        found.dirty = True
        self._clients.put(key, found)

    def flush(self) -> None:
        """Write every client that has changed; when this returns, all of it is on the disk."""
        self.changes()()

    def changes(self) -> Callable[[], None]:
        """Return what writes every client that has changed, as it is now; another thread may call it, once.

        What could not be written is among the next changes.
        """
        if self.directory is None:
            return lambda: None
        for key, client in self._clients.items():
            self._hand_out(key, client)
        keys = list(self._unwritten)
        return lambda: self._write(keys)

    def files(self, timeline: Timeline, rounds: Collection[int]) -> Iterator[tuple[str, bytes]]:
        """Yield each client's file, after its path in the directory, with only the layers that count after `rounds`."""
        assert self.directory is not None
        for key, digests in sorted(self._digests.items()):
            found, newest = self._find(key), {timeline.newest(digests, number + 1) for number in rounds}
            versions: dict[int, Layers] = {}
            for version in sorted(version for version in newest if version is not None):
                if found is None or version not in found.versions:
                    raise self._other(key, version)
                versions[version] = found.versions[version]
            yield self._path(key).relative_to(self.directory).as_posix(), _to_bytes(versions, digests)

    def _hand_out(self, key: Key, client: _Client) -> None:
        if client.dirty:
            self._unwritten[key] = _Content(client.versions, self._digests[key])
            client.dirty = False

    def _find(self, key: Key) -> _Client | None:
        found = self._clients.get(key)
        if found is None and key in self._unwritten:
            return self._clients.put(key, _Client(dict(self._unwritten[key].versions)))
        if found is None and self.directory is not None and (key in self._digests or not self._complete):
            versions = self._read(key)
            found = None if versions is None else self._clients.put(key, _Client(versions))
        return found

    def _read(self, key: Key) -> dict[int, Layers] | None:
        """Return the layers in a client's file, as far as they are expected; None where it has none."""
        read = _read_versions(self._path(key))
        if read is None:
            return None
        versions, digests = read
        known = self._digests.setdefault(key, digests)
        for version in versions.keys() & known.keys():
            if digests[version] != known[version]:
                raise self._other(key, version)
        return {version: layers for version, layers in versions.items() if version in known}

    def _other(self, key: Key, version: int) -> CheckpointError:
        return CheckpointError(
            f"{self._path(key)} does not hold the layers that client {key[1]} had after round {version}: it was lost, "
            f"altered, or replaced by an older copy. {RESTORE}"
        )

    def _leave(self, key: Key, client: _Client) -> None:
        """A client that has changed is written before it leaves memory."""
        if client.dirty and self.directory is not None:
            self._hand_out(key, client)
            self._write([key])

    def _write(self, keys: Iterable[Key]) -> None:
        """Write clients that were handed out, unless that was done meanwhile; one thread at a time."""
        assert self.directory is not None
        with self._writing:
            contents = {key: self._unwritten[key] for key in keys if key in self._unwritten}
            advice = f"Make room there, then go on with: {how_to_resume(self.directory.parent)}"
            write_atomic_all(((self._path(key), _to_bytes(*content)) for key, content in contents.items()), advice)
            for key, content in contents.items():
                if self._unwritten[key] is content:  # and not a newer one, which waits for its turn
                    del self._unwritten[key]

    def _path(self, key: Key) -> Path:
        assert self.directory is not None
        architecture, client = key
        return self.directory / architecture / str(client // CLIENTS_PER_FOLDER) / f"{client}{ENDING}"


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


def _names(folder: Path) -> set[str]:
    try:
        return {path.name for path in folder.iterdir()}
    except (FileNotFoundError, NotADirectoryError):
        return set()


def _keys(directory: Path) -> set[Key]:
    """Return the clients that have a file."""
    files = directory.glob(f"*/*/*{ENDING}")
    return {(file.parts[-3], int(file.stem)) for file in files if file.stem.isdecimal()}


def _to_bytes(versions: Mapping[int, Layers], digests: Mapping[int, str]) -> bytes:
    # A Ctrl-C may have come after one was changed and before the other was.
    versions = {version: layers for version, layers in versions.items() if version in digests}
    tensors = {f"{version}/{name}": value for version, layers in versions.items() for name, value in layers.items()}
    # Versions are listed apart, because a version of a model without norm layers has no tensors.
    about = {"versions": " ".join(map(str, versions)), "digests": " ".join(digests[version] for version in versions)}
    return tensors_to_bytes(tensors, about)


def _read_versions(path: Path) -> tuple[dict[int, Layers], dict[int, str]] | None:
    """Return the layers in a client's file and their digests; None where there is no file."""
    try:
        recorded = _read_header(path)
        layers: dict[int, dict[str, Tensor]] = {version: {} for version in recorded}
        for key, value in tensors_from_bytes(path.read_bytes()).items():
            number, _, name = key.partition("/")
            layers[int(number)][name] = value
    except FileNotFoundError:
        return None
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise _unreadable(path, error) from error
    digests = {version: digest(tensors) for version, tensors in layers.items()}
    for version, written in recorded.items():
        if written != digests[version]:
            raise _unreadable(path, f"its layers of round {version} are not those that were written")
    return {version: MappingProxyType(tensors) for version, tensors in layers.items()}, digests


def _read_digests(path: Path) -> dict[int, str]:
    """Return the digests of the versions in a client's file, from its header; none if it has no file."""
    try:
        return _read_header(path)
    except FileNotFoundError:
        return {}
    except (OSError, SafetensorError) as error:
        raise _unreadable(path, error) from error


def _read_header(path: Path) -> dict[int, str]:
    """Return the versions that a file says it holds, and their digests."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
    try:
        return dict(zip(map(int, metadata["versions"].split()), metadata["digests"].split(), strict=True))
    except (KeyError, ValueError) as error:
        raise SafetensorError("it does not say which versions it holds") from error


def _unreadable(path: Path, why: object) -> CheckpointError:
    return CheckpointError(f"the stored layers in {path} cannot be read: {why}. {RESTORE}")
