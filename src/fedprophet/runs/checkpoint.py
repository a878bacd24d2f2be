"""Checkpoints: a method's state on disk, whole or not at all, as JSON and safetensors only.

A checkpoint is a folder `round-000012` with `state.json` and files of tensors. It is written under another name, synced
and renamed, and digests protect all files. So a checkpoint that a kill, a full disk or a flipped bit has damaged is
recognised, and the one before it is used. Tensors that have not changed since the checkpoint before are in files that
both have (`runs.tensor_files`). It also knows what else the run's folder holds (`runs.folder`).
"""

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from safetensors import SafetensorError
from torch import Tensor

from fedprophet.config.compare import completed, differences
from fedprophet.config.config import Config, machine_keys
from fedprophet.errors import CheckpointError
from fedprophet.going_on import how_to_resume
from fedprophet.messages.codec import CodecError, decode, encode
from fedprophet.runs.folder import FolderContents
from fedprophet.runs.tensor_files import Snapshot, TensorFiles, digest_of, file_name
from fedprophet.storage.files import (
    file_hash,
    make_folder,
    sync_folder,
    tensor_pieces,
    tensors_from_bytes,
    write_synced,
)
from fedprophet.version import __version__

FORMAT = 3
"""Counts up when a state gets a field or loses one, since a state is read with exactly its fields, and when what a
checkpoint holds gets another meaning, as the names of heads did. Other formats are refused."""
STATE = "state.json"
"""The file of a checkpoint's JSON."""
PUT_BACK = "A run goes on with the settings that it was started with: put them back into its config.toml"
_NAME = re.compile(r"round-([0-9]{6,})")
S = TypeVar("S")


class Loaded(NamedTuple, Generic[S]):
    """The newest whole state, the round it was saved after, notes for the user, and what the folder held then."""

    state: S
    round: int
    notes: list[str]
    folder: FolderContents


class Raw(NamedTuple):
    """A checkpoint as it is written: the content of state.json, without its digest, and the tensors that it names."""

    document: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    def files(self) -> dict[str, list[memoryview]]:
        """Return the checkpoint's files by name, each in pieces; the tensors are in one file."""
        pieces = tensor_pieces(self.tensors)
        digest = digest_of(pieces)
        names = {digest: {name: name for name in self.tensors}}
        document = _sealed({**self.document, "format": FORMAT, "tensors": names})
        return {STATE: [memoryview(document)], file_name(digest): pieces}


class _UnusableError(Exception):
    """Why a checkpoint cannot be used."""


class _OtherConfigurationError(_UnusableError):
    """What a checkpoint's configuration has that the run's config.toml has not."""


class Checkpoints:
    """The checkpoints of one run, in the folder `checkpoints` of its directory; the newest `keep` stay."""

    def __init__(self, directory: Path, config: Config, keep: int = 2) -> None:
        self._directory = directory
        self._config = config
        self._keep = keep
        self._files = TensorFiles()

    def present(self) -> bool:
        """Whether there is a checkpoint at all, usable or not."""
        return bool(self._folders())

    def save(self, state: object, round: int, known: FolderContents, **kept: int | None) -> None:
        """Write the state after a round, and what is known of the rest of the run's folder.

        Older checkpoints are removed only once this one is on the disk. The newest one up to the round `proven`, from
        which training has certainly gone on, always stays, and so does that of the round `best`, where there is one:
        its model is the best model of later ones, with which it shares its files.
        """
        self.prepare(state, round, known, **kept)()

    def prepare(
        self,
        state: object,
        round: int,
        known: FolderContents,
        proven: int | None = None,
        best: int | None = None,
    ) -> Callable[[], None]:
        """Return what saves a state as it is now (see `save`); another thread may call it, before the next is prepared.

        What it needs of a GPU's memory is copied here. Tensors in the host's memory are not copied: a state is never
        changed in place.
        """
        data, tensors = encode(state)
        snapshot = self._files.snapshot(tensors)
        document = {
            "format": FORMAT,
            "version": __version__,
            "round": round,
            "config": self._config.model_dump(),
            "state": data,
            "folder": encode(known)[0],
        }

        def write() -> None:
            self._write(document, snapshot, round)
            self._prune(round, round if proven is None else proven, best)

        return write

    def load(self, kind: type[S], round: int | None = None) -> Loaded[S]:
        """Return the newest whole state of this configuration, or that of a round; CheckpointError if there is none."""
        return self._newest(partial(_read_state, kind), round)

    def load_raw(self, round: int | None = None) -> Loaded[Raw]:
        """Return the newest whole checkpoint as it is written, or that of a round, like `load`."""
        return self._newest(lambda folder, document: Raw(document, _read_tensors(folder, document)), round)

    def _newest(self, read: Callable[[Path, dict[str, Any]], S], round: int | None) -> Loaded[S]:
        """Return what is read from the newest checkpoint that is whole."""
        reasons: list[str] = []
        advice: list[str] = []
        folders = self._folders()
        if round is not None and round not in folders:
            rounds = ", ".join(map(str, folders)) or "none"
            raise CheckpointError(f"there is no checkpoint of round {round} in {self._directory}; there are: {rounds}")
        for number, folder in folders.items() if round is None else [(round, folders[round])]:
            try:
                document = self._read_document(folder)
                state, known = read(folder, document), _read_contents(document)
            except _UnusableError as reason:
                reasons.append(f"the checkpoint of round {number} is not used: {reason}")
                if isinstance(reason, _OtherConfigurationError):
                    advice = [PUT_BACK]
                continue
            notes = [*reasons, f"went back to the checkpoint of round {number}"] if reasons else []
            if document["version"] != __version__:
                notes.append(f"the checkpoint was written by FedProphet {document['version']}; this is {__version__}")
            return Loaded(state, number, notes, known)
        if not reasons:
            raise CheckpointError(f"there is no checkpoint in {self._directory}")
        raise CheckpointError("\n".join((f"no checkpoint in {self._directory} can be used:", *reasons, *advice)))

    def known_contents(self) -> FolderContents | None:
        """Return what the newest sound state.json knows of the rest of the run's folder, if there is one."""
        with suppress(CheckpointError):
            for folder in self._folders().values():
                with suppress(_UnusableError):
                    return _read_contents(self._read_document(folder))
        return None

    def _folders(self) -> dict[int, Path]:
        """Return the folder of every checkpoint, newest first, also if it was moved aside (see `_put_in_place`)."""
        found: dict[int, Path] = {}
        try:
            names = sorted(path.name for path in self._directory.iterdir())
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise CheckpointError(f"cannot read {self._directory}: {error.strerror}") from error
        for name in names:
            match = _NAME.fullmatch(name.removesuffix(".old"))
            if match:
                found.setdefault(int(match[1]), self._directory / name)
        return dict(sorted(found.items(), reverse=True))

    def _write(self, document: Mapping[str, Any], snapshot: Snapshot, round: int) -> None:
        folder = self._directory / f"round-{round:06d}"
        try:
            make_folder(self._directory)
            self._tidy()
            temporary = folder.with_suffix(".tmp")
            temporary.mkdir()
            names = self._files.write(temporary, snapshot)
            write_synced(temporary / STATE, _sealed({**document, "tensors": names}))
            _put_in_place(temporary, folder)
        except OSError as error:
            with suppress(OSError):
                self._tidy()
            raise CheckpointError(self._failure(folder, error)) from error
        self._files.written(folder, snapshot, names)

    def _read_document(self, folder: Path) -> dict[str, Any]:
        """Return the content of state.json; it has to be whole, of our format and of this configuration."""
        text = _read(folder / STATE)
        try:
            document = json.loads(text)
        except (ValueError, RecursionError):
            raise _UnusableError(f"its {STATE} is damaged") from None
        if not isinstance(document, dict) or "format" not in document:
            raise _UnusableError(f"its {STATE} is not one of FedProphet's")
        if document["format"] != FORMAT:
            version = document.get("version", "another version")
            raise _UnusableError(
                f"it has format {document['format']!r}, written by FedProphet {version}; "
                f"this FedProphet {__version__} reads format {FORMAT} alone"
            )
        if not _authentic(document, text):
            raise _UnusableError(f"its {STATE} is damaged")
        different = differences(self._config, completed(document["config"]), machine_keys())
        if different:
            raise _OtherConfigurationError("it was made by another configuration: " + "; ".join(different))
        return document

    def _newest_whole(self) -> int | None:
        with suppress(CheckpointError):
            for number, folder in self._folders().items():
                with suppress(_UnusableError):
                    for _ in _tensor_files(folder, self._read_document(folder)):
                        pass
                    return number
        return None

    def _failure(self, folder: Path, error: OSError) -> str:
        newest = self._newest_whole()
        last = f"The last whole checkpoint is of round {newest}"
        return (
            f"cannot write the checkpoint {folder}: {error.strerror or error}. "
            f"{'There is no whole checkpoint yet' if newest is None else last}. Make room there or correct its "
            f"permissions, then go on with: {how_to_resume(self._directory.parent)}"
        )

    def _tidy(self) -> None:
        """Remove what an interrupted save has left; put back a checkpoint that was moved aside and not replaced."""
        for path in list(self._directory.iterdir()):
            if not _NAME.fullmatch(path.stem):
                continue
            if path.suffix == ".old" and not path.with_suffix("").exists():
                path.rename(path.with_suffix(""))
            elif path.suffix in (".tmp", ".old"):
                shutil.rmtree(path, ignore_errors=True)

    def drop_after(self, round: int) -> None:
        """Remove the checkpoints of later rounds, which are played again."""
        self._remove(number for number in self._folders() if number > round)

    def rounds(self) -> list[int]:
        """Return the rounds that have a checkpoint, usable or not, the newest first."""
        return list(self._folders())

    def newest(self, round: int) -> int | None:
        """Return the newest checkpoint up to a round, usable or not."""
        return next((number for number in self._folders() if number <= round), None)

    def _prune(self, round: int, proven: int, best: int | None) -> None:
        """Remove all but the newest checkpoints up to this round, the proven one and that of the best round."""
        old = [number for number in self._folders() if number <= round][self._keep :]
        self._remove(number for number in old if number not in (self.newest(proven), best))

    def _remove(self, rounds: Iterable[int]) -> None:
        """Remove checkpoints. They are renamed first: none is ever half there."""
        for number in list(rounds):
            folder = self._directory / f"round-{number:06d}"
            with suppress(OSError):
                shutil.rmtree(folder.rename(folder.with_suffix(".tmp")), ignore_errors=True)


def _put_in_place(temporary: Path, folder: Path) -> None:
    """Give a folder its name when its files are on the disk; one of the same name is moved aside until then."""
    aside = folder.with_suffix(".old")
    sync_folder(temporary)
    if folder.exists():
        folder.rename(aside)
    temporary.rename(folder)
    sync_folder(folder.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _read_state(kind: type[S], folder: Path, document: Mapping[str, Any]) -> S:
    try:
        return decode(kind, document["state"], _read_tensors(folder, document))
    except (CodecError, SafetensorError, LookupError) as error:
        raise _UnusableError(f"its state does not fit this version of FedProphet: {error}") from error


def _read_contents(document: Mapping[str, Any]) -> FolderContents:
    if "folder" not in document:
        raise _UnusableError(f"its {STATE} does not say what else the run's folder held")
    try:
        return decode(FolderContents, document["folder"], {})
    except CodecError as error:
        raise _UnusableError(f"what it says of its folder does not fit this version of FedProphet: {error}") from error


def _read_tensors(folder: Path, document: Mapping[str, Any]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for blob, names in _tensor_files(folder, document):
        stored = tensors_from_bytes(blob)
        tensors |= {name: stored[inside] for name, inside in names.items()}
    return tensors


def _tensor_files(folder: Path, document: Mapping[str, Any]) -> Iterator[tuple[bytes, Mapping[str, str]]]:
    """Yield the content of each file of tensors, which must be whole, and what its tensors are called in the state."""
    for digest, names in document["tensors"].items():
        path = folder / file_name(digest)
        blob = _read(path)
        if _digest(blob) != digest:
            raise _UnusableError(f"its {path.name} is damaged")
        yield blob, names


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _UnusableError(f"its {path.name} cannot be read: {error.strerror}") from error


def _sealed(document: Mapping[str, Any]) -> bytes:
    """Return a document with its digest, as it is written."""
    return _dump({**document, "digest": _digest(_dump(document))})


def _authentic(document: dict[str, Any], text: bytes) -> bool:
    """Take the digest out of a document; whether it fits the rest, and `text` is what we wrote, to the byte."""
    digest = document.pop("digest", None)
    try:
        return digest == _digest(_dump(document)) and text == _sealed(document)
    except ValueError:
        # A number that grew beyond a float's range cannot be written again.
        return False


def _dump(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()


def _digest(data: bytes) -> str:
    return file_hash(data).hexdigest()
