"""What a run began with: fingerprints of its data and its model, and the weights of a model that was passed in.

A model of the user's is built anew for a resume, and its weights are drawn anew. So a run keeps those it began with:
clients that have not trained yet still begin with them, whatever the model that is given again has.
"""

from collections.abc import Mapping

from safetensors import SafetensorError
from torch import Tensor

from fedprophet.errors import CheckpointError
from fedprophet.messages.modules import digest
from fedprophet.runs.files import RunFiles, read_json
from fedprophet.runs.session import Session
from fedprophet.settings.values import CUSTOM
from fedprophet.storage.files import tensors_from_bytes, tensors_to_bytes, write_atomic, write_json


def starting_weights(files: RunFiles) -> Mapping[str, Tensor] | None:
    """Return the weights that a run's own model began with; None if it keeps none."""
    try:
        return tensors_from_bytes(files.start.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, SafetensorError):
        raise _altered(files) from None


def check_inputs(files: RunFiles, session: Session) -> Mapping[str, str]:
    """Refuse other data or another starting model than the run began with; return their fingerprints.

    A run that begins writes them down.
    """
    start = _start_of(session)
    ours = {"dataset": session.dataset.digest(), "model": digest(start)}
    own = session.config.model.name == CUSTOM
    if not files.inputs.exists():
        if own:
            write_atomic(files.start, tensors_to_bytes(start))
        write_json(files.inputs, ours)
    theirs = read_json(files.inputs)
    different = [name for name in ours if ours[name] != theirs.get(name)]
    if different == ["model"] and own:
        raise _altered(files) if files.start.exists() else _lost(files)
    if different:
        raise CheckpointError(
            f"{files.path} was started with a different {' and a different '.join(different)}: "
            f"pass the same {'one' if len(different) == 1 else 'ones'}, or start a new run"
        )
    return ours


def check_start(files: RunFiles, session: Session, inputs: Mapping[str, str]) -> None:
    """Refuse weights that a run's own model began with if they are not those of its fingerprints."""
    if files.start.exists() and digest(_start_of(session)) != inputs.get("model"):
        raise _altered(files)


def _start_of(session: Session) -> Mapping[str, Tensor]:
    return {**session.world.initial_model(), **session.world.initial_layers}


def _altered(files: RunFiles) -> CheckpointError:
    return CheckpointError(
        f"{files.start}, the weights that the run's own model began with, was altered. Put it back from a copy"
    )


def _lost(files: RunFiles) -> CheckpointError:
    return CheckpointError(
        f"{files.path} was started with a different model: {files.start.name}, which holds the weights that it began "
        "with, is lost. Put it back from a copy, or give the model the same weights, as torch.manual_seed before it is "
        "built does"
    )
