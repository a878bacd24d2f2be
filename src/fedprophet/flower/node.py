"""What a client's process does with a message: it runs the task like any other engine, and answers."""

import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from flwr.app import RecordDict
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from fedprophet.client.features import FeatureCache
from fedprophet.client.layer_store import ClientStore
from fedprophet.client.run import Client, run_client
from fedprophet.client.workspace import Workspace
from fedprophet.config.config import Config
from fedprophet.config.load import parse_config
from fedprophet.data.dataset import ClientData, Dataset
from fedprophet.data.examples import JoinedExamples, LocalExamples
from fedprophet.data.shards import split
from fedprophet.deploy import probe
from fedprophet.errors import ConfigError, DataError, FedProphetError
from fedprophet.fleet.availability import FleetSettings
from fedprophet.fleet.population import Population
from fedprophet.flower.cache import ModuleCache
from fedprophet.flower.manifest import RunManifest
from fedprophet.flower.protocol import (
    PROTOCOL,
    Order,
    ProtocolError,
    harmless,
    is_hello,
    other_protocol,
    pack_answer,
    pack_hello,
    pack_lacking,
    pack_refusal,
    unpack_task,
)
from fedprophet.flower.settings import FlowerSettings
from fedprophet.messages.tasks import ModelTask
from fedprophet.messages.values import Resources, Timeline
from fedprophet.runs.session import CACHE_MEMORY, assemble_client, load_dataset
from fedprophet.sizes import parse_size
from fedprophet.storage.files import TRY_AGAIN, make_folder, write_error
from fedprophet.storage.locks import folder_lock
from fedprophet.threads import set_threads

HOME = Path("~/.local/share/fedprophet")
"""Where a node keeps its files by default."""
MOST_NAMES = 5
"""At most this many differing classes are named on each side."""
_THREADS = torch.get_num_threads()
"""What torch uses by default on this machine."""
log = logging.getLogger("fedprophet")


def answer(record: RecordDict, node_config: Mapping[str, Any]) -> RecordDict:
    """Return a node's answer to a message, whatever happens: a task that cannot be done is refused with the reason."""
    try:
        node = NodeConfig.of(node_config)
        if is_hello(record):
            theirs = record["header"]
            if theirs["protocol"] != PROTOCOL:  # the server will give this node no tasks
                log.warning("%s", harmless(other_protocol(theirs["protocol"], theirs["version"])))
            return pack_hello(node.client)
        return _carry_out(unpack_task(record), node)
    except FedProphetError as error:
        return pack_refusal(str(error))
    except Exception as error:
        # A bug, or a machine out of memory: the run goes on without this client.
        log.exception("a task failed")
        return pack_refusal(f"{type(error).__name__}: {error}")


class NodeConfig(BaseModel):
    """What a node's config says. Resources that it leaves out, or gives as 0, are measured."""

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)

    client: int = Field(alias="partition-id", ge=0)
    home: str = ""
    data_root: str = Field(default="", alias="data-root")
    shard: Literal["", "own"] = ""
    """With "own", the node uses all the data it has."""
    memory: int | str = 0
    flops: float = Field(default=0.0, ge=0)
    bandwidth: float = Field(default=0.0, ge=0)
    threads: int = Field(default=_THREADS, ge=1)

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "NodeConfig":
        """Read a node config; ConfigError if it does not fit."""
        try:
            return cls.model_validate(dict(config))
        except ValidationError as error:
            first = error.errors()[0]
            key = first["loc"][0]
            if first["type"] == "missing":
                raise ConfigError(f'the node config has no "{key}": the number of this client, 0, 1, 2, …') from None
            raise ConfigError(f"the node config has {key} = {config[str(key)]!r}. {first['msg']}") from None

    @property
    def folder(self) -> Path:
        """Where the node keeps its files."""
        return Path(self.home or HOME).expanduser()

    @property
    def bytes(self) -> int:
        """The memory in the config; 0 if it has none."""
        return parse_size(self.memory) if self.memory else 0


def _simulated() -> bool:
    """Whether this process is an actor of Ray."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def _carry_out(order: Order, node: NodeConfig) -> RecordDict:
    task = order.task
    if task.client != node.client:
        raise ProtocolError(f"this node is client {node.client}, but the task is for client {task.client}")
    manifest = RunManifest.of_text(order.manifest)
    # The server chooses the folder only for an actor of a simulation, on its own machine.
    simulated = _simulated() and manifest.home is not None
    home = Path(manifest.home) if simulated and manifest.home else node.folder
    run = _open_run(order.run, order.manifest, node.data_root, simulated)
    if node.client >= run.population.size:
        size = run.population.size
        raise ConfigError(f"this node is client {node.client}, but the run has {size}: 0 to {size - 1}")
    cache = ModuleCache(home / "modules", parse_size(run.config.of(FlowerSettings).cache))
    frozen = task.frozen if isinstance(task, ModelTask) else ()
    modules, missing = cache.collect((module.digest for module in frozen), order.modules)
    if missing:
        return pack_lacking(missing)
    if task.architecture not in run.workspaces:
        known = ", ".join(run.workspaces)
        raise ProtocolError(f"the task is for a model {task.architecture[:80]!r}. This run has: {known}")
    workspace = run.workspaces[task.architecture]
    workspace.layers = NodeLayers((home if simulated else home / order.run) / "clients")
    for tensors in modules.values():
        workspace.modules.add(tensors)
    set_threads(manifest.threads if simulated else node.threads)
    data = _own_data(run, node) if node.shard == "own" else run.population.client_data(node.client)

    def resources(round: int) -> Resources:
        if simulated:
            return run.population.resources(node.client, round, manifest.reserve)
        return _resources(node)

    return pack_answer(run_client(task, Client(data, resources), workspace), run.config.of(FlowerSettings).updates)


@dataclass(frozen=True)
class NodeRun:
    """What the clients of this process work with in one run."""

    config: Config
    dataset: Dataset
    population: Population
    workspaces: Mapping[str, Workspace]


@lru_cache(maxsize=2)
def _open_run(run_id: str, text: str, data_root: str, simulated: bool) -> NodeRun:
    manifest = RunManifest.of_text(text)
    config = _here(parse_config(manifest.config, "as the server sent it"), data_root, simulated)
    dataset = load_dataset(config)
    if (dataset.classes, dataset.shape) != (manifest.classes, manifest.shape):
        raise DataError(
            f"the data here are {_described(dataset.classes, dataset.shape)}, and the run's are "
            f"{_described(manifest.classes, manifest.shape)}. Every node needs the same classes and image size"
        )
    if dataset.names != manifest.names:
        raise DataError(_other_classes(dataset.names, manifest.names))
    dataset = replace(dataset, mean=manifest.mean, std=manifest.std)
    # No features go to the disk: a process may be ended at any moment and would leave them there.
    features = FeatureCache(CACHE_MEMORY // manifest.together, disk_limit=0)
    clients = assemble_client(config, dataset, features)
    for note in () if simulated else clients.notes:  # the server of a simulation says it
        log.warning("%s", note)
    manifest.start(clients.workspaces)
    return NodeRun(config, dataset, clients.population, clients.workspaces)


def _here(config: Config, data_root: str, simulated: bool) -> Config:
    """Return a run's configuration without the names of files on the server."""
    model = config.model.model_copy(update={"weights": ""})  # what a client needs of them is in the manifest
    data = config.data.model_copy(update={"root": data_root} if data_root else {})
    if simulated:
        return config.model_copy(update={"model": model, "data": data})
    # Only a simulation draws devices from a pool. And a device decides where it writes.
    options = {option: value for option, value in data.options.items() if option != "cache"}
    data = data.model_copy(update={"options": options})
    return config.model_copy(update={"model": model, "data": data, "fleet": FleetSettings()})


def _described(classes: int, shape: tuple[int, ...]) -> str:
    return f"images of {'x'.join(map(str, shape))} in {classes} classes"


def _other_classes(here: tuple[str, ...], there: tuple[str, ...]) -> str:
    """Return the error for classes with different names: the same label would mean a different class."""
    parts = {"here and not in the run": set(here) - set(there), "in the run and not here": set(there) - set(here)}
    differ = [f"{where}: {', '.join(map(repr, sorted(names)[:MOST_NAMES]))}" for where, names in parts.items() if names]
    return f"the classes of the data here are not the run's ({'; '.join(differ)}). Give the folders the same names"


def _own_data(run: NodeRun, node: NodeConfig) -> ClientData:
    """Return all the data in the node's folder, with a part held out."""
    examples = JoinedExamples(run.dataset.train, run.dataset.test)
    seed, validation = run.config.seed, run.config.data.validation
    train, held_out = split(np.arange(len(examples)), seed, node.client, validation)
    mirrored, shift = run.config.data.mirror, run.config.data.shift
    return ClientData(LocalExamples(examples, train), LocalExamples(examples, held_out), mirrored, shift)


def _resources(node: NodeConfig) -> Resources:
    """Return this machine's available resources: those in its config, the others measured."""
    said = (node.bytes, node.flops, node.bandwidth)
    if all(said):
        return Resources(*said)
    measured = probe.machine_resources(node.folder, threads=node.threads)
    memory, performance, bandwidth = said
    return Resources(memory or measured.memory, performance or measured.performance, bandwidth or measured.bandwidth)


class NodeLayers:
    """The own layers of a node's clients, read from the disk each time: another process may have written them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, architecture: str, client: int, timeline: Timeline, before: int) -> Mapping[str, Tensor] | None:
        """Return the newest layers that count."""
        return ClientStore(self._folder, memory_limit=0).get(architecture, client, timeline, before)

    def put(
        self, architecture: str, client: int, round: int, tensors: Mapping[str, Tensor], timeline: Timeline
    ) -> None:
        """Store layers; when this returns, they are on the disk."""
        try:
            make_folder(self._folder)
        except OSError as error:
            raise write_error(self._folder, error, TRY_AGAIN) from error
        # A process that answers too late may still be writing versions of the same client.
        with folder_lock(self._folder):
            store = ClientStore(self._folder, memory_limit=0)
            store.put(architecture, client, round, tensors, timeline)
            store.flush()
