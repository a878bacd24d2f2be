"""Finished runs taken into the repository, and read from there."""

import re
import sys
from collections.abc import Mapping
from pathlib import Path

from cifar10_table.cells import CELLS, known
from cifar10_table.keeping import SMALL, read_tar, shortened
from fedprophet.display.numbers import counted
from fedprophet.errors import CheckpointError, FedProphetError
from fedprophet.report.folders import read_folder
from fedprophet.report.runs import ReadFolder
from fedprophet.runs.files import RunFiles
from fedprophet.storage.files import write_atomic_all

Kept = Mapping[str, ReadFolder]
"""The finished runs by the name of their cell."""


def bring(file: Path, results: Path) -> str:
    """Take a finished run's small files into the folder of the results; return what was done, as a sentence."""
    files = files_to_bring(file)
    cell = known(file.name.removesuffix(SMALL))
    if RunFiles(Path()).results.name not in files:
        rounds = files.get("journal.jsonl", b"").count(b"\n")
        raise CheckpointError(f"{file.name}: the run is not finished, it has {counted(rounds, 'round')}: play it on")
    target = results / cell.name
    journal = RunFiles(target).journal
    if journal.exists() and journal.read_bytes() != files["journal.jsonl"]:
        raise CheckpointError(f"{file.name}: another run of this cell is in {target}. Move it away first")
    write_atomic_all((target / name, content) for name, content in files.items())
    read_folder(target)
    return f"{cell.name}: {counted(len(files), 'file')} in {target}"


def files_to_bring(file: Path) -> dict[str, bytes]:
    """Return the files of a run's own folder in a tar, without paths; what lies deeper is left out."""
    return {
        name: content if name.endswith(".jsonl") else shortened(content)
        for name, content in read_tar(file).items()
        if re.fullmatch(r"[^/]+\.(json|jsonl|toml)", name)
    }


def bring_all(folder: Path, results: Path) -> int:
    """Bring every run of a folder; say which are refused, and return how many."""
    refused = 0
    for file in sorted(folder.glob(f"*{SMALL}")):
        try:
            print(bring(file, results))
        except FedProphetError as error:
            print(error, file=sys.stderr)
            refused += 1
    return refused


def read_kept(results: Path) -> dict[str, ReadFolder]:
    """Return the finished runs that are kept."""
    folders = {name: results / name for name in CELLS if RunFiles(results / name).results.is_file()}
    return {name: read_folder(folder) for name, folder in folders.items()}
