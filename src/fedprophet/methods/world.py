"""What a method is given: the configuration, the model as a chain cut into modules, and the clients."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from math import prod

import torch
from torch import Tensor

from fedprophet.cascade.atoms import Chain
from fedprophet.cascade.cost import ChainCost
from fedprophet.cascade.norms import statistics_names
from fedprophet.cascade.partition import Module
from fedprophet.client.planned_cost import PlannedCost
from fedprophet.config.config import Config
from fedprophet.messages.modules import ModuleStore
from fedprophet.messages.values import SERVER, LocalTraining, Resources
from fedprophet.methods.sampling import ClientPool, ClientSampler
from fedprophet.server.aggregate import Aggregator
from fedprophet.server.convergence import StageRule
from fedprophet.server.rules import RULES
from fedprophet.server.rules.registry import Parameters
from fedprophet.server.weights import Sizes, no_sizes
from fedprophet.threat import ThreatModel, input_threat, scaled


@dataclass(frozen=True)
class Architecture:
    """A model that clients may train: its chain, and what training it costs."""

    chain: Chain
    cost: ChainCost


@dataclass(frozen=True)
class World:
    """All that a method knows, and the values that the configuration gives its tasks.

    `family` are the models that clients may train where a method lets them, from the smallest to the run's own model.
    `sizes` are those of the clients' shards, where the server knows them. `initial_layers` are the clients' own layers
    before any training. `budget` is R_min, in bytes. `needs` is what training costs clients, which have their memory
    for it: `cost` or, where memory is limited, that of plans. `place` is the device that it is predicted for, if
    that is not where the chain is.
    """

    config: Config
    chain: Chain
    cost: ChainCost
    needs: ChainCost
    modules: tuple[Module, ...]
    pool: ClientPool
    frozen: ModuleStore = field(default_factory=ModuleStore)
    family: Mapping[str, Architecture] = field(default_factory=dict)
    sizes: Sizes = no_sizes
    initial_layers: Parameters = field(default_factory=dict)
    budget: int = 0
    place: torch.device | None = None

    @cached_property
    def clients(self) -> ClientSampler:
        """Who takes part."""
        return ClientSampler(self.pool, self.config.seed, self.config.population.cohort)

    @cached_property
    def aggregator(self) -> Aggregator:
        """How what clients send is joined."""
        settings = self.config.aggregate
        rule = RULES[settings.rule]
        sizes = dict(enumerate(settings.sizes)).get if settings.sizes else self.sizes
        return Aggregator(
            rule.configured(self.config.of),
            settings.minimum,
            rule.averaged,
            rule.numbers,
            sizes,
            pools=self.config.norm.layers != "local",
        )

    def stage_rule(self, stage: int = 0) -> StageRule:
        """Return how long a stage lasts and what counts in it; a baseline has but the first."""
        return stage_rule(self.config, stage)

    def image_threat(self, steps: int) -> ThreatModel:
        """Return the threat on images, with this many steps of the attack."""
        attack = self.config.attack
        return input_threat(attack.radius, attack.step_size, steps)

    def training_threat(self, stage_round: int) -> ThreatModel | None:
        """Return the threat on images that a round trains under; None in the warm-up."""
        strength = self.stage_rule().strength(stage_round)
        return scaled(self.image_threat(self.config.attack.steps), strength) if strength else None

    def local_training(self, stage_round: int) -> LocalTraining:
        """Return the hyper-parameters of a round; the learning rate decays over the rounds of the stage."""
        return local_training(self.config, stage_round)

    def calibration(self, client: int) -> float:
        """Return how many samples of each label a client counts beside its own; 0 where nothing is calibrated.

        The server evaluates the exported model, which knows no labels' frequencies.
        """
        train = self.config.train
        return train.smoothing if train.calibration == "labels" and client != SERVER else 0.0

    @property
    def gathers_layers(self) -> bool:
        """Whether clients send their own layers in every round, for those that have none."""
        return self.config.norm.averages_for_newcomers and bool(self.chain.local())

    def starting_layers(self) -> Parameters:
        """Return the layers that clients begin the run with, where the server sends them."""
        return self.initial_layers if self.gathers_layers else {}

    @property
    def refreshes(self) -> bool:
        """Whether norm statistics are measured anew when the run ends."""
        return self.config.norm.refresh != "none" and bool(statistics_names(self.chain))

    @property
    def refresh_threat(self) -> ThreatModel | None:
        """The attack under which norm statistics are measured anew; None on clean images."""
        return self.image_threat(self.config.attack.steps) if self.config.refresh_images == "attacked" else None

    @property
    def enforces(self) -> bool:
        """Whether clients train within a limit of memory."""
        return self.config.memory.enforce

    def needed(self, cost: ChainCost, chain: Chain) -> ChainCost:
        """Return what training a chain costs clients."""
        return needed(self.config, cost, chain, self.place)

    def limit(self, resources: Resources) -> int:
        """Return the bytes that a client may train in: what it has available; 0 is no limit.

        In a simulation that is at least R_min. A real device that has less cannot train, and says so.
        """
        return resources.memory if self.enforces else 0

    def evaluation_batch(self, last: int) -> int:
        """Return the micro-batch with which the activations of atoms 0 … `last` − 1 stay within the budget."""
        return self._evaluation_batches(last)[0]

    def evaluation_draws(self, last: int) -> int:
        """Return how many samples of an evaluation share the attack's draws; 0: those of a micro-batch."""
        return self._evaluation_batches(last)[1]

    @cached_property
    def _evaluation_batches(self) -> Callable[[int], tuple[int, int]]:
        """What these two return; a prediction takes its time, and the same one is asked for by every task."""
        return cache(self._limited_batch if self.enforces else lambda last: (self._counted_batch(last), 0))

    def _counted_batch(self, last: int) -> int:
        if self.config.evaluate.batch:
            return self.config.evaluate.batch
        budget = max(module.memory for module in self.modules)
        activations = 4 * sum(atom.activations for atom in self.cost.atoms[:last])
        return max(1, min(self.cost.batch, self.cost.batch * budget // max(activations, 1)))

    def _limited_batch(self, last: int) -> tuple[int, int]:
        """Return the same, halved until it fits by prediction: what an attack allocates is more than activations.

        The draws stay those of the whole, so that an accuracy does not depend on the memory, if there is room for its
        images and for where their attacks start.
        """
        whole = self._counted_batch(last)
        batch = self._halved(last, whole, self.budget)
        if batch is None or batch == whole:
            return batch or 1, 0
        images = 2 * whole * 4 * prod(self.cost.input[1:])
        smaller = self._halved(last, batch, self.budget - images)
        return (batch, 0) if smaller is None else (smaller, whole)

    def _halved(self, last: int, batch: int, budget: int) -> int | None:
        """Return the batch, or so large a part of it that an attack is predicted to fit; None if none does."""
        sizes = [batch]
        while sizes[-1] > 1:
            sizes.append(sizes[-1] // 2)
        return next((size for size in sizes if self._attack_memory(last, size) <= budget), None)

    @cached_property
    def _attack_memory(self) -> Callable[[int, int], int]:
        """What plans say that attacking the first atoms on a batch takes, each prediction made once."""
        assert isinstance(self.needs, PlannedCost)
        return cache(self.needs.attack_memory)

    def initial_model(self) -> Parameters:
        """Return the shared parameters that the run starts from."""
        tensors = self.chain.tensors
        return {name: tensors[name].detach().clone() for name in self.chain.shared()}


def needed(config: Config, cost: ChainCost, chain: Chain, place: torch.device | None = None) -> ChainCost:
    """Return a chain's cost; where memory is limited, its memory is that of the most economical plan."""
    if not config.memory.enforce or isinstance(cost, PlannedCost):
        return cost
    return PlannedCost.of(cost, chain, local_training(config, stage_round=1), place)


def named(parameters: Parameters, names: Iterable[str]) -> dict[str, Tensor]:
    """Return the parameters of the names given."""
    return {name: parameters[name] for name in names}


def stage_rule(config: Config, stage: int = 0) -> StageRule:
    """Return how long a stage, counted from 0, lasts and what counts in it."""
    evaluate, convergence = config.evaluate, config.convergence
    warms_up = stage == 0 or config.train.warmup_stages == "all"
    return StageRule(
        rounds=config.rounds,
        warmup=config.warmup_rounds if warms_up else 0,
        gate=config.gate_rounds,
        patience=config.patience_rounds,
        every=evaluate.every,
        before_gate=evaluate.before_gate or evaluate.every,
        weight=None if convergence.weight == "ratio" else convergence.weight,
        waits_for_alpha=convergence.patience_after == "alpha",
        ramp=0 if stage else config.ramp_rounds,  # later stages attack features
    )


def local_training(config: Config, stage_round: int) -> LocalTraining:
    """Return the hyper-parameters of a round; the learning rate decays over the rounds of the stage."""
    train = config.train
    return LocalTraining(
        iterations=train.iterations,
        batch=train.batch,
        learning_rate=train.learning_rate * train.decay ** (stage_round - 1),
        momentum=train.momentum,
        weight_decay=train.weight_decay,
        strong_convexity=train.strong_convexity,
        summed_heads=train.head_gradients == "summed",
        fixed_statistics=config.norm.layers == "frozen" and stage_round > config.frozen_after_rounds,
        proximal=train.proximal,
        boundary_weights=train.weighting == "boundary",
        consistency=train.consistency,
    )
