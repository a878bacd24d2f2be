"""One client carries out one task: the only place where a task meets data, and the same on every engine."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedprophet.cascade.heads import build_head
from fedprophet.client.distill import distill, predict
from fedprophet.client.measure import evaluate, perturbation_magnitude
from fedprophet.client.segment import Segment
from fedprophet.client.statistics import TwoSets
from fedprophet.client.subnetwork import narrowed
from fedprophet.client.trainer import train
from fedprophet.client.workspace import Workspace
from fedprophet.data.dataset import ClientData
from fedprophet.messages.modules import digest
from fedprophet.messages.task import ClientTask, ClientUpdate, Resources, TaskKind
from fedprophet.randomness import global_rng


@dataclass(frozen=True)
class Client:
    """One client: its data, and what its device can spare in a given round."""

    data: ClientData
    resources: Callable[[int], Resources]


def run_client(task: ClientTask, client: Client, workspace: Workspace) -> ClientUpdate:
    """Carry out one task and return what goes back to the server."""
    if task.kept:
        workspace = narrowed(workspace, task.kept)
    own = workspace.layers.get(task.architecture, task.client, task.timeline, layers_before(task)) or {}
    with global_rng(task.seed, "client", task.round, task.client):
        update = WORK[task.kind](task, client, workspace, own)
    return replace(update, number=task.number)


def layers_before(task: ClientTask) -> int:
    """Return the round before which a client's own layers were made that a task starts from.

    What a client trained in this very round counts for everything but training it, which may be a repetition.
    """
    return task.round if task.kind == "train" else task.round + 1


def _report(task: ClientTask, client: Client, workspace: Workspace, own: Mapping[str, Tensor]) -> ClientUpdate:
    return ClientUpdate(
        task.kind,
        task.round,
        task.client,
        weight=shard_weight(client),
        resources=client.resources(task.round),
        local=dict(own) if task.wants_local else {},
    )


def _train(task: ClientTask, client: Client, workspace: Workspace, own: Mapping[str, Tensor]) -> ClientUpdate:
    workspace.load(task, own)
    chain = workspace.chain
    inputs, labels = _inputs(task, client, workspace, own), client.data.train.labels.to(workspace.device)
    segment = _segment(task, workspace, inputs[:1])
    both = TwoSets(chain, own) if task.adversarial_statistics else None
    loss = train(task, segment, inputs, labels, both.observe if both else None)
    trained = workspace.values(chain.shared(task.first, task.last))
    if segment.head is not None:
        trained |= {f"heads.{task.head}.{name}": p.detach().clone() for name, p in segment.head.named_parameters()}
    kept = {**own, **workspace.values(chain.local(task.first, task.last)), **(both.kept() if both else {})}
    # A client whose training diverged keeps its own layers as they were, and the server drops its update. The server
    # does not see these layers: where they alone overflowed, the loss has to tell it.
    if not _finite(kept):
        loss = math.nan
    if math.isfinite(loss) and _finite(trained):
        workspace.layers.put(task.architecture, task.client, task.round, kept, task.timeline)
    return ClientUpdate(
        task.kind,
        task.round,
        task.client,
        weight=shard_weight(client),
        metrics={"loss": loss, "samples": float(len(labels))},
        local=kept if task.wants_local else {},
        parameters=trained,
    )


def _evaluate(task: ClientTask, client: Client, workspace: Workspace, own: Mapping[str, Tensor]) -> ClientUpdate:
    examples = client.data.validation
    metrics: dict[str, float] = {"samples": 0.0}
    if len(examples):
        workspace.load(task, own)
        whole = _segment(task, workspace, examples.fetch(torch.arange(1)), first=0)
        if task.adversarial_statistics:
            # Clean images keep the clean statistics; only what an attack makes of them is judged with the others.
            clean = evaluate(replace(task, threat=None), whole, examples)
            TwoSets(workspace.chain, own)
            metrics = {**evaluate(task, whole, examples), "clean": clean["clean"]}
        else:
            metrics = evaluate(task, whole, examples)
    return ClientUpdate(task.kind, task.round, task.client, weight=shard_weight(client), metrics=metrics)


def _measure(task: ClientTask, client: Client, workspace: Workspace, own: Mapping[str, Tensor]) -> ClientUpdate:
    workspace.load(task, own)
    inputs = _inputs(task, client, workspace, own)
    segment = workspace.segment(task.first, task.last)
    return ClientUpdate(
        task.kind,
        task.round,
        task.client,
        weight=float(len(inputs)),
        metrics=perturbation_magnitude(task, segment, inputs),
    )


def _predict(task: ClientTask, client: Client, workspace: Workspace, own: Mapping[str, Tensor]) -> ClientUpdate:
    """Run a model that the server holds on the public samples, which are what the server may train on."""
    workspace.load(task, own)
    logits = predict(task, workspace.segment(task.first, task.last), client.data.train)
    return ClientUpdate(task.kind, task.round, task.client, weight=shard_weight(client), parameters={"logits": logits})


def _distill(task: ClientTask, client: Client, workspace: Workspace, own: Mapping[str, Tensor]) -> ClientUpdate:
    workspace.load(task, own)
    chain = workspace.chain
    loss = distill(task, workspace.segment(task.first, task.last), client.data.train)
    return ClientUpdate(
        task.kind,
        task.round,
        task.client,
        weight=shard_weight(client),
        metrics={"loss": loss},
        parameters=workspace.values((*chain.shared(), *chain.local())),
    )


def _adopt(task: ClientTask, client: Client, workspace: Workspace, own: Mapping[str, Tensor]) -> ClientUpdate:
    """Take layers from the server as the client's own."""
    workspace.layers.put(task.architecture, task.client, task.round, {**own, **task.parameters}, task.timeline)
    return ClientUpdate(task.kind, task.round, task.client, weight=shard_weight(client))


Work = Callable[[ClientTask, Client, Workspace, Mapping[str, Tensor]], ClientUpdate]
WORK: dict[TaskKind, Work] = {
    "report": _report,
    "train": _train,
    "evaluate": _evaluate,
    "measure": _measure,
    "predict": _predict,
    "distill": _distill,
    "adopt": _adopt,
}


def _inputs(task: ClientTask, client: Client, workspace: Workspace, own: Mapping[str, Tensor]) -> Tensor:
    """Return what atom `first` reads for each training sample: images, or the cached features of the frozen prefix."""
    examples = client.data.train
    everything = torch.arange(len(examples))
    prefix = workspace.segment(0, task.first)
    if not task.frozen:
        return prefix.take(examples.fetch(everything))
    version = digest({name: own[name] for name in workspace.chain.local(0, task.first) if name in own})

    def compute() -> Tensor:
        with torch.no_grad(), prefix.still():
            parts = torch.split(everything, task.batch)
            return torch.cat([prefix.features(prefix.take(examples.fetch(part))) for part in parts])

    digests = tuple(module.digest for module in task.frozen)
    return prefix.take(workspace.features.get((task.client, digests, version), compute))


def _segment(task: ClientTask, workspace: Workspace, probe: Tensor, first: int | None = None) -> Segment:
    """Return the task's segment with its exit; `probe` is one sample, whose feature gives the head its shape."""
    start = task.first if first is None else first
    body = workspace.segment(start, task.last)
    if task.head is None:
        return body
    with torch.no_grad(), body.mode(training=False):
        head = build_head(tuple(body.features(body.take(probe)).shape[1:]), workspace.classes).to(workspace.device)
        for name, parameter in head.named_parameters():
            parameter.copy_(task.parameters[f"heads.{task.head}.{name}"])
    return workspace.segment(start, task.last, head)


def shard_weight(client: Client) -> float:
    """Return q_k before normalisation: the size of the client's shard."""
    return float(len(client.data.train) + len(client.data.validation))


def _finite(tensors: Mapping[str, Tensor]) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values())
