"""What a client's process does with one message: it carries out the task with the core's `run_client`, and answers."""

import fcntl
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import RecordDict
from torch import Tensor

from fedprophet.client.features import FeatureCache
from fedprophet.client.layer_store import ClientStore
from fedprophet.client.run import Client, run_client
from fedprophet.client.workspace import Workspace
from fedprophet.config.config import Config, FleetSection
from fedprophet.data.dataset import ClientData, Dataset, JoinedExamples, LocalExamples
from fedprophet.data.shards import split
from fedprophet.errors import ConfigError, DataError, FedProphetError
from fedprophet.fleet.population import Population
from fedprophet.flower.cache import ModuleCache
from fedprophet.flower.manifest import Terms
from fedprophet.flower.protocol import (
    PROTOCOL,
    Order,
    ProtocolError,
    harmless,
    is_hello,
    pack_hello,
    pack_lacking,
    pack_refusal,
    pack_update,
    unpack_task,
)
from fedprophet.messages.task import ClientTask, Resources, Timeline
from fedprophet.runs.session import CACHE_MEMORY, assemble_client, load_dataset
from fedprophet.sizes import parse_size
from fedprophet.storage.files import make_folder
from fedprophet.version import __version__

HOME = Path("~/.local/share/fedprophet")
"""Where a node keeps its files, unless its config says otherwise."""
OWN = "own"
"""The shard of a node whose data are all its own."""
MOST_NAMES = 5
"""So many classes of a kind that differ are named."""
_THREADS = torch.get_num_threads()
"""As many as torch takes by itself on this machine."""
log = logging.getLogger("fedprophet")


def answer(record: RecordDict, node_config: Mapping[str, Any]) -> RecordDict:
    """Return a node's answer to a message, whatever happens: what cannot be done is refused with the reason."""
    try:
        place = Place.of(node_config)
        if is_hello(record):
            _note_version(record)
            return pack_hello(place.client)
        return _carry_out(unpack_task(record), place)
    except FedProphetError as error:
        return pack_refusal(str(error))
    except Exception as error:
        # A defect of ours, or a machine out of memory: the run goes on without this client.
        log.exception("a task failed")
        return pack_refusal(f"{type(error).__name__}: {error}")


def _note_version(record: RecordDict) -> None:
    """Say so on the node, too, where the server speaks another protocol: it will give this node no tasks."""
    theirs = record["header"]
    if theirs["protocol"] != PROTOCOL:
        log.warning(
            "the server speaks protocol %s (fedprophet %s), this node protocol %s (fedprophet %s). Install the same "
            "version of fedprophet on both",
            *(theirs["protocol"], harmless(str(theirs["version"])), PROTOCOL, __version__),
        )


@dataclass(frozen=True)
class Place:
    """What a node's config says of it. Resources that it leaves out are measured."""

    client: int
    home: Path
    data_root: str
    own_data: bool
    memory: int | None
    performance: float | None
    bandwidth: float | None
    threads: int | None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Place":
        """Return the place that a node config describes; a sentence where it cannot be."""
        client = _whole(config, "partition-id", least=0)
        if client is None:
            raise ConfigError('the node config has no "partition-id": give the number of this client, 0, 1, 2, …')
        shard = str(config.get("shard", ""))
        if shard not in ("", OWN):
            raise ConfigError(f'the node config has shard = {shard!r}. Allowed: "{OWN}", or leave it out')
        memory = config.get("memory")
        return cls(
            client=client,
            home=Path(str(config.get("home") or HOME)).expanduser(),
            data_root=str(config.get("data-root", "")),
            own_data=shard == OWN,
            memory=None if memory in (None, "", 0) else parse_size(memory),
            performance=_rate(config, "flops"),
            bandwidth=_rate(config, "bandwidth"),
            threads=_whole(config, "threads", least=1),
        )


def _whole(config: Mapping[str, Any], key: str, least: int) -> int | None:
    value = config.get(key)
    if value is not None and (type(value) is not int or value < least):
        raise ConfigError(f"the node config has {key} = {value!r}. Allowed: a whole number of at least {least}")
    return value


def _rate(config: Mapping[str, Any], key: str) -> float | None:
    value = config.get(key)
    if value in (None, "", 0):
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ConfigError(f"the node config has {key} = {value!r}. Allowed: a number above 0, each second")
    return float(value)


def _simulated() -> bool:
    """Whether this process is an actor of Ray."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def _carry_out(order: Order, place: Place) -> RecordDict:
    task = order.task
    if task.client != place.client:
        raise ProtocolError(f"this node is client {place.client}, but the task is for client {task.client}")
    terms = Terms.of_text(order.config)
    # Only an actor of a simulation, on the server's own machine, has the server say which folder to use.
    simulated = _simulated() and terms.home is not None
    home = Path(terms.home) if simulated and terms.home else place.home
    bench = _bench(order.run, order.config, place.data_root, simulated)
    if place.client >= bench.population.size:
        size = bench.population.size
        raise ConfigError(f"this node is client {place.client}, but the run has {size}: 0 to {size - 1}")
    cache = ModuleCache(home / "modules", parse_size(bench.config.flower.cache))
    modules, missing = cache.collect((module.digest for module in task.frozen), order.modules)
    if missing:
        return pack_lacking(missing)
    workspace = bench.workspace(task, Layers((home if simulated else home / order.run) / "clients"))
    for tensors in modules.values():
        workspace.modules.add(tensors)
    torch.set_num_threads(terms.threads if simulated else place.threads or _THREADS)
    data = _own_data(bench, place) if place.own_data else bench.population.client_data(place.client)

    def resources(round: int) -> Resources:
        if simulated:
            return bench.population.resources(place.client, round, terms.reserve)
        return _resources(place)

    update = run_client(task, Client(data, resources), workspace)
    return pack_update(update, bench.config.flower.updates)


@dataclass(frozen=True)
class Bench:
    """What the clients of this process work with in one run; it stays while the process does."""

    config: Config
    dataset: Dataset
    population: Population
    workspaces: Mapping[str, Workspace]

    def workspace(self, task: ClientTask, layers: "Layers") -> Workspace:
        """Return the workspace of a task's architecture, with the layers of this run's clients."""
        if task.architecture not in self.workspaces:
            known = ", ".join(self.workspaces)
            raise ProtocolError(f"the task is about a model {task.architecture[:80]!r}. This run has: {known}")
        workspace = self.workspaces[task.architecture]
        workspace.layers = layers
        return workspace


@lru_cache(maxsize=2)
def _bench(run: str, text: str, data_root: str, simulated: bool) -> Bench:
    terms = Terms.of_text(text)
    config = _here(terms.parsed_config(), data_root, simulated)
    dataset = load_dataset(config)
    if (dataset.classes, dataset.shape) != (terms.classes, terms.shape):
        raise DataError(
            f"the data here are {_described(dataset.classes, dataset.shape)}, and those of the run are "
            f"{_described(terms.classes, terms.shape)}. Every node needs the same classes and the same size of images"
        )
    if dataset.names != terms.names:
        raise DataError(_other_classes(dataset.names, terms.names))
    dataset = replace(dataset, mean=terms.mean, std=terms.std)
    # Nothing goes to the disk: processes may be ended at any moment, and would leave it there.
    features = FeatureCache(CACHE_MEMORY // terms.together, disk_limit=0)
    bench = Bench(config, dataset, *assemble_client(config, dataset, features))
    terms.start(bench.workspaces)
    return bench


def _here(config: Config, data_root: str, simulated: bool) -> Config:
    """Return a run's configuration as it holds on this machine, where the server's files are not."""
    model = config.model.model_copy(update={"weights": ""})  # what a client needs of them is in the terms
    data = config.data.model_copy(update={"root": data_root} if data_root else {})
    if simulated:
        return config.model_copy(update={"model": model, "data": data})
    # A device pool is what a simulation draws from; a real device is itself. And it says where it writes.
    data = data.model_copy(update={"cache": ""})
    return config.model_copy(update={"model": model, "data": data, "fleet": FleetSection()})


def _described(classes: int, shape: tuple[int, ...]) -> str:
    return f"images of {'x'.join(map(str, shape))} in {classes} classes"


def _other_classes(here: tuple[str, ...], there: tuple[str, ...]) -> str:
    """Return the sentence for classes of other names: the same number would stand for something else."""
    parts = {"here and not in the run": set(here) - set(there), "in the run and not here": set(there) - set(here)}
    differ = [f"{where}: {', '.join(map(repr, sorted(names)[:MOST_NAMES]))}" for where, names in parts.items() if names]
    return f"the classes of the data here are not the run's ({'; '.join(differ)}). Give the folders the same names"


def _own_data(bench: Bench, place: Place) -> ClientData:
    """Return all that is in the node's folder as its client's own, a part of it held out."""
    examples = JoinedExamples(bench.dataset.train, bench.dataset.test)
    seed, validation = bench.config.seed, bench.config.data.validation
    train, held_out = split(np.arange(len(examples)), seed, place.client, validation)
    return ClientData(LocalExamples(examples, train), LocalExamples(examples, held_out))


def _resources(place: Place) -> Resources:
    """Return what this machine can spare: what its config says, and measured what it leaves out."""
    from fedprophet.deploy.probe import machine_resources

    if place.memory and place.performance and place.bandwidth:
        return Resources(place.memory, place.performance, place.bandwidth)
    measured = machine_resources(place.home, threads=place.threads or _THREADS)
    return Resources(
        place.memory or measured.memory,
        place.performance or measured.performance,
        place.bandwidth or measured.bandwidth,
    )


class Layers:
    """The own layers of a node's clients, always as they are on the disk: another process may have written them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, architecture: str, client: int, timeline: Timeline, before: int) -> Mapping[str, Tensor] | None:
        """Return the newest layers that count."""
        return ClientStore(self._folder, memory_limit=0).get(architecture, client, timeline, before)

    def put(
        self, architecture: str, client: int, round: int, tensors: Mapping[str, Tensor], timeline: Timeline
    ) -> None:
        """Store layers; when this returns, they are on the disk."""
        make_folder(self._folder)
        folder = os.open(self._folder, os.O_RDONLY)
        try:
            # Somebody who answers too late may still be writing versions of the same client.
            fcntl.flock(folder, fcntl.LOCK_EX)
            store = ClientStore(self._folder, memory_limit=0)
            store.put(architecture, client, round, tensors, timeline)
            store.flush()
        finally:
            os.close(folder)
