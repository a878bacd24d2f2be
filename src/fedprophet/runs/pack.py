"""A run in as few bytes as possible, in files of limited size, to go on with it on another machine.

Only what is needed for that is packed: one checkpoint, the journal and timings up to it, the configuration, and of each
client's layers those that it may still be asked for. A finished run also has its results and its model. All of it comes
back bit for bit.
"""

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple

from fedprophet.client.layer_store import ClientStore
from fedprophet.config.load import load_config
from fedprophet.errors import CheckpointError, ConfigError
from fedprophet.messages.codec import decode, quoted
from fedprophet.messages.values import Timeline
from fedprophet.progress import Watch, unwatched
from fedprophet.runs.checkpoint import Checkpoints, Loaded, Raw
from fedprophet.runs.files import RunFiles, is_finished, model_fits
from fedprophet.runs.folder import check_folder
from fedprophet.runs.journal import Journal, Mark
from fedprophet.runs.run import expect_run
from fedprophet.sizes import format_size
from fedprophet.storage.files import (
    TRY_AGAIN,
    file_hash,
    make_folder,
    parse_json,
    sync_folder,
    write_error,
    write_synced,
)
from fedprophet.storage.locks import LOCK, folder_lock
from fedprophet.storage.parts import LEAST_PART, parts_of, read_parts, write_parts
from fedprophet.storage.squeeze import WIDTHS, expand, squeeze
from fedprophet.version import __version__

LAYERS_MEMORY = 10**8
_LENGTH = 8
"""Bytes of the numbers that say how long the manifest is."""
PARTS_OF_A_RUN = frozenset(path.name for path in vars(RunFiles(Path())).values() if path.name)
_NUMBER = 4
"""Most numbers of clients' layers are float32."""


class Packed(NamedTuple):
    """What was packed: into which files, how large they are, and which of the run's files were left out."""

    round: int
    finished: bool
    parts: tuple[Path, ...]
    bytes: int
    unpacked_bytes: int
    left_out: tuple[str, ...]
    notes: tuple[str, ...]


class Unpacked(NamedTuple):
    """The run that was unpacked, the round of its checkpoint, and notes for the user."""

    run: Path
    round: int
    finished: bool
    bytes: int
    notes: tuple[str, ...]


class _File(NamedTuple):
    path: str
    content: bytes
    kind: Literal["text", "tensors", "layers"]


# Packing -------------------------------------------------------------------------------------------------------------


def pack(
    run: Path,
    out: Path,
    part: int,
    round: int | Literal["best"] | None = None,
    most: int | None = None,
    watch: Watch = unwatched,
) -> Packed:
    """Pack a run, at its newest whole checkpoint or that of a round, into a folder of files of at most `part` bytes.

    At its best round so far a run is smallest: its best model is not another one. Where that holds for the newest
    checkpoint, too, as before there is a best round and at the end of a run, "best" is that one.
    With `most`, nothing is written if all parts together are larger than that.
    """
    if part < LEAST_PART:
        raise ConfigError(f"--part: a part has at least {LEAST_PART} bytes, not {part}")
    expect_run(run)
    _expect_empty(out)

    def refuse() -> None:
        raise CheckpointError(f"another process is working on {run}: wait for it, or stop it first")

    with folder_lock(run, refuse):
        files = RunFiles(run)
        checkpoints = Checkpoints(files.checkpoints, load_config(files.config))
        loaded = checkpoints.load_raw(None if round == "best" else round)
        best = _other_best(loaded)
        if round == "best" and best is not None:
            loaded = checkpoints.load_raw(best)
        layers = ClientStore(files.clients, LAYERS_MEMORY)
        notes = [*loaded.notes, *check_folder(files, layers, loaded.folder, to_read=False)]
        finished = is_finished(files) and loaded.round == max(checkpoints.rounds())
        contents = [*_contents(files, layers, loaded), *(_results(files) if finished else ())]
        about = {"name": run.absolute().name, "round": loaded.round, "finished": finished}
        packed = parts_of(_squeezed(contents, about, watch), part)
        size = sum(map(len, packed))
        if most is not None and size > most:
            raise _too_large(size, most, best if best in checkpoints.rounds() else None)
        parts = write_parts(packed, out)
    return Packed(
        round=loaded.round,
        finished=finished,
        parts=tuple(parts),
        bytes=size,
        unpacked_bytes=sum(len(file.content) for file in contents),
        left_out=tuple(_left_out(run, {file.path for file in contents})),
        notes=tuple(notes),
    )


def _expect_empty(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        what = "is not empty" if folder.is_dir() else "is a file"
        raise ConfigError(f"{folder} {what}, and nothing is overwritten. Give another folder with --out")


def _other_best(loaded: Loaded[Raw]) -> int | None:
    """Return the best round of a checkpoint whose best model is another than its model."""
    state = loaded.state.document["state"]
    best: int | None = state["best"]["round"] if state["best"] and state["best_model"] != state["model"] else None
    return best


def _too_large(size: int, most: int, best: int | None) -> ConfigError:
    smaller = "" if best is None else f". The checkpoint of the best round, {best}, takes less: --round best"
    return ConfigError(f"--most: the parts take {size} bytes ({format_size(size)}), and {most} are allowed{smaller}")


def _contents(files: RunFiles, layers: ClientStore, loaded: Loaded[Raw]) -> Iterator[_File]:
    """Yield all that a resume from the checkpoint needs."""
    for file in (files.config, files.inputs, files.setup, files.tracking, files.flower):
        if file.exists():
            yield _File(file.name, file.read_bytes(), "text")
    if files.start.exists():
        yield _File(files.start.name, files.start.read_bytes(), "tensors")
    for file, mark in ((files.journal, loaded.folder.journal), (files.timings, loaded.folder.timings)):
        if file.exists():
            yield _File(file.name, _up_to(file, mark), "text")
    checkpoint = _without_unused(loaded.state)
    folder = f"{files.checkpoints.name}/round-{loaded.round:06d}"
    for name, pieces in checkpoint.files().items():
        yield _File(f"{folder}/{name}", b"".join(pieces), "tensors" if name.endswith(".safetensors") else "text")
    state = checkpoint.document["state"]
    timeline = Timeline(tuple((first, last) for first, last in state["discarded"]))
    rounds = [loaded.round, *([state["best"]["round"]] if state["best"] else [])]
    for path, content in layers.files(timeline, rounds):
        yield _File(f"{files.clients.name}/{path}", content, "layers")


def _up_to(file: Path, mark: Mark) -> bytes:
    content = file.read_bytes()
    return content[: mark.bytes] if Journal(file).begins_with(mark) else content


def _without_unused(raw: Raw) -> Raw:
    """Return a checkpoint without the best model while there is no best round: until there is, nobody asks for it."""
    state = raw.document["state"]
    if state["best"] is None:
        state = {name: state.get(name.removeprefix("best_"), value) for name, value in state.items()}
    named = set(_texts(state))
    tensors = {name: value for name, value in raw.tensors.items() if name in named}
    return Raw({**raw.document, "state": state}, tensors)


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts in a JSON value, the names of tensors among them."""
    if isinstance(value, str):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _texts(inner)


def _results(files: RunFiles) -> Iterator[_File]:
    """Yield what a finished run has made; a model that was altered is made again instead."""
    if model_fits(files):
        yield _File(files.results.name, files.results.read_bytes(), "text")
        yield _File(files.model.name, files.model.read_bytes(), "tensors")


def _left_out(run: Path, packed: set[str]) -> list[str]:
    """Return the files and folders of a run of which nothing was packed."""
    return sorted(
        path.relative_to(run).as_posix()
        for path in (*run.iterdir(), *(run / "checkpoints").iterdir())
        if path.name != LOCK and not any(PurePosixPath(file).is_relative_to(path.relative_to(run)) for file in packed)
    )


def _squeezed(files: Sequence[_File], about: Mapping[str, Any], watch: Watch) -> bytes:
    """Return files as one content: a manifest, behind its lengths before and after, and what is in them, squeezed.

    The files come one after the other, and so do the pieces that they are squeezed in; where one piece ends is not
    always where a file does. A piece says its length, its width, which earlier one it is the distance to, and the
    length that it has when it is squeezed.
    """
    total, done = sum(len(file.content) for file in files), 0
    pieces: list[tuple[int, int, int | None, int]] = []
    squeezed: list[bytes] = []
    similar: dict[tuple[str, int], tuple[int, memoryview]] = {}
    for name, width, data in _pieces(files):
        forms: list[tuple[bytes, int | None]] = [(squeeze(data, width), None)]
        if name:
            number, like = similar.setdefault((name, len(data)), (len(pieces), data))
            forms += [] if like is data else [(squeeze(data, width, like), number)]
        best, earlier = min(forms, key=lambda form: len(form[0]))
        pieces.append((len(data), width, earlier, len(best)))
        squeezed.append(best)
        done += len(data)
        watch("packing", done, total)
    listed = [{"path": f.path, "bytes": len(f.content), "digest": file_hash(f.content).hexdigest()} for f in files]
    manifest = json.dumps({"version": __version__, **about, "files": listed, "pieces": pieces}).encode()
    short = squeeze(manifest, 1)
    lengths = (len(data).to_bytes(_LENGTH, "little") for data in (manifest, short))
    return b"".join((*lengths, short, *squeezed))


def _pieces(files: Iterable[_File]) -> Iterator[tuple[str, int, memoryview]]:
    """Yield what is squeezed together: a name that similar pieces share, the width, and the data."""
    for kind, group in groupby(files, lambda file: file.kind):
        if kind == "layers":
            yield "", _NUMBER, memoryview(b"".join(file.content for file in group))
            continue
        for file in group:
            yield from _tensors(memoryview(file.content)) if kind == "tensors" else [("", 1, memoryview(file.content))]


def _tensors(content: memoryview) -> Iterator[tuple[str, int, memoryview]]:
    """Yield the header of a safetensors file, and its tensors in their order."""
    start = 8 + int.from_bytes(content[:8], "little")
    yield "", 1, content[:start]
    header = parse_json(bytes(content[8:start]))
    header.pop("__metadata__", None)
    for name, about in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = about["data_offsets"]
        width = (end - begin) // max(1, prod(about["shape"]))
        yield name.rpartition("/")[2], width if width in WIDTHS else 1, content[start + begin : start + end]


# Unpacking -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Listed:
    path: str
    bytes: int
    digest: str


@dataclass(frozen=True)
class _Manifest:
    """What a packed run says of itself (see `_squeezed`)."""

    version: str
    name: str
    round: int
    finished: bool
    files: tuple[_Listed, ...]
    pieces: tuple[tuple[int, int, int | None, int], ...]


def unpack(folder: Path, out: Path | None = None, watch: Watch = unwatched) -> Unpacked:
    """Unpack a run from the folder of its parts; without `out` it gets the name that it had, in runs/.

    Nothing is there until everything is.
    """
    stream = memoryview(read_parts(folder))
    try:
        manifest, rest = _read_manifest(stream)
        run = out or Path("runs", manifest.name)
        _expect_empty(run)
        files = list(_expanded(manifest, rest, watch))
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            f"what is packed in {folder} is no run, or was altered ({error}). Pack it again"
        ) from None
    _write(run, files)
    notes = []
    if manifest.version != __version__:
        notes.append(f"it was packed by FedProphet {manifest.version}; this is {__version__}")
    return Unpacked(run, manifest.round, manifest.finished, sum(len(content) for _, content in files), tuple(notes))


def _read_manifest(stream: memoryview) -> tuple[_Manifest, memoryview]:
    """Return the manifest, and what follows it."""
    length, short = (int.from_bytes(stream[start : start + _LENGTH], "little") for start in (0, _LENGTH))
    start = 2 * _LENGTH
    text = expand(stream[start : start + short], length, 1)
    about = decode(_Manifest, parse_json(text), {})
    if not _plain_name(about.name):
        raise ValueError("it has no name")
    if len({file.path for file in about.files}) < len(about.files):
        raise ValueError("a file is there twice")
    for file in about.files:
        parts = file.path.split("/")
        if parts[0] not in PARTS_OF_A_RUN or not all(map(_plain_name, parts)):
            raise ValueError(f"{quoted(file.path)} is no file of a run")
    return about, stream[start + short :]


def _plain_name(name: str) -> bool:
    """Whether a name is that of one file, and neither a path nor the way out of a folder."""
    return name not in ("", ".", "..") and not set(name) & set("/\\\0")


def _expanded(manifest: _Manifest, data: memoryview, watch: Watch) -> Iterator[tuple[str, memoryview]]:
    """Yield the path and content of each file."""
    pieces: list[bytes] = []
    total, done = sum(file.bytes for file in manifest.files), 0
    for length, width, earlier, short in manifest.pieces:
        if min(length, short) < 0 or (earlier is not None and not 0 <= earlier < len(pieces)):
            raise ValueError("it has lengths that cannot be")
        like = None if earlier is None else pieces[earlier]
        pieces.append(expand(data[:short], length, width, like))
        data, done = data[short:], done + length
        watch("unpacking", done, total)
    content, start = memoryview(b"".join(pieces)), 0
    for file in manifest.files:
        part = content[start : start + file.bytes]
        if file_hash(part).hexdigest() != file.digest:
            raise ValueError(f"{file.path} is another")
        yield file.path, part
        start += file.bytes


def _write(run: Path, files: Iterable[tuple[str, memoryview]]) -> None:
    """Write a run's files under another name, which is changed when all are on the disk."""
    whole = run.resolve()
    temporary = whole.with_name(f".{whole.name}.tmp")
    try:
        make_folder(whole.parent)
        shutil.rmtree(temporary, ignore_errors=True)  # what a kill has left
        for path, content in files:
            make_folder((temporary / path).parent)
            write_synced(temporary / path, content)
        for folder in {(temporary / path).parent for path, _ in files}:
            sync_folder(folder)
        temporary.rename(whole)
        sync_folder(whole.parent)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise write_error(run, error, TRY_AGAIN) from error
