"""What a run has so far, kept in another folder while it is played: its small files, and a pack to go on with."""

import gzip
import io
import json
import os
import re
import shutil
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from threading import Event, Thread
from typing import Any

from cifar10_table.measured import is_measured
from fedprophet.errors import CheckpointError, FedProphetError
from fedprophet.report.folders import EVALUATION
from fedprophet.runs.files import RunFiles, is_finished
from fedprophet.runs.pack import pack
from fedprophet.storage.files import write_atomic, write_atomic_all

PART, MOST = 16 * 2**20 - 4096, 60 * 2**20
"""The most bytes of a part of a packed run, and of all that is kept together: what some machines give back at once."""
SMALL, CELL = ".small.tar.gz", "cell.json"
PATHS = re.compile(rb'("?\b(?:root|cache|weights|starting_weights)"?\s*[=:]\s*)"[^"\n]*/([^"/\n]*)/*"')


def shortened(content: bytes) -> bytes:
    """Return a configuration or a JSON file with the names of files and folders instead of their paths."""
    return PATHS.sub(rb'\1"\2"', content)


def small_files(run: Path) -> dict[str, bytes]:
    """Return what belongs into the repository of a run, and what an evaluation goes on with, without paths."""
    files = RunFiles(run)
    lines = sorted((run / "evaluation").glob("*.jsonl"))
    plain = [file for file in (files.journal, files.timings, *lines) if file.is_file()]
    told = (files.config, files.inputs, files.setup, files.results, run / EVALUATION)
    return {
        **{file.relative_to(run).as_posix(): file.read_bytes() for file in plain},
        **{file.name: shortened(file.read_bytes()) for file in told if file.is_file()},
    }


def tar_of(folder: str, files: Mapping[str, bytes]) -> bytes:
    """Return files in a folder as a compressed tar; the same files give the same bytes."""
    data = io.BytesIO()
    with gzip.GzipFile(fileobj=data, mode="wb", mtime=0) as packed, tarfile.open(fileobj=packed, mode="w") as tar:
        for name, content in sorted(files.items()):
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return data.getvalue()


def read_tar(file: Path) -> dict[str, bytes]:
    """Return the files of the one run in a tar by their paths within it."""
    found = {}
    try:
        with tarfile.open(file, "r:gz") as tar:
            for member in tar.getmembers():
                path, content = PurePosixPath(member.name), tar.extractfile(member)
                if content is not None and ".." not in path.parts:
                    found["/".join(path.parts[1:])] = content.read()
    except (OSError, EOFError, tarfile.TarError) as error:
        raise CheckpointError(f"{file.name} cannot be read: {error}") from None
    return found


def is_measurement(name: str) -> bool:
    """Whether a file of a run is what `fedprophet evaluate` has measured, or goes on with."""
    return name == EVALUATION or bool(re.fullmatch(r"evaluation/\w+\.jsonl", name))


def copy_of(run: Path, target: Path) -> Path:
    """Copy a run that may be going on, so that its newest checkpoints are whole in the copy.

    Checkpoints come first: clients' layers and the journal of later rounds do them no harm. Files of tensors are never
    changed, only replaced, so that a link to one is as good as a copy.
    """

    def copied(source: str, destination: str) -> None:
        try:
            (os.link if source.endswith(".safetensors") else shutil.copyfile)(source, destination)
        except FileNotFoundError:
            raise
        except OSError:  # a file system without links
            shutil.copyfile(source, destination)

    passing = shutil.ignore_patterns("*.tmp", "*.old", ".*")
    for name in ("checkpoints", "clients"):
        if (run / name).is_dir():
            shutil.copytree(run / name, target / name, ignore=passing, copy_function=copied)
    target.mkdir(exist_ok=True, parents=True)
    for file in run.iterdir():
        if file.is_file() and not file.name.startswith("."):
            copied(str(file), str(target / file.name))
    return target


def pack_smallest(run: Path, folder: Path, most: int) -> None:
    """Pack a run at its best round, where it is smallest; where that was not saved, at its newest checkpoint.

    ConfigError if that takes more than `most` bytes.
    """
    try:
        pack(run, folder, PART, round="best", most=most)
    except CheckpointError:  # a run is saved every so many rounds, and its best may be between two of them
        pack(run, folder, PART, most=most)


def put_in_place(new: Path, folder: Path) -> None:
    """Move a folder to where another may be. Whoever stops here finds one of them whole, and hardly ever both."""
    beside = folder.with_name(f"{folder.name}.new")
    shutil.rmtree(beside, ignore_errors=True)
    shutil.copytree(new, beside)
    shutil.rmtree(folder, ignore_errors=True)
    beside.rename(folder)


def bytes_in(folder: Path) -> int:
    """Return how many bytes the files of a folder have."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@dataclass
class Keeping:
    """Lays what runs have so far into a folder, `most` bytes in all.

    `packs` says of which runs more than small files: all, or those that are not over. A finished run is over when its
    clients were measured on so many samples as `measures` says, too.
    """

    folder: Path
    every: float
    packs: str = ""
    measures: int = 0
    most: int = MOST
    _packed: dict[str, object] = field(default_factory=dict)

    @contextmanager
    def kept(self, run: Path, about: Mapping[str, Any]) -> Iterator[None]:
        """Keep a run every so many seconds while the block goes on, and when it is over, however it ends."""
        over = Event()
        thread = Thread(target=self._repeat, args=(run, about, over), name="keeping", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            self.keep(run, about)

    def _repeat(self, run: Path, about: Mapping[str, Any], over: Event) -> None:
        while not over.wait(self.every):
            try:
                self.keep(run, about)
            except (FedProphetError, OSError) as error:  # what was kept before is still there, and the run goes on
                print(f"{run.name}: not kept this time: {error}", flush=True)

    def keep(self, run: Path, about: Mapping[str, Any]) -> None:
        """Replace what is kept of a run by what it is now."""
        if not RunFiles(run).config.exists():
            return
        files = {**small_files(run), CELL: json.dumps(about, indent=2).encode() + b"\n"}
        write_atomic(self.folder / f"{run.name}{SMALL}", tar_of(run.name, files))
        if not self.packs:
            return
        try:
            self._pack(run)
        except (FedProphetError, OSError) as error:  # the pack before is still there
            print(f"{run.name}: not packed this time: {error}", flush=True)

    def give_back(self, run: Path) -> None:
        """Lay what was measured of a finished run beside it again: a run that was packed comes without that."""
        kept = self.folder / f"{run.name}{SMALL}"
        if not kept.is_file() or not is_finished(RunFiles(run)):
            return
        files = read_tar(kept)
        if files.get(RunFiles(run).journal.name) != RunFiles(run).journal.read_bytes():  # of another run of the cell
            return
        measured = {run / name: content for name, content in files.items() if is_measurement(name)}
        write_atomic_all((file, content) for file, content in measured.items() if not file.exists())

    def _pack(self, run: Path) -> None:
        folder, finished = self.folder / f"{run.name}.pack", is_finished(RunFiles(run))
        is_over = finished and (not self.measures or is_measured(run, self.measures))
        if is_over and self.packs == "unfinished":
            shutil.rmtree(folder, ignore_errors=True)
            return
        state = (finished, sorted(path.name for path in (run / "checkpoints").glob("round-*") if not path.suffix))
        if not state[1] or self._packed.get(run.name) == state:
            return
        room = self.most - bytes_in(self.folder) + bytes_in(folder)
        with tempfile.TemporaryDirectory(prefix=".", dir=run.parent) as scratch:
            parts = Path(scratch) / folder.name
            pack_smallest(copy_of(run, Path(scratch) / run.name), parts, room)
            put_in_place(parts, folder)
        self._packed[run.name] = state
