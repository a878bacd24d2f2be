"""A long content in files of limited size, which are put together again in any order; damage and loss are found."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from fedprophet.errors import CheckpointError
from fedprophet.storage.files import file_hash, parse_json, write_atomic_all

ENDING = ".fedpack"
FORMAT = 1
MOST_HEADER = 1024
LEAST_PART = 64 * 1024
AGAIN = "Copy it again from where it was packed"


@dataclass(frozen=True)
class _Header:
    """The first line of a part: the digest of the whole content, which part it is, and the digest of what follows."""

    format: int
    whole: str
    part: int
    parts: int
    digest: str


def parts_of(content: bytes, size: int) -> list[bytes]:
    """Return a content as parts of at most `size` bytes."""
    room = size - MOST_HEADER
    slices = [content[start : start + room] for start in range(0, len(content), room)]
    whole = file_hash(content).hexdigest()
    parts = []
    for number, data in enumerate(slices, start=1):
        header = _Header(FORMAT, whole, number, len(slices), file_hash(data).hexdigest())
        parts.append(json.dumps(asdict(header)).encode() + b"\n" + data)
    return parts


def write_parts(parts: Sequence[bytes], folder: Path) -> list[Path]:
    """Write parts as files."""
    files = {folder / f"part-{number:03d}{ENDING}": part for number, part in enumerate(parts, start=1)}
    write_atomic_all(files.items())
    return list(files)


def read_parts(folder: Path) -> bytes:
    """Return the content whose parts are in a folder; CheckpointError if some are missing, damaged or of another."""
    try:
        files = sorted(file for file in folder.iterdir() if file.name.endswith(ENDING))
    except OSError as error:
        raise CheckpointError(f"cannot read {folder}: {error.strerror}. Give the folder of the parts") from error
    if not files:
        raise CheckpointError(
            f"there is no part of a packed run in {folder}: they are called part-001{ENDING} and so on"
        )
    parts: dict[int, bytes] = {}
    first: tuple[Path, _Header] | None = None
    for file in files:
        header, data = _read_part(file)
        first = first or (file, header)
        if (header.whole, header.parts) != (first[1].whole, first[1].parts):
            raise CheckpointError(
                f"{first[0].name} and {file.name} in {folder} are of two packed runs. Put each into a folder of its own"
            )
        parts[header.part] = data
    assert first is not None
    return _joined(parts, first[1], folder)


def _joined(parts: Mapping[int, bytes], header: _Header, folder: Path) -> bytes:
    missing = sorted(set(range(1, header.parts + 1)) - parts.keys())
    if missing:
        some = ", ".join(map(str, missing[:5])) + (" and others" if len(missing) > 5 else "")
        raise CheckpointError(
            f"of the {header.parts} parts, {folder} lacks these: {some}. Copy them from where the run was packed"
        )
    content = b"".join(parts[number] for number in sorted(parts))
    if file_hash(content).hexdigest() != header.whole:
        raise CheckpointError(f"the parts in {folder} do not make up a packed run: some were altered. Pack it again")
    return content


def _read_part(file: Path) -> tuple[_Header, bytes]:
    try:
        content = file.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror}") from error
    line, _, data = content.partition(b"\n") if b"\n" in content[:MOST_HEADER] else (b"", b"", b"")
    header = _parse(line)
    if header is None:
        raise CheckpointError(f"{file} is damaged, or no part of a packed run. {AGAIN}")
    if header.format != FORMAT:
        raise CheckpointError(f"{file} has format {header.format}, and this version of FedProphet reads {FORMAT}")
    if file_hash(data).hexdigest() != header.digest:
        raise CheckpointError(f"{file} is damaged: it was cut or altered. {AGAIN}")
    return header, data


def _parse(line: bytes) -> _Header | None:
    try:
        header = _Header(**parse_json(line))
    except (ValueError, TypeError):
        return None
    numbers, texts = (header.format, header.part, header.parts), (header.whole, header.digest)
    sound = all(type(number) is int for number in numbers) and all(isinstance(text, str) for text in texts)
    return header if sound and 1 <= header.part <= header.parts else None
