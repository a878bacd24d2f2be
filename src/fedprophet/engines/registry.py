"""The table of engines. Each engine registers itself, with the `engine` decorator, beside its implementation."""

import multiprocessing
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch

from fedprophet.client.layer_store import ClientStore
from fedprophet.client.workspace import Workspace
from fedprophet.config.choices import AUTO
from fedprophet.config.config import Config
from fedprophet.data.dataset import Dataset
from fedprophet.fleet.population import Population
from fedprophet.server.coordinator import Engine
from fedprophet.threads import ONE_THREAD, set_threads


@dataclass(frozen=True)
class EngineParts:
    """What an engine is made from. `reserve` is R_min, the memory that even the poorest device keeps free."""

    population: Population
    workspaces: Mapping[str, Workspace]
    reserve: int
    config: Config
    dataset: Dataset
    layers: ClientStore = field(default_factory=lambda: ClientStore(None, 0))

    @property
    def clients(self) -> Path | None:
        """The folder of the clients' own layers, inside the run's folder; None if the run has no folder."""
        return self.layers.directory


EngineMaker = Callable[[EngineParts], Engine]
M = TypeVar("M", bound=EngineMaker)


@dataclass(frozen=True)
class EngineEntry:
    """An engine. If it is `single_threaded`, clients run side by side with one thread each.

    `settings` are the keys of the configuration that only this engine reads. `place` is the kind of device that clients
    train on, if that is not the CPU. `expect` raises ConfigError on a machine that lacks what the engine needs.
    """

    help: str
    make: EngineMaker
    single_threaded: bool = False
    settings: tuple[str, ...] = ()
    place: str | None = None
    expect: Callable[[], None] = lambda: None

    @property
    def line(self) -> str:
        """Its line of help, with the settings that it reads."""
        return f"{self.help} (settings: {', '.join(self.settings)})" if self.settings else self.help


ENGINES: dict[str, EngineEntry] = {}


def engine(
    name: str,
    help: str,
    *,
    single_threaded: bool = False,
    settings: tuple[str, ...] = (),
    place: str | None = None,
    expect: Callable[[], None] = lambda: None,
) -> Callable[[M], M]:
    """Register a function that makes an engine. Packages above this one register theirs in the same way."""

    def register(make: M) -> M:
        ENGINES[name] = EngineEntry(help, make, single_threaded, settings, place, expect)
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


def place_of(config: Config) -> torch.device | None:
    """Return the device that clients train on, for which their memory is predicted; None is the CPU."""
    place = ENGINES[chosen_engine(config)].place
    return None if place is None else torch.device(place)


def expect_engine(config: Config) -> None:
    """Raise ConfigError where this machine lacks what the engine needs, before anything is done for it."""
    ENGINES[chosen_engine(config)].expect()


def threads_of(config: Config) -> AbstractContextManager[None]:
    """Give torch the threads that a configuration asks for.

    Engines that run clients side by side use one thread for each client and for the server, only in a `with` block.
    """
    if ENGINES[chosen_engine(config)].single_threaded:
        return ONE_THREAD
    set_threads(cores(config))
    return nullcontext()


def make_engine(parts: EngineParts) -> Engine:
    return ENGINES[chosen_engine(parts.config)].make(parts)
