"""One client carries out one task: the only place where a task meets data, and the same on every engine."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from fedprophet.cascade.atoms import Chain
from fedprophet.cascade.heads import build_head
from fedprophet.client.features import FeatureCache
from fedprophet.client.measure import evaluate, perturbation_magnitude
from fedprophet.client.modules import ModuleStore, digest
from fedprophet.client.segment import Segment
from fedprophet.client.task import ClientTask, ClientUpdate, Resources, TaskKind, Timeline
from fedprophet.client.trainer import train
from fedprophet.data.dataset import ClientData
from fedprophet.randomness import global_rng


class LocalLayers(Protocol):
    """Where a client's own layers are kept between rounds (see `runs.client_store`)."""

    def get(self, architecture: str, client: int, timeline: Timeline, before: int) -> Mapping[str, Tensor] | None: ...

    def put(
        self, architecture: str, client: int, round: int, tensors: Mapping[str, Tensor], timeline: Timeline
    ) -> None: ...


@dataclass
class Workspace:
    """A chain that tasks are loaded into one after the other, and what a client has at hand beside it.

    `initial` are the local layers of a client that has not trained yet. `loaded` remembers which fixed module each atom
    holds, so that a frozen prefix is not copied again for every task.
    """

    chain: Chain
    classes: int
    modules: ModuleStore
    layers: LocalLayers
    features: FeatureCache
    initial: Mapping[str, Tensor] = field(init=False)
    loaded: dict[int, str | None] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.initial = _detached(self.chain, self.chain.local())

    def load(self, task: ClientTask, own: Mapping[str, Tensor]) -> None:
        """Bring the chain to the state the task asks for: frozen prefix, the client's own layers, the task's part."""
        for module in task.frozen:
            if any(self.loaded.get(atom) != module.digest for atom in range(module.first, module.last)):
                self.chain.load(self.modules[module.digest])
                self.loaded.update(dict.fromkeys(range(module.first, module.last), module.digest))
        self.loaded.update(dict.fromkeys(range(task.first, task.last), None))
        local = self.chain.local(0, task.last)
        self.chain.load({name: own.get(name, self.initial[name]) for name in local})
        self.chain.load({name: value for name, value in task.parameters.items() if not name.startswith("heads.")})


@dataclass(frozen=True)
class Client:
    """One client: its data, and what its device can spare in a given round."""

    data: ClientData
    resources: Callable[[int], Resources]


def run_client(task: ClientTask, client: Client, workspace: Workspace) -> ClientUpdate:
    """Carry out one task and return what goes back to the server."""
    # What a client trained in this very round counts for everything but training it, which may be a repetition.
    before = task.round if task.kind == "train" else task.round + 1
    own = workspace.layers.get(task.architecture, task.client, task.timeline, before) or {}
    with global_rng(task.seed, "client", task.round, task.client):
        return WORK[task.kind](task, client, workspace, own)


def _report(task: ClientTask, client: Client, workspace: Workspace, own: Mapping[str, Tensor]) -> ClientUpdate:
    return ClientUpdate(
        task.kind,
        task.round,
        task.client,
        weight=_weight(client),
        resources=client.resources(task.round),
        local=dict(own) if task.wants_local else {},
    )


def _train(task: ClientTask, client: Client, workspace: Workspace, own: Mapping[str, Tensor]) -> ClientUpdate:
    workspace.load(task, own)
    chain = workspace.chain
    inputs, labels = _inputs(task, client, workspace, own), client.data.train.labels
    segment = _segment(task, workspace, inputs[:1])
    loss = train(task, segment, inputs, labels)
    trained = _detached(chain, chain.shared(task.first, task.last))
    if segment.head is not None:
        trained |= {f"heads.{task.head}.{name}": p.detach().clone() for name, p in segment.head.named_parameters()}
    kept = _detached(chain, chain.local(task.first, task.last))
    # A client whose training diverged keeps its own layers as they were, and the server drops its update. The server
    # does not see these layers: where they alone overflowed, the loss has to tell it.
    if not _finite(kept):
        loss = math.nan
    if math.isfinite(loss) and _finite(trained):
        workspace.layers.put(task.architecture, task.client, task.round, {**own, **kept}, task.timeline)
    return ClientUpdate(
        task.kind,
        task.round,
        task.client,
        weight=_weight(client),
        metrics={"loss": loss, "samples": float(len(labels))},
        parameters=trained,
    )


def _evaluate(task: ClientTask, client: Client, workspace: Workspace, own: Mapping[str, Tensor]) -> ClientUpdate:
    examples = client.data.validation
    metrics: dict[str, float] = {"samples": 0.0}
    if len(examples):
        workspace.load(task, own)
        whole = _segment(task, workspace, examples.fetch(torch.arange(1)), first=0)
        metrics = evaluate(task, whole, examples)
    return ClientUpdate(task.kind, task.round, task.client, weight=_weight(client), metrics=metrics)


def _measure(task: ClientTask, client: Client, workspace: Workspace, own: Mapping[str, Tensor]) -> ClientUpdate:
    workspace.load(task, own)
    inputs = _inputs(task, client, workspace, own)
    segment = Segment(workspace.chain, task.first, task.last, head=None)
    return ClientUpdate(
        task.kind,
        task.round,
        task.client,
        weight=float(len(inputs)),
        metrics=perturbation_magnitude(task, segment, inputs),
    )


Work = Callable[[ClientTask, Client, Workspace, Mapping[str, Tensor]], ClientUpdate]
WORK: dict[TaskKind, Work] = {"report": _report, "train": _train, "evaluate": _evaluate, "measure": _measure}


def _inputs(task: ClientTask, client: Client, workspace: Workspace, own: Mapping[str, Tensor]) -> Tensor:
    """Return what atom `first` reads for each training sample: images, or the cached features of the frozen prefix."""
    examples = client.data.train
    everything = torch.arange(len(examples))
    if not task.frozen:
        return examples.fetch(everything)
    prefix = Segment(workspace.chain, 0, task.first, head=None)
    version = digest({name: own[name] for name in workspace.chain.local(0, task.first) if name in own})

    def compute() -> Tensor:
        with torch.no_grad(), prefix.mode(training=False):
            return torch.cat([prefix.features(examples.fetch(part)) for part in torch.split(everything, task.batch)])

    digests = tuple(module.digest for module in task.frozen)
    return workspace.features.get((task.client, digests, version), compute)


def _segment(task: ClientTask, workspace: Workspace, probe: Tensor, first: int | None = None) -> Segment:
    """Return the task's segment with its exit; `probe` is one sample, whose feature gives the head its shape."""
    start = task.first if first is None else first
    body = Segment(workspace.chain, start, task.last, head=None)
    if task.head is None:
        return body
    with torch.no_grad(), body.mode(training=False):
        head = build_head(tuple(body.features(probe).shape[1:]), workspace.classes)
        for name, parameter in head.named_parameters():
            parameter.copy_(task.parameters[f"heads.{task.head}.{name}"])
    return Segment(workspace.chain, start, task.last, head)


def _weight(client: Client) -> float:
    """Return q_k before normalisation: the size of the client's shard."""
    return float(len(client.data.train) + len(client.data.validation))


def _detached(chain: Chain, names: tuple[str, ...]) -> dict[str, Tensor]:
    tensors = chain.tensors
    return {name: tensors[name].detach().clone() for name in names}


def _finite(tensors: Mapping[str, Tensor]) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values())
