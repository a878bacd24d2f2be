"""What a node has to know about a run besides its tasks. It travels with each of them, as JSON."""

import json
import secrets
from base64 import b64decode, b64encode
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError

from fedprophet.client.workspace import Workspace
from fedprophet.engines.registry import EngineParts
from fedprophet.errors import CheckpointError
from fedprophet.flower.protocol import ProtocolError
from fedprophet.messages.modules import kinds_of
from fedprophet.messages.values import BACKBONE
from fedprophet.models.normalize import Normalize
from fedprophet.storage.files import IDENTITY, parse_json, tensors_from_bytes, tensors_to_bytes, write_atomic


class RunManifest(BaseModel):
    """A run as its nodes see it.

    `classes`, `names` and `shape` are those of the server's data; `mean` and `std` are the numbers that the server's
    model normalises with, which a node's own data may not have. `reserve` is R_min. Where the run has starting weights,
    `layers` holds the norm layers with which the clients of each model start (safetensors, in base64), because the
    file of weights stays on the server. Shared parameters come with the tasks. The rest is for the nodes of a
    simulation, which share the server's machine: the run's folder, the threads of a client, and how many clients run
    side by side.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    config: dict[str, Any]
    classes: int = Field(ge=2)
    names: tuple[str, ...] = ()
    shape: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    reserve: int = Field(ge=0)
    layers: dict[str, str] = Field(default_factory=dict)
    home: str | None = None
    threads: int = Field(default=1, ge=1)
    together: int = Field(default=1, ge=1)

    @classmethod
    def of(cls, parts: EngineParts, **simulation: Any) -> Self:
        """Return the manifest of a run, and what only a simulation needs."""
        data, workspaces = parts.dataset, parts.workspaces
        normalisers = (layer for layer in workspaces[BACKBONE].chain.modules() if isinstance(layer, Normalize))
        # Starting weights may bring numbers of their own.
        mean, std = next((layer.numbers for layer in normalisers), (data.mean, data.std))
        started = workspaces.items() if parts.config.model.weights else ()
        return cls(
            config=parts.config.model_dump(mode="json"),
            classes=data.classes,
            names=data.names,
            shape=data.shape,
            mean=mean,
            std=std,
            reserve=parts.reserve,
            layers={name: b64encode(tensors_to_bytes(workspace.initial)).decode() for name, workspace in started},
            **simulation,
        )

    def to_text(self) -> str:
        """Return the JSON that travels; floats keep all their digits."""
        return json.dumps(self.model_dump(mode="json"), separators=(",", ":"))

    @classmethod
    def of_text(cls, text: str) -> Self:
        """Read a manifest that a server has sent."""
        try:
            return cls.model_validate(parse_json(text))
        except (ValidationError, ValueError) as error:
            raise ProtocolError(f"the run's manifest cannot be read: {str(error).splitlines()[0][:200]}") from None

    def start(self, workspaces: Mapping[str, Workspace]) -> None:
        """Give clients that have not trained yet the layers that the server's clients start with."""
        for name, workspace in workspaces.items() if self.layers else ():
            try:
                found = tensors_from_bytes(b64decode(self.layers[name], validate=True))
            except (KeyError, ValueError, SafetensorError):
                raise ProtocolError(f"the run's manifest does not say what a {name} starts with") from None
            if kinds_of(found) != kinds_of(workspace.initial):
                raise ProtocolError(f"the run's manifest has layers for {name} that this model does not have")
            workspace.initial = found


def run_id(folder: Path | None, deployed: bool) -> str:
    """Return the id by which nodes know a run; it is drawn once and kept in the run's folder, for a resume."""
    fresh = secrets.token_hex(16)
    if folder is None:
        return fresh
    file = folder / IDENTITY
    if not file.exists():
        write_atomic(file, (json.dumps({"run": fresh, "deployed": deployed}) + "\n").encode())
    try:
        found = parse_json(file.read_bytes())["run"]
    except (OSError, ValueError, KeyError, TypeError):
        found = None
    if not isinstance(found, str):
        raise CheckpointError(f"{file} is damaged. Put it back from a copy, or start the run again")
    return found
