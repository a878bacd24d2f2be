"""What a method is: a state, and a round that asks clients and returns the next state."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from fedprophet.cascade.atoms import Chain
from fedprophet.cascade.cost import ChainCost
from fedprophet.cascade.heads import build_head
from fedprophet.cascade.partition import Module
from fedprophet.config.config import Config
from fedprophet.fleet.latency import batch_sizes, client_seconds, workload_of
from fedprophet.fleet.network import communication_time, draw_link, payload_bytes
from fedprophet.messages.modules import ModuleStore
from fedprophet.messages.task import ClientTask, ClientUpdate, LocalTraining, Resources, Timeline
from fedprophet.randomness import global_rng
from fedprophet.server.accuracy import Accuracy, evaluation_fault, personalised
from fedprophet.server.aggregate import Layers, Parameters, mean_metric, sift
from fedprophet.server.convergence import Best, StageRule
from fedprophet.server.coordinator import Conversation, Record
from fedprophet.server.rejections import LARGEST_COUNT, plain_reason
from fedprophet.server.robust import RULES, Update
from fedprophet.threat import ThreatModel, input_threat

NORM_LAYERS = "mean over the clients that have trained, weighted by shard size"
"""Where the norm layers of an exported model come from, unless a method has better ones."""
ROBUST_NORM_LAYERS: Mapping[str, str] = {
    "clip": f"{NORM_LAYERS}, of layers clipped to the median distance from their start",
    "trimmed-mean": "trimmed mean over the clients that have trained",
    "median": "median over the clients that have trained",
}
"""The same under the other rules of aggregation."""
CLIENT_NORM_LAYERS = "each client's own"
"""Which norm layers a client is evaluated with, unless a method says otherwise."""


class Roster(Protocol):
    """Who could take part. The server knows ids, never data."""

    def draw(self, round: int, count: int, seed: int, purpose: str) -> tuple[int, ...]: ...

    @property
    def eligible(self) -> npt.NDArray[np.int64]: ...


@dataclass(frozen=True)
class Architecture:
    """A model that clients may train: its chain, and what training it costs."""

    chain: Chain
    cost: ChainCost


@dataclass(frozen=True)
class World:
    """All that a method knows: the configuration, the model as a chain cut into modules, and who could take part.

    `family` has the other models that clients may train where a method lets them, from the smallest on, each under its
    name; the last one is the run's own model.
    """

    config: Config
    chain: Chain
    cost: ChainCost
    modules: tuple[Module, ...]
    roster: Roster
    frozen: ModuleStore = field(default_factory=ModuleStore)
    family: Mapping[str, Architecture] = field(default_factory=dict)

    @property
    def stage_rule(self) -> StageRule:
        """How long a stage lasts."""
        config = self.config
        return StageRule(config.rounds, config.warmup_rounds, config.gate_rounds, config.patience_rounds)

    def image_threat(self, steps: int) -> ThreatModel:
        """Return the threat on images, with as many steps as asked for."""
        attack = self.config.attack
        return input_threat(attack.radius, attack.step_size, steps)

    def local_training(self, stage_round: int) -> LocalTraining:
        """Return the hyper-parameters of a round; the learning rate decays over the rounds of the stage."""
        train = self.config.train
        return LocalTraining(
            iterations=train.iterations,
            batch=train.batch,
            learning_rate=train.learning_rate * train.decay ** (stage_round - 1),
            momentum=train.momentum,
            weight_decay=train.weight_decay,
            strong_convexity=train.strong_convexity,
        )

    def cohort(self, round: int) -> tuple[int, ...]:
        """Return who trains in a round."""
        return self.roster.draw(round, self.config.population.cohort, self.config.seed, "cohort")

    def sample(self, clients: int | str, round: int, purpose: str) -> tuple[int, ...]:
        """Return everyone, or as many clients as the setting says."""
        if isinstance(clients, str):
            return tuple(self.roster.eligible.tolist())
        return self.roster.draw(round, clients, self.config.seed, purpose)

    def times(
        self,
        tasks: Sequence[ClientTask],
        updates: Sequence[ClientUpdate],
        available: Mapping[int, Resources],
        cost_of_task: Callable[[ClientTask], ChainCost] | None = None,
    ) -> dict[str, dict[str, float]]:
        """Return the simulated seconds of each client that trained, and the memory that its training takes.

        Seconds are those of computation, storage access and communication. `cost_of_task` is for methods whose clients
        train another model than the run's own.
        """
        asked = {task.client: task for task in tasks}
        # An update that is dropped took its time too; one that does not even say how much it trained on has none.
        timed = [u for u in updates if u.client in asked and 1 <= u.metrics.get("samples", 0) < math.inf]
        costs = {u.client: cost_of_task(asked[u.client]) if cost_of_task else self.cost for u in timed}
        return {str(u.client): _demand(costs[u.client], asked[u.client], u, available[u.client]) for u in timed}

    def add_communication(
        self,
        times: dict[str, dict[str, float]],
        tasks: Sequence[ClientTask],
        updates: Sequence[ClientUpdate],
    ) -> None:
        """Add a further exchange of the round to the simulated seconds of the clients that took part in it."""
        asked = {task.client: task for task in tasks}
        for update in updates:
            if update.client in asked and str(update.client) in times:
                link = draw_link(self.config.seed, asked[update.client].round, update.client)
                received = payload_bytes(asked[update.client].parameters)
                sent = payload_bytes(update.parameters) + payload_bytes(update.local)
                times[str(update.client)]["communication_s"] += communication_time(received, sent, link)

    def joined(self, current: Parameters, updates: Iterable[Update]) -> Parameters:
        """Join what clients sent by the configured rule: each parameter over those who sent it."""
        settings = self.config.aggregate
        return RULES[settings.rule](current, updates, settings)

    def norm_layers(self, usually: str) -> str:
        """Return where an exported model's norm layers come from; `usually` says it for the mean."""
        return usually.replace(NORM_LAYERS, ROBUST_NORM_LAYERS.get(self.config.aggregate.rule, NORM_LAYERS))

    def timeline(self, round: int, best: Best | None, discarded: tuple[tuple[int, int], ...]) -> Timeline:
        """Return which versions of the clients' own layers count; a resume may go back as far as checkpoints do."""
        checkpoint = self.config.checkpoint
        floor = round - checkpoint.keep * checkpoint.every
        return Timeline(discarded, min(floor, best.round if best else floor))

    def evaluation_due(self, stage_round: int, failures: int) -> bool:
        """Whether a round is evaluated: every few rounds, and always the last, so that a stage never lacks a best."""
        if stage_round >= self.config.rounds:
            return True
        return not failures and stage_round % self.config.evaluate.every == 0

    def evaluation_batch(self, last: int) -> int:
        """Return the micro-batch with which the activations of atoms 0 … `last` − 1 stay within the budget."""
        if self.config.evaluate.batch:
            return self.config.evaluate.batch
        budget = max(module.memory for module in self.modules)
        activations = 4 * sum(atom.activations for atom in self.cost.atoms[:last])
        return max(1, min(self.cost.batch, self.cost.batch * budget // max(activations, 1)))

    def initial_model(self) -> Parameters:
        """Return the shared parameters that the run starts from."""
        tensors = self.chain.tensors
        return {name: tensors[name].detach().clone() for name in self.chain.shared()}

    def initial_heads(self) -> Parameters:
        """Return fresh auxiliary heads for all modules but the last."""
        heads: dict[str, torch.Tensor] = {}
        for module in self.modules[:-1]:
            with global_rng(self.config.seed, "heads", module.index):
                head = build_head(self.cost.atoms[module.last - 1].output[1:], self.cost.classes)
            heads |= {f"heads.{module.index}.{name}": p.detach() for name, p in head.named_parameters()}
        return heads


def _demand(cost: ChainCost, task: ClientTask, update: ClientUpdate, resources: Resources) -> dict[str, float]:
    assert task.training is not None
    batch, iterations = task.training.batch, task.training.iterations
    # More samples than a round can use change nothing, however many a client claims to have.
    samples = min(int(update.metrics["samples"]), batch * iterations)
    seconds = client_seconds(
        workload_of(cost, task.first, task.last),
        resources,
        batch_sizes(samples, batch, iterations),
        task.threat.steps if task.threat else 0,
        draw_link(task.seed, task.round, task.client),
        download_bytes=payload_bytes(task.parameters),
        upload_bytes=payload_bytes(update.parameters) + payload_bytes(update.local),
    )
    return {**seconds, "memory_bytes": cost.memory(task.first, task.last)}


def spare(reports: Sequence[ClientUpdate], record: Record) -> dict[int, Resources]:
    """Return what each client that reported can spare in this round, and note those whose numbers cannot be."""
    found = {report.client: report.resources for report in reports if report.resources is not None}
    wrong = {client: f"it can spare {resources}" for client, resources in found.items() if not _sound(resources)}
    if wrong:
        drop(record, wrong)
    return {client: resources for client, resources in found.items() if client not in wrong}


def _sound(resources: Resources) -> bool:
    # A device that does less than one thing a second would take a time that no float holds.
    rates = (resources.performance, resources.bandwidth)
    return 0 <= resources.memory <= LARGEST_COUNT and all(1 <= rate < math.inf for rate in rates)


def drop(record: Record, reasons: Mapping[int, str]) -> None:
    """Note why clients' answers were not used; the first reason of a client in a round stays."""
    earlier = record.get("dropped", {})
    new = {str(client): plain_reason(reason) for client, reason in reasons.items() if str(client) not in earlier}
    record["dropped"] = {**earlier, **new}


def usable(
    world: World,
    tasks: Sequence[ClientTask],
    updates: Sequence[ClientUpdate],
    record: Record,
    layers: Layers | None = None,
) -> list[ClientUpdate]:
    """Return the updates that can be joined, and note the others and the mean loss; none where there are too few."""
    found, dropped = sift(tasks, updates, layers)
    drop(record, dropped)
    record["loss"] = mean_metric(found, "loss") if found else None
    minimum = world.config.flower.minimum
    if len(found) >= minimum:
        return found
    if minimum > 1:
        record["too_few"] = {"usable": len(found), "minimum": minimum}
    return []


def fold(
    world: World, current: Parameters, tasks: Sequence[ClientTask], updates: Sequence[ClientUpdate], record: Record
) -> Parameters | None:
    """Join what came back and note it; None where nothing that came back can be used."""
    found = usable(world, tasks, updates, record)
    return world.joined(current, [(update.weight, update.parameters) for update in found]) if found else None


def judged(tasks: Sequence[ClientTask], answers: Sequence[ClientUpdate], record: Record) -> Accuracy | None:
    """Return the personalised accuracy and note it; None where those who are missing leave no sample to judge by."""
    faults = {answer.client: reason for answer in answers if (reason := evaluation_fault(answer)) is not None}
    if faults:
        drop(record, faults)
    sound = [answer for answer in answers if answer.client not in faults]
    accuracy = personalised(sound)
    if not accuracy.samples and len(sound) < len(tasks):
        return None
    record |= {"clean": accuracy.clean, "adversarial": accuracy.adversarial, "samples": accuracy.samples}
    return accuracy


def named(parameters: Parameters, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Return the parameters of the names given."""
    return {name: parameters[name] for name in names}


class MethodState(Protocol):
    """What every method's state has: rounds done, and rounds in a row that had no usable update."""

    @property
    def round(self) -> int: ...

    @property
    def failures(self) -> int: ...


S = TypeVar("S", bound=MethodState)


class Method(Protocol[S]):
    """One algorithm. It is made for a world, starts with `initial`, and each `round` leads from a state to the next.

    `exported` is the one model that everybody can load: all its tensors, given the clients' own layers in the mean.
    `norm_layers` says where its norm layers come from, `client_norm_layers` which ones a client is evaluated with.
    """

    state: type[S]
    norm_layers: str
    client_norm_layers: str

    def __init__(self, world: World) -> None: ...

    def initial(self) -> S: ...

    def round(self, state: S) -> Conversation[S]: ...

    def finished(self, state: S) -> bool: ...

    def timeline(self, state: S) -> Timeline: ...

    def exported(self, state: S, local: Parameters) -> Parameters: ...

    def evaluation_task(self, state: S, client: int, threat: ThreatModel | None) -> ClientTask: ...

    def results(self, state: S) -> Mapping[str, Any]: ...
