"""Engines carry tasks to clients and bring their updates back. One joins the table here and nowhere else."""

import importlib.util
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from fedprophet.client.workspace import Workspace
from fedprophet.config.config import Config
from fedprophet.data.dataset import Dataset
from fedprophet.engines.cuda import cuda_engine
from fedprophet.engines.plain import EmbeddedEngine
from fedprophet.engines.workers import ONE_THREAD, WorkerEngine
from fedprophet.errors import ConfigError
from fedprophet.fleet.population import Population
from fedprophet.server.coordinator import Engine

AUTO = "auto"


@dataclass(frozen=True)
class Parts:
    """What an engine is made of. `reserve` is R_min, the memory that even the poorest device keeps free.

    `clients` is the folder of the clients' own layers, inside the run's; None where the run has no folder.
    """

    population: Population
    workspaces: Mapping[str, Workspace]
    reserve: int
    config: Config
    dataset: Dataset
    clients: Path | None = None


def _plain(parts: Parts) -> Engine:
    return EmbeddedEngine(parts.population, parts.workspaces, parts.reserve)


def _cuda(parts: Parts) -> Engine:
    return cuda_engine(parts.population, parts.workspaces, parts.reserve, parts.config.precision)


def _workers(parts: Parts) -> Engine:
    return WorkerEngine(parts.population, parts.workspaces, parts.reserve, cores(parts.config))


def _flower_sim(parts: Parts) -> Engine:
    if any(importlib.util.find_spec(name) is None for name in ("flwr", "ray")):
        raise ConfigError(
            "engine = \"flower-sim\" needs Flower and Ray, which are not installed: pip install 'fedprophet[flower]'"
        )
    from fedprophet.flower.simulation import SimulationEngine  # takes a second: only for who asks for it

    return SimulationEngine(parts, cores(parts.config))


ENGINES: Mapping[str, Callable[[Parts], Engine]] = {
    "plain": _plain,
    "workers": _workers,
    "cuda": _cuda,
    "flower-sim": _flower_sim,
}
SINGLE_THREADED = frozenset({"workers", "flower-sim"})
"""Engines that use several cores by running clients side by side: one thread each, for the server as well."""


def cores(config: Config) -> int:
    """Return how many CPU cores a run may use: as many threads, or as many workers with one thread each."""
    return config.threads or torch.get_num_threads()


def chosen_engine(config: Config) -> str:
    """Return the engine that a configuration asks for; "auto" is the GPU where there is one, else all CPU cores."""
    if config.engine != AUTO:
        return config.engine
    if torch.cuda.is_available():
        return "cuda"
    return "workers" if cores(config) > 1 and sys.platform.startswith("linux") else "plain"


def threads_of(config: Config) -> AbstractContextManager[None]:
    """Give torch the threads that a configuration asks for; one alone only within a `with` block."""
    if chosen_engine(config) in SINGLE_THREADED:
        return ONE_THREAD
    torch.set_num_threads(cores(config))
    return nullcontext()


def make_engine(parts: Parts) -> Engine:
    """Make the engine of a configuration."""
    return ENGINES[chosen_engine(parts.config)](parts)
