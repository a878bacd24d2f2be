"""Everything a run consists of, put together from its configuration: data, fleet, model, method, engine."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from fedprophet import data, models
from fedprophet.cascade.atoms import Chain, chain_of
from fedprophet.cascade.cost import ChainCost, cost_of
from fedprophet.cascade.norms import share_norm_layers
from fedprophet.cascade.partition import Module, cut_further, partition
from fedprophet.client.features import FeatureCache
from fedprophet.client.layer_store import ClientStore
from fedprophet.client.planned_cost import MeasuredCost, PlannedCost, TriedCost
from fedprophet.client.workspace import Workspace
from fedprophet.config.config import Config
from fedprophet.data.dataset import Dataset
from fedprophet.engines import EngineParts, chosen_engine, cores, expect_engine, make_engine, place_of, threads_of
from fedprophet.engines.registry import EngineMaker
from fedprophet.errors import ConfigError, FedProphetError, ModelError, memory_for
from fedprophet.fleet.device import load_pool
from fedprophet.fleet.population import Population
from fedprophet.messages.modules import ModuleStore
from fedprophet.messages.values import BACKBONE
from fedprophet.methods import METHODS
from fedprophet.methods.base import Method
from fedprophet.methods.distillation import DistillationSettings
from fedprophet.methods.world import Architecture, World, local_training, needed
from fedprophet.models.normalize import Normalize
from fedprophet.models.weights import load_weights
from fedprophet.randomness import global_rng
from fedprophet.runs.handed_over import begin_with, channels_last, check_data, check_model, handed_over
from fedprophet.runs.recorded import RecordedModules
from fedprophet.server.coordinator import Engine, RemoteEngine
from fedprophet.settings.values import CUSTOM
from fedprophet.sizes import parse_budget
from fedprophet.storage.mapped import copied_to_file, expect_chosen_folder, files_in_memory

CACHE_MEMORY = 2 * 10**9
CACHE_DISK = 20 * 10**9
LAYERS_MEMORY = 500 * 10**6
HEIGHT_AND_WIDTH = 3
"""The axes that data needs to be mirrored or moved: channels, height, width."""
LESS_MEMORY = (
    "Choose a smaller model (model.name, model.options), a smaller dataset or fewer clients (population.clients)"
)
OwnModel = nn.Module | Chain | None
"""A model that the user passes in from Python instead of a name in the configuration."""


@dataclass(frozen=True)
class Session:
    """A run's parts, ready to play rounds."""

    config: Config
    dataset: Dataset
    population: Population
    world: World
    method: Method[Any]
    engine: Engine
    engine_name: str
    """Which engine the configuration means on this machine."""
    layers: ClientStore
    features: FeatureCache
    normalize: Normalize
    budget: int
    notes: tuple[str, ...]
    """What the user should know before training begins, such as which starting weights were loaded."""

    def close(self) -> None:
        """Free the cached features and what the engine holds, such as processes; they are made again when needed."""
        self.features.clear()
        close = getattr(self.engine, "close", None)
        if close is not None:
            close()


def assemble(
    config: Config,
    clients: Path | None = None,
    model: OwnModel = None,
    dataset: Dataset | None = None,
    engine: EngineMaker = make_engine,
    recorded: RecordedModules | None = None,
    weights: Mapping[str, Tensor] | None = None,
) -> Session:
    """Build a session; `clients` is the folder where the clients' own layers are kept (None: in memory).

    `model` and `dataset` replace those that the configuration names. `engine` makes the run's engine; if Flower has
    started the run, that one uses Flower's connections. `recorded` are the modules of a run that was begun before, and
    `weights` those that `model` had then.
    """
    # Resolved here: within the block torch may have another number of threads.
    resolved = config.model_copy(update={"threads": cores(config)})
    if engine is make_engine:
        expect_engine(config)  # what follows may take its time
    with threads_of(config), memory_for("the run was put together", LESS_MEMORY):
        dataset = load_dataset(config, dataset)
        layers = ClientStore(clients, LAYERS_MEMORY)
        # Where memory is limited, features are in files from the beginning, and none has to leave memory for the disk.
        features = FeatureCache(CACHE_DISK, 0) if config.memory.enforce else FeatureCache(CACHE_MEMORY, CACHE_DISK)
        side = assemble_client(config, dataset, features, layers, model, weights)
        world = _world(config, dataset, side, recorded)
        made = engine(EngineParts(side.population, side.workspaces, world.budget, resolved, dataset, layers))
        if not isinstance(made, RemoteEngine) or not made.remote:
            world = replace(world, sizes=side.population.samples)
        if config.memory.enforce and METHODS[config.method].cascade and world.chain.device.type == "cuda":
            world = _as_tried(world, cut=recorded is None)
        method = METHODS[config.method].method(world)
        method.check_memory()
        return Session(
            config=config,
            dataset=dataset,
            population=side.population,
            world=world,
            method=method,
            engine=made,
            engine_name=chosen_engine(resolved),
            layers=layers,
            features=features,
            normalize=side.normalize,
            budget=world.budget,
            notes=side.notes,
        )


def _world(config: Config, dataset: Dataset, side: "ClientSide", recorded: RecordedModules | None) -> World:
    """Return the server's side of a run."""
    own = side.workspaces[BACKBONE]
    place = place_of(config)  # the engine brings the chain there later, and what is predicted is remembered
    cost = _cost(config, own.chain, dataset)
    if config.memory.model == "measured" and METHODS[config.method].cascade:
        measured = PlannedCost if config.memory.enforce else MeasuredCost
        cost = measured.of(cost, own.chain, local_training(config, stage_round=1), place)
    needs = needed(config, cost, own.chain, place)
    budget = parse_budget(config.memory.budget, cost.total_memory)
    modules = recorded.of(cost) if recorded else _cut(config, cost, needs, budget)
    family = {
        name: Architecture(chain, cost if chain is own.chain else _cost(config, chain, dataset))
        for name, chain in side.family.items()
    }
    return World(
        config,
        own.chain,
        cost,
        needs,
        modules,
        side.population,
        own.modules,
        family,
        initial_layers=own.initial,
        budget=budget,
        place=place,
    )


def _cut(config: Config, cost: ChainCost, needs: ChainCost, budget: int) -> tuple[Module, ...]:
    """Return the modules of a new run: methods without a cascade have one."""
    cascade = METHODS[config.method].cascade
    with _about(f"memory.budget = {config.memory.budget}"):
        modules = partition(cost, budget if cascade else cost.total_memory)
    return cut_further(modules, cost, needs, budget) if config.memory.enforce and cascade else modules


def _as_tried(world: World, cut: bool) -> World:
    """Return a world whose needs are tried on the GPU that the engine has brought the chain to.

    Modules of a new run that are then found to need more than R_min are cut further.
    """
    needs = TriedCost.of(world.cost, world.chain, local_training(world.config, stage_round=1))
    modules = cut_further(world.modules, world.cost, needs, world.budget) if cut else world.modules
    return replace(world, needs=needs, modules=modules)


class ClientSide(NamedTuple):
    """What clients' tasks are carried out with. `family` are the models that they train instead of the run's own."""

    population: Population
    workspaces: Mapping[str, Workspace]
    family: Mapping[str, Chain]
    normalize: Normalize
    notes: tuple[str, ...]


def assemble_client(
    config: Config,
    dataset: Dataset,
    features: FeatureCache,
    layers: ClientStore | None = None,
    model: OwnModel = None,
    weights: Mapping[str, Tensor] | None = None,
) -> ClientSide:
    """Build the clients' side of a run. Without `layers`, their own layers stay in memory."""
    with _about("method"):
        method = METHODS[config.method]
    population = _population(config, dataset, method.distills)
    started, normalize, notes = _start(config, dataset, model)
    if weights is not None:
        begin_with(started, weights)
    chain = share_norm_layers(started, config.norm.layers)
    family, more = _family(config, dataset, chain, normalize) if method.distills else ({}, ())
    frugal = config.memory.enforce
    frozen = ModuleStore(copied_to_file) if frugal else ModuleStore()
    layers = ClientStore(None, LAYERS_MEMORY) if layers is None else layers
    workspaces = {
        name: Workspace(member, dataset.shape, dataset.classes, frozen, layers, features, frugal)
        for name, member in {BACKBONE: chain, **family}.items()
    }
    if frugal:
        expect_chosen_folder()
        for workspace in workspaces.values():
            workspace.move_to_files()
    limits = _about_limits(config) if frugal else ()
    return ClientSide(population, workspaces, family, normalize, (*notes, *more, *limits))


def _about_limits(config: Config) -> Iterator[str]:
    """Say if clients use fewer threads than there are, and if files that are to save memory are memory after all."""
    if chosen_engine(config) == "plain" and cores(config) > 1:
        yield (
            f"memory.enforce: each client trains on one thread, for which memory is predicted; evaluation has all "
            f"{cores(config)}"
        )
    kind = files_in_memory()
    if kind is not None:
        yield (
            f"memory.enforce: what clients keep out of memory goes to files in {tempfile.gettempdir()}, which is a "
            f"{kind} and so is memory: it comes on top of their limits. Set TMPDIR to a folder on a disk"
        )


def load_dataset(config: Config, given: Dataset | None = None) -> Dataset:
    """Return the dataset that a configuration names, or the one that is given."""
    if given is not None:
        check_data(given)
        return given
    if config.data.name == CUSTOM:
        raise ConfigError(handed_over(config, "data"))
    settings = config.data
    return data.load(settings.name, settings.root or None, **settings.options)


def _population(config: Config, dataset: Dataset, distills: bool) -> Population:
    with _about("fleet.pool"):
        pool = load_pool(config.fleet.pool)
    _check_pictures(config, dataset.shape)
    return Population(
        dataset,
        config.shards,
        pool,
        config.seed,
        config.population.clients,
        fleet=config.fleet,
        validation=config.data.validation,
        mirror=config.data.mirror,
        shift=config.data.shift,
        public=config.of(DistillationSettings).public_samples(len(dataset.test)) if distills else 0,
    )


def _check_pictures(config: Config, shape: tuple[int, ...]) -> None:
    """Raise ConfigError if training images are to be mirrored or moved, and the data are no images or too small."""
    asked = {
        "mirror": (config.data.mirror, "have mirror images", "false"),
        "shift": (config.data.shift, "can be moved", 0),
    }
    for key, (value, what, without) in asked.items():
        if value and len(shape) < HEIGHT_AND_WIDTH:
            raise ConfigError(
                f"data.{key}: the data are of shape {shape}, and only images, which have channels, height and width, "
                f"{what}. Leave it {without}"
            )
    if config.data.shift and config.data.shift >= min(shape[-2:]):
        raise ConfigError(
            f"data.shift: {config.data.shift} pixels move images of {'x'.join(map(str, shape))} out of sight. "
            f"Take at most {min(shape[-2:]) - 1}"
        )


class _Start(NamedTuple):
    """The model that a run starts with: its chain, how it normalises its input, and notes about its weights."""

    chain: Chain
    normalize: Normalize
    notes: tuple[str, ...] = ()


def _start(config: Config, dataset: Dataset, given: OwnModel) -> _Start:
    # Clients' parameters are loaded into the chain, so a model of the user's is copied: theirs stays as it is.
    normalize = Normalize(dataset.mean, dataset.std)
    if given is not None and config.model.weights:
        raise ConfigError(
            f"model.weights: given {config.model.weights!r}, but a model that you pass keeps its own weights. "
            "Load them into it first, and leave model.weights empty"
        )
    if given is not None:
        check_model(given)
    if isinstance(given, Chain):
        return _Start(deepcopy(given), normalize)
    if given is not None:
        return _Start(chain_of(deepcopy(given), normalize), normalize)
    if config.model.name == CUSTOM:
        raise ConfigError(handed_over(config, "model"))
    with _about("model.name"):
        model = _build(config, config.model.name, dataset, "model")
    if not config.model.weights:
        return _Start(chain_of(model, normalize), normalize)
    with _about("model.weights"):
        report = load_weights(model, config.model.weights, config.model.name)
        # Filters that were trained on inputs of one scale should not begin with another.
        expected = report.normalization or normalize
        channels = len(expected.numbers[0])
        if channels != dataset.shape[0]:
            raise ModelError(
                f"{config.model.weights} expects images of {channels} channels, and {dataset.name} has "
                f"{dataset.shape[0]}"
            )
    return _Start(chain_of(model, expected), expected, (report.summary(),))


def _family(
    config: Config, dataset: Dataset, backbone: Chain, normalize: Normalize
) -> tuple[dict[str, Chain], tuple[str, ...]]:
    """Return the models that clients of little memory train instead, smallest first, the run's own one last."""
    name = config.model.name
    with _about("distillation.family"):
        names = tuple(config.of(DistillationSettings).family) or models.family_of(name)
    if names[-1] != name:
        raise ConfigError(f"distillation.family: it must end with model.name = {name!r}, and ends with {names[-1]!r}")
    twice = sorted({member for member in names if names.count(member) > 1})
    if twice:
        raise ConfigError(f"distillation.family: it names {', '.join(map(repr, twice))} twice. Name each model once")
    weights = config.model.weights
    family, notes = {}, []
    for member in names[:-1]:
        with _about("distillation.family"):
            model = _build(config, member, dataset, f"model {member}")
        # A member of another kind, such as a plain CNN beside VGGs, has nothing in common with the weights.
        if weights and isinstance(model, type(backbone.model)):
            with _about("model.weights"):
                notes.append(f"{member}: {load_weights(model, weights, name).summary()}")
        family[member] = share_norm_layers(chain_of(model, normalize), config.norm.layers)
    return {**family, BACKBONE: backbone}, tuple(notes)


def _build(config: Config, name: str, dataset: Dataset, purpose: str) -> nn.Module:
    """Return a model with the initial weights of the run's seed, and those of the run's options that it has."""
    known = models.MODELS[name].options if name in models.MODELS else ()
    options = {option: value for option, value in config.model.options.items() if option in known}
    with global_rng(config.seed, purpose):
        try:
            return models.build(name, dataset.shape, dataset.classes, **options)
        except ModelError as error:
            raise ModelError(f"{error}{channels_last(dataset.shape)}") from None


@contextmanager
def _about(key: str) -> Iterator[None]:
    """Let an error that a setting causes begin with the setting's key."""
    try:
        yield
    except FedProphetError as error:
        raise type(error)(f"{key}: {error}") from None


def _cost(config: Config, chain: Chain, dataset: Dataset) -> ChainCost:
    try:
        return cost_of(chain, dataset.shape, config.train.batch, dataset.classes, config.train.copies)
    except ModelError as error:
        shape = "x".join(map(str, dataset.shape))
        facts = f"The dataset {dataset.name!r} has images of {shape} and {dataset.classes} classes"
        others = "" if config.data.name == CUSTOM else ": pass one of your own with data=…"
        raise ModelError(f"{str(error).rstrip('.')}. {facts}{others}{channels_last(dataset.shape)}") from None
