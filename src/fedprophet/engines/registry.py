"""The table of engines. Each engine registers itself, with the `engine` decorator, beside its implementation."""

import multiprocessing
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from fedprophet.client.workspace import Workspace
from fedprophet.config.choices import AUTO
from fedprophet.config.config import Config
from fedprophet.data.dataset import Dataset
from fedprophet.fleet.population import Population
from fedprophet.server.coordinator import Engine


@dataclass(frozen=True)
class EngineParts:
    """What an engine is made from. `reserve` is R_min, the memory that even the poorest device keeps free.

    `clients` is the folder of the clients' own layers, inside the run's folder; None if the run has no folder.
    """

    population: Population
    workspaces: Mapping[str, Workspace]
    reserve: int
    config: Config
    dataset: Dataset
    clients: Path | None = None


EngineMaker = Callable[[EngineParts], Engine]


@dataclass(frozen=True)
class EngineEntry:
    """An engine by name. If it is `single_threaded`, clients run side by side with one thread each.

    `settings` are the keys of the configuration that only this engine reads.
    """

    name: str
    help: str
    make: EngineMaker
    single_threaded: bool = False
    settings: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """Its line of help, with the settings that it reads."""
        return f"{self.help} (settings: {', '.join(self.settings)})" if self.settings else self.help


ENGINES: dict[str, EngineEntry] = {}


def engine(
    name: str, help: str, *, single_threaded: bool = False, settings: tuple[str, ...] = ()
) -> Callable[[EngineMaker], EngineMaker]:
    """Register a function that makes an engine. Packages above this one register theirs in the same way."""

    def register(make: EngineMaker) -> EngineMaker:
        ENGINES[name] = EngineEntry(name, help, make, single_threaded, settings)
        return make

    return register


def cores(config: Config) -> int:
    """Return how many CPU cores a run may use: as many threads, or as many workers with one thread each."""
    return config.threads or torch.get_num_threads()


def can_fork() -> bool:
    """Whether this process can start workers. Daemonic ones, such as those of a `multiprocessing.Pool`, cannot."""
    return sys.platform.startswith("linux") and not multiprocessing.current_process().daemon


def chosen_engine(config: Config) -> str:
    """Return the name of the engine that a configuration asks for, with "auto" resolved for this machine."""
    if config.engine != AUTO:
        return config.engine
    if torch.cuda.is_available():
        return "cuda"
    return "workers" if cores(config) > 1 and can_fork() else "plain"


def make_engine(parts: EngineParts) -> Engine:
    """Make the engine of a configuration."""
    return ENGINES[chosen_engine(parts.config)].make(parts)
