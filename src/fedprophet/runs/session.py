"""Everything a run consists of, put together from its configuration: data, fleet, model, method, engine."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedprophet import data, models
from fedprophet.cascade.atoms import Chain, chain_of
from fedprophet.cascade.cost import ChainCost, cost_of
from fedprophet.cascade.partition import partition
from fedprophet.client.features import FeatureCache
from fedprophet.client.modules import ModuleStore
from fedprophet.client.run import Workspace
from fedprophet.data.dataset import Dataset
from fedprophet.data.shards import ShardSettings
from fedprophet.engines.embedded import EmbeddedEngine
from fedprophet.errors import ConfigError
from fedprophet.fleet.availability import Availability
from fedprophet.fleet.device import load_pool
from fedprophet.fleet.population import Population
from fedprophet.methods import find_method
from fedprophet.methods.base import Method, World
from fedprophet.models.normalize import Normalize
from fedprophet.randomness import global_rng
from fedprophet.runs.client_store import ClientStore
from fedprophet.runs.config import Config
from fedprophet.sizes import parse_budget

CUSTOM = "custom"
"""The name that a configuration gives to a model or dataset that was handed over in Python."""

CACHE_MEMORY = 2 * 10**9
CACHE_DISK = 20 * 10**9
LAYERS_MEMORY = 500 * 10**6


@dataclass(frozen=True)
class Session:
    """A run's parts, ready to play rounds."""

    config: Config
    dataset: Dataset
    population: Population
    world: World
    method: Method[Any]
    engine: EmbeddedEngine
    layers: ClientStore
    features: FeatureCache
    initial_local: Mapping[str, Tensor]
    budget: int


def assemble(
    config: Config, clients: Path | None = None, model: nn.Module | Chain | None = None, dataset: Dataset | None = None
) -> Session:
    """Build a session; `clients` is the folder where the clients' own layers are kept (None: in memory)."""
    if config.device != "cpu":
        raise ConfigError(f'device = "{config.device}" is not available: this version trains on the "cpu" alone')
    method = find_method(config.method)
    torch.set_num_threads(config.threads or torch.get_num_threads())
    dataset = _dataset(config, dataset)
    population = _population(config, dataset)
    chain = _chain(config, dataset, model)
    cost = _cost(config, chain, dataset)
    budget = parse_budget(config.memory.budget, cost.total_memory)
    modules = partition(cost, budget if method.cascade else cost.total_memory)
    layers = ClientStore(clients, LAYERS_MEMORY)
    features = FeatureCache(CACHE_MEMORY, CACHE_DISK)
    frozen = ModuleStore()
    world = World(config, chain, cost, modules, population, frozen)
    workspace = Workspace(chain, dataset.classes, frozen, layers, features)
    engine = EmbeddedEngine(population, workspace, budget)
    return Session(
        config, dataset, population, world, method.method(world), engine, layers, features, workspace.initial, budget
    )


def _dataset(config: Config, given: Dataset | None) -> Dataset:
    if given is not None:
        return given
    if config.data.name == CUSTOM:
        raise ConfigError(
            "this run brought its own data: go on in Python, with fedprophet.resume(RUN, data=…, model=…)"
        )
    return data.load(config.data.name, config.data.root or None)


def _population(config: Config, dataset: Dataset) -> Population:
    shards, fleet = config.shards, config.fleet
    return Population(
        dataset,
        ShardSettings(shards.kind, shards.classes_per_client, shards.iid_fraction, shards.concentration),
        load_pool(fleet.pool),
        config.seed,
        config.population.clients,
        availability=Availability(fleet.performance, fleet.performance_floor, fleet.memory_share),
        exponent=fleet.exponent,
        validation=config.data.validation,
    )


def _chain(config: Config, dataset: Dataset, given: nn.Module | Chain | None) -> Chain:
    # Clients' parameters are loaded into the chain, so a model of the user's is copied: theirs stays as it is.
    if isinstance(given, Chain):
        return deepcopy(given)
    normalize = Normalize(dataset.mean, dataset.std)
    if given is not None:
        return chain_of(deepcopy(given), normalize)
    if config.model.name == CUSTOM:
        raise ConfigError("this run brought its own model: go on in Python, with fedprophet.resume(RUN, model=…)")
    return chain_of(bare_model(config, dataset.shape, dataset.classes), normalize)


def bare_model(config: Config, shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return the configured architecture with the initial weights of the run's seed."""
    with global_rng(config.seed, "model"):
        return models.build(config.model.name, shape, classes, **config.model.options)


def _cost(config: Config, chain: Chain, dataset: Dataset) -> ChainCost:
    return cost_of(chain, dataset.shape, config.train.batch, dataset.classes, config.train.copies)
