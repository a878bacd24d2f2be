"""What a run's folder holds besides a checkpoint's own files: the checkpoint knows it, so that damage is found."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fedprophet.client.layer_store import RESTORE, ClientStore, LayerDigests
from fedprophet.errors import CheckpointError
from fedprophet.runs.files import RunFiles, read_json
from fedprophet.runs.journal import Journal, Mark
from fedprophet.storage.files import write_atomic, write_json


@dataclass(frozen=True)
class FolderContents:
    """What a run's folder holds after a round; of small files the content, of the others digests."""

    clients: LayerDigests
    journal: Mark
    timings: Mark
    inputs: Mapping[str, str]
    flower: str
    """The content of flower.json; empty if there is none."""


def check_folder(files: RunFiles, layers: ClientStore, known: FolderContents, to_read: bool) -> Iterator[str]:
    """Refuse a folder that is not as a checkpoint knows it, if what is trained from there would differ; yield notes.

    With `to_read` nothing is trained, and no result depends on the journal.
    """
    if known.flower and read_identity(files) != known.flower:
        write_atomic(files.flower, known.flower.encode())
        raise CheckpointError(
            f"{files.flower} was lost or altered. It is written again from the checkpoint: give the command once more"
        )
    layers.expect(known.clients)
    if not Journal(files.journal).begins_with(known.journal):
        damage = f"{files.journal} was cut or altered"
        if not to_read:
            raise CheckpointError(
                f"{damage}, and the run's results are computed from it. {RESTORE}. What was trained can still be used: "
                "fedprophet evaluate and fedprophet export"
            )
        yield f"{damage}: nothing here depends on it, but the run cannot be resumed without it"
    if to_read:
        return
    if _read_inputs(files) != known.inputs:
        write_json(files.inputs, known.inputs)
        yield f"{files.inputs} was lost or altered: it is written again from the checkpoint"
    if not Journal(files.timings).begins_with(known.timings):
        yield f"{files.timings} was cut or altered: nothing that is trained depends on it, and what is left is kept"


def _read_inputs(files: RunFiles) -> Mapping[str, Any] | None:
    with suppress(OSError, CheckpointError):
        return read_json(files.inputs)
    return None


def read_identity(files: RunFiles) -> str:
    """Return the content of flower.json; empty if there is none, or no text."""
    try:
        return files.flower.read_bytes().decode(errors="replace")
    except OSError:
        return ""
