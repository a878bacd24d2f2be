"""A run in outline: what people are told of it while it is played. A folder has it without its data and its model."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from fedprophet.config.config import Config
from fedprophet.config.load import load_config
from fedprophet.errors import CheckpointError
from fedprophet.methods.registry import METHODS
from fedprophet.runs.files import RunFiles, read_json
from fedprophet.runs.session import Session
from fedprophet.server.coordinator import Record


@dataclass(frozen=True)
class Outline:
    """What a run is; a number that is not known is None, as in the folder of an earlier version."""

    config: Config
    dataset: str
    modules: int | None
    refreshes: bool
    """Whether one round more measures norm statistics anew."""
    budget: int | None
    whole: int | None
    """The bytes that training the whole model takes."""

    @property
    def total(self) -> int | None:
        """The rounds at most: a stage may converge early."""
        return None if self.modules is None else self.modules * self.config.rounds + self.refreshes

    def place(self, record: Record) -> int:
        """Return how many of these rounds are over after this one, if all stages were as long as they may be."""
        if "refresh" in record and self.total is not None:
            return self.total
        if "module" not in record:
            return int(record["round"])
        rounds = self.config.rounds
        before = (record["module"] - 1) * rounds
        return int(before + (rounds if "fixed" in record else record["stage_round"]))


def outline_of(session: Session) -> Outline:
    """Return the outline of a run that is being played."""
    world = session.world
    return Outline(
        session.config,
        session.dataset.name,
        len(world.modules),
        world.refreshes,
        session.budget,
        world.cost.total_memory,
    )


def read_outline(files: RunFiles) -> Outline:
    """Return the outline of the run in a folder."""
    config, setup = load_config(files.config), _setup(files)
    modules, data = setup.get("modules"), setup.get("data")
    return Outline(
        config,
        data["name"] if isinstance(data, dict) and isinstance(data.get("name"), str) else config.data.name,
        len(modules) if isinstance(modules, list) else None if METHODS[config.method].cascade else 1,
        bool(setup.get("refreshes", config.norm.refresh != "none")),
        *(value if isinstance(value := setup.get(key), int) else None for key in ("budget_bytes", "whole_model_bytes")),
    )


def _setup(files: RunFiles) -> Mapping[str, Any]:
    """Return what a run was put together of; nothing if that is lost or damaged, for no result depends on it.

    Finished runs of earlier versions say it in their results.
    """
    for file in (files.setup, files.results):
        with suppress(OSError, CheckpointError):
            return read_json(file)
    return {}
