"""Published files from the internet: fetched when asked, verified by their hash, whole or not there at all."""

import hashlib
import http.client
import logging
import os
import shutil
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path, PurePosixPath
from typing import IO, Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from fedprophet.errors import DataError
from fedprophet.progress import progress_bar
from fedprophet.storage.locks import folder_lock
from fedprophet.version import __version__

TIMEOUT = 30.0
"""Seconds without an answer after which a connection counts as dead."""
_CHUNK = 1 << 18

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Remote:
    """A published file: its address, and what it hashes to. The beginning of a hash is enough."""

    url: str
    algorithm: str
    digest: str

    @property
    def name(self) -> str:
        """The file's own name."""
        return self.url.rsplit("/", 1)[-1]


def cache_home() -> Path:
    """Return the user's own folder for what is fetched once: FEDPROPHET_CACHE, or the system's place for caches."""
    if given := os.environ.get("FEDPROPHET_CACHE"):
        return Path(given).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fedprophet"


def fetch(remote: Remote, folder: Path, offline: str) -> Path:
    """Return a published file in `folder`, fetched if it is not there; `offline` says what to do without a network.

    What a broken connection leaves stays in a hidden file, and the next call continues it.
    """
    target = folder / remote.name
    folder.mkdir(parents=True, exist_ok=True)
    with alone(folder):
        if target.exists():
            verify(target, remote)
            return target
        part = folder / f".{remote.name}.part"
        _download(remote.url, part, offline)
        try:
            verify(part, remote)
        except DataError:
            part.unlink()
            raise DataError(
                f"what came from {remote.url} is not the published file: its {remote.algorithm} is another one. "
                f"Try again later. {offline}"
            ) from None
        part.replace(target)
    return target


def verify(path: Path, remote: Remote) -> None:
    """Raise DataError if a file is not the published one."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, lambda: hashlib.new(remote.algorithm, usedforsecurity=False)).hexdigest()
    if not found.startswith(remote.digest):
        raise DataError(
            f"{path} is not the published file: its {remote.algorithm} is {found}, not {remote.digest}. "
            "Delete it and try again"
        )


def alone(folder: Path) -> AbstractContextManager[None]:
    """Wait until no other process works in a folder, and keep others waiting."""
    return folder_lock(folder, lambda: logger.warning("another process is working in %s: waiting for it", folder))


class Member:
    """A plain file of an archive. A failure to read it says that the archive is at fault."""

    def __init__(self, archive: Path, tar: tarfile.TarFile, entry: tarfile.TarInfo) -> None:
        self.name, self.size = entry.name, entry.size
        self._archive = archive
        self._content = tar.extractfile(entry)

    def read(self, size: int = -1) -> bytes:
        """Return the next `size` bytes, or all that are left."""
        assert self._content is not None  # only links and special files have no content
        with _blamed(self._archive):
            return self._content.read(size)


def members(archive: Path) -> Iterator[Member]:
    """Yield the plain files of a tar archive, compressed or not; nothing is written."""
    with archive.open("rb") as raw, _blamed(archive), tarfile.open(fileobj=raw, mode="r:*") as tar:
        for entry in tar:
            if entry.isreg():
                yield Member(archive, tar, entry)


@contextmanager
def _blamed(archive: Path) -> Iterator[None]:
    try:
        yield
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        reason = str(error) or type(error).__name__
        raise DataError(f"{archive} is damaged or not whole ({reason}). Delete it and fetch it again") from error


def unpack(archive: Path, folder: Path, top: str) -> Path:
    """Unpack the folder `top` of a tar archive into `folder`, where it appears whole or not at all.

    Only plain files below `top` are written, no links or devices. A name that leads out of the folder is an error.
    """
    staging = folder / f".{top}.part"
    with alone(folder):
        if (folder / top).exists():
            return folder / top
        shutil.rmtree(staging, ignore_errors=True)
        try:
            _unpack_into(staging, archive, top)
            if not (staging / top).is_dir():
                raise DataError(f"{archive} holds no folder {top}: it is another archive")
            os.sync()  # the content before the name: syncing tens of thousands of files one by one takes minutes
            (staging / top).rename(folder / top)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return folder / top


def _unpack_into(staging: Path, archive: Path, top: str) -> None:
    done, total = 0, archive.stat().st_size
    with progress_bar(in_bytes=True) as watch:
        for member in members(archive):
            path = PurePosixPath(member.name)
            if path.is_absolute() or ".." in path.parts or "\\" in member.name:
                raise DataError(f"{archive} is not safe to unpack: it holds a file named {member.name!r}")
            if path.parts[:1] == (top,) and len(path.parts) > 1:
                target = staging.joinpath(*path.parts)
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("wb") as file:
                    shutil.copyfileobj(member, file)
            done += member.size
            watch(f"unpacking {archive.name}", done, total)


def _download(url: str, part: Path, offline: str) -> None:
    """Fetch an address into a file, or continue the one that is there."""
    have = part.stat().st_size if part.exists() else 0
    with _connect(url, have, offline) as response:
        resumed = have > 0 and response.status == HTTPStatus.PARTIAL_CONTENT
        have = have if resumed else 0
        length = response.headers.get("Content-Length")
        total = have + int(length) if length else None
        try:
            with part.open("ab" if resumed else "wb") as file, progress_bar(in_bytes=True) as watch:
                for chunk in _chunks(response, url):
                    file.write(chunk)
                    have += len(chunk)
                    watch(part.name[1:-5], have, total)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise DataError(
                f"cannot write {part}: {error.strerror or error}. Make room there or correct its permissions, "
                "then run the command again: it goes on where it stopped"
            ) from error
    if total is not None and have < total:
        raise DataError(_cut_off(url, f"after {have} of {total} bytes"))


def _connect(url: str, start: int, offline: str) -> Any:
    """Return the open answer to a request for the bytes from `start` on."""
    headers = {"User-Agent": f"fedprophet/{__version__}"}
    if start:
        headers["Range"] = f"bytes={start}-"
    try:
        return urlopen(Request(url, headers=headers), timeout=TIMEOUT)
    except (OSError, http.client.HTTPException) as error:
        if start and isinstance(error, HTTPError) and error.code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            return _connect(url, 0, offline)  # all of it is there, or more: start again
        reason = getattr(error, "reason", None) or error
        reason = getattr(reason, "strerror", None) or reason
        raise DataError(f"cannot fetch {url}: {reason}. {offline}") from error


def _chunks(response: IO[bytes], url: str) -> Iterator[bytes]:
    while True:
        try:
            chunk = response.read(_CHUNK)
        except (OSError, http.client.HTTPException) as error:
            raise DataError(_cut_off(url, f"({error or type(error).__name__})")) from error
        if not chunk:
            return
        yield chunk


def _cut_off(url: str, how: str) -> str:
    return f"the connection to {url} broke off {how}. Run the command again: it goes on where it stopped"
