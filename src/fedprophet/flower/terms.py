"""What a node has to know of a run beside its tasks. It travels with each of them, as JSON."""

import json
import secrets
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedprophet.engines import Parts
from fedprophet.errors import CheckpointError
from fedprophet.flower.protocol import ProtocolError
from fedprophet.runs.config import Config, parse_config
from fedprophet.runs.files import IDENTITY, write_atomic


class Terms(BaseModel):
    """A run, as its nodes see it.

    `classes`, `names`, `shape`, `mean` and `std` are those of the server's data: a node's own may have another mean,
    and the model must see all images alike. `reserve` is R_min. The rest is for the nodes of a simulation, which share
    the server's machine: the run's folder, the threads of a client, and how many of them run side by side.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    config: dict[str, Any]
    classes: int = Field(ge=2)
    names: tuple[str, ...] = ()
    shape: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    reserve: int = Field(ge=0)
    home: str | None = None
    threads: int = Field(default=1, ge=1)
    together: int = Field(default=1, ge=1)

    @classmethod
    def of(cls, parts: Parts, **simulation: Any) -> Self:
        """Return the terms of a run; those of a simulation are added to them."""
        data = parts.dataset
        return cls(
            config=parts.config.model_dump(mode="json"),
            classes=data.classes,
            names=data.names,
            shape=data.shape,
            mean=data.mean,
            std=data.std,
            reserve=parts.reserve,
            **simulation,
        )

    def to_text(self) -> str:
        """Return the JSON that travels; floats keep all their digits."""
        return json.dumps(self.model_dump(mode="json"), separators=(",", ":"))

    @classmethod
    def of_text(cls, text: str) -> Self:
        """Return what a server has sent."""
        try:
            return cls.model_validate(json.loads(text))
        except (ValidationError, ValueError, RecursionError) as error:
            raise ProtocolError(f"the terms of the run cannot be read: {str(error).splitlines()[0][:200]}") from None

    def parsed_config(self) -> Config:
        """Return the run's configuration."""
        return parse_config(self.config, "as the server sent it")


def run_id(folder: Path | None, deployed: bool) -> str:
    """Return the id by which nodes know a run; drawn once and kept in its folder, so a resume has it too."""
    fresh = secrets.token_hex(16)
    if folder is None:
        return fresh
    file = folder / IDENTITY
    if not file.exists():
        write_atomic(file, (json.dumps({"run": fresh, "deployed": deployed}) + "\n").encode())
    try:
        found = json.loads(file.read_bytes())["run"]
    except (OSError, ValueError, KeyError, TypeError):
        found = None
    if not isinstance(found, str):
        raise CheckpointError(f"{file} is damaged. Put it back from a copy, or start the run anew")
    return found
