"""Engines carry tasks to clients and bring their updates back. One joins the table here and nowhere else."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from fedprophet.client.workspace import Workspace
from fedprophet.engines.cuda import cuda_engine
from fedprophet.engines.embedded import EmbeddedEngine
from fedprophet.fleet.population import Population
from fedprophet.runs.config import Config
from fedprophet.server.coordinator import Engine

AUTO = "auto"


@dataclass(frozen=True)
class Parts:
    """What an engine is made of. `reserve` is R_min, the memory that even the poorest device keeps free."""

    population: Population
    workspaces: Mapping[str, Workspace]
    reserve: int
    config: Config


def _plain(parts: Parts) -> Engine:
    return EmbeddedEngine(parts.population, parts.workspaces, parts.reserve)


def _cuda(parts: Parts) -> Engine:
    return cuda_engine(parts.population, parts.workspaces, parts.reserve, parts.config.precision)


ENGINES: Mapping[str, Callable[[Parts], Engine]] = {"plain": _plain, "cuda": _cuda}


def chosen_engine(name: str) -> str:
    """Return the engine that a configuration asks for; "auto" is the GPU where there is one."""
    if name != AUTO:
        return name
    return "cuda" if torch.cuda.is_available() else "plain"


def make_engine(parts: Parts) -> Engine:
    """Make the engine of a configuration."""
    return ENGINES[chosen_engine(parts.config.engine)](parts)
