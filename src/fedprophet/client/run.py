"""One client carries out one task, one client at a time: the plain way to compute, and the reference for the others.

A new kind of task registers its handler here.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import singledispatch

import torch
from torch import Tensor

from fedprophet.cascade.heads import build_head, head_name
from fedprophet.client.distill import distill
from fedprophet.client.inputs import FetchedInputs, Inputs
from fedprophet.client.job import Client, Job
from fedprophet.client.limits import limited
from fedprophet.client.measure import evaluate, perturbation_magnitude
from fedprophet.client.part import ModelPart
from fedprophet.client.refresh import fresh_statistics
from fedprophet.client.statistics import TwoSets
from fedprophet.client.subnetwork import narrowed
from fedprophet.client.trainer import train
from fedprophet.client.workspace import Workspace
from fedprophet.finite import all_finite
from fedprophet.messages.answers import (
    Adopted,
    Answer,
    Distilled,
    Evaluated,
    Measured,
    Predicted,
    Refreshed,
    Reported,
    Trained,
)
from fedprophet.messages.tasks import (
    Adopt,
    Distill,
    Evaluate,
    Measure,
    ModelTask,
    Predict,
    Refresh,
    Report,
    Task,
    Train,
)
from fedprophet.randomness import global_rng

__all__ = ["Client", "run_client"]


def run_client(task: Task, client: Client, workspace: Workspace) -> Answer:
    """Carry out one task and return what goes back to the server."""
    with global_rng(task.seed, "client", task.round, task.client):
        return _run(task, Job(task, client, workspace))


@singledispatch
def _run(task: Task, job: Job[Task]) -> Answer:
    raise NotImplementedError(f"clients have no handler for a task of the class {type(task).__name__}")


@_run.register
def _report(task: Report, job: Job[Report]) -> Reported:
    local = dict(job.own) if task.wants_local else {}
    return Reported(**job.header, resources=job.client.resources(task.round), local=local)


@_run.register
def _adopt(task: Adopt, job: Job[Adopt]) -> Adopted:
    job.store(task.parameters)
    return Adopted(**job.header)


@_run.register
def _train(task: Train, job: Job[Train]) -> Trained:
    workspace = _loaded(job)
    chain = workspace.chain
    inputs, labels = _inputs(job, workspace), job.client.data.train.labels.to(workspace.device)
    part = _part(job, workspace, task.first, inputs[:1])
    sets = TwoSets(chain, job.known) if job.two_statistics else None
    beside = tuple(sets.aside) if sets else ()
    with limited(task, part, inputs, beside, workspace.planner, workspace.classes) as terms:
        loss = train(task, part, inputs, labels, sets, terms.plan, terms.check)
    trained = workspace.values(chain.shared(task.first, task.last))
    if task.head is not None and part.head is not None:
        trained |= {f"{head_name(task.head)}.{name}": p.detach().clone() for name, p in part.head.named_parameters()}
    local = workspace.values(chain.local(task.first, task.last)) | (sets.both() if sets else {})
    finite = all_finite([*trained.values(), *local.values()])
    return job.trained(loss, trained, local, finite, terms)


@_run.register
def _evaluate(task: Evaluate, job: Job[Evaluate]) -> Evaluated:
    examples = job.client.data.validation
    if not len(job.held_out):
        return job.evaluated(0, 0, {})
    whole = evaluated_part(job)
    if not job.two_statistics:
        return job.evaluated(*evaluate(task, whole, examples))
    # Clean images keep the clean statistics; attacked images are evaluated with the adversarial ones.
    clean, _, _ = evaluate(task, whole, examples, attacked=False)
    TwoSets(whole.chain, job.known)
    return job.evaluated(clean, *evaluate(task, whole, examples)[1:])


@_run.register
def _measure(task: Measure, job: Job[Measure]) -> Measured:
    workspace = _loaded(job)
    part = workspace.part(task.first, task.last)
    return job.measured(perturbation_magnitude(task, part, _inputs(job, workspace)))


@_run.register
def _refresh(task: Refresh, job: Job[Refresh]) -> Refreshed:
    examples = job.client.data.train
    if not len(examples):
        return job.refreshed({})
    workspace = _loaded(job)
    whole = _part(job, workspace, 0, examples.fetch(torch.arange(1)))
    return job.refreshed(fresh_statistics(task, whole, workspace.chain, examples))


@_run.register
def _predict(task: Predict, job: Job[Predict]) -> Predicted:
    """Run a model that the server holds on the public samples, which are what the server may train on."""
    part = _loaded(job).part(task.first, task.last)
    return job.predicted(part.run_over(job.client.data.train, task.batch))


@_run.register
def _distill(task: Distill, job: Job[Distill]) -> Distilled:
    workspace = _loaded(job)
    loss = distill(task, workspace.part(task.first, task.last), job.client.data.train)
    return job.distilled(loss, workspace.values((*workspace.chain.shared(), *workspace.chain.local())))


def evaluated_part(job: Job[Evaluate]) -> ModelPart:
    """Return what an evaluation runs, from the image on, loaded into the job's workspace."""
    return _part(job, _loaded(job), 0, job.client.data.validation.fetch(torch.arange(1)))


def _loaded(job: Job[ModelTask]) -> Workspace:
    """Return the job's workspace with its model loaded; a sub-network has a workspace of its own."""
    workspace = narrowed(job.workspace, job.kept_channels) if job.kept_channels else job.workspace
    workspace.load(job.task, job.local)
    return workspace


def _inputs(job: Job[ModelTask], workspace: Workspace) -> Inputs:
    """Return what atom `first` reads for each training sample: images, or the cached features of the frozen prefix."""
    examples = job.examples
    prefix = workspace.part(0, job.task.first)
    if workspace.frugal:
        return _fetched(job, workspace, prefix)
    if not job.task.frozen:
        return prefix.take(examples.fetch(torch.arange(len(examples))))
    return prefix.take(_features(job, workspace, lambda: prefix.run_over(examples, job.task.batch)))


def _features(job: Job[ModelTask], workspace: Workspace, compute: Callable[[], Tensor]) -> Tensor:
    """Return features of the training samples from the cache; those of moved images are of this round alone."""
    return compute() if job.offsets is not None else workspace.features.get(job.features_key, compute)


def _fetched(job: Job[ModelTask], workspace: Workspace, prefix: ModelPart) -> Inputs:
    """Return the same as something that holds none of them: images are read one batch at a time, features in files."""
    examples, device = job.examples, workspace.device
    # Where training is limited on a GPU, the chain is not all on it, and could not say what device it is on.
    if not job.task.frozen:
        return FetchedInputs(len(examples), lambda positions: examples.fetch(positions).to(device))
    features = _features(job, workspace, lambda: prefix.run_into_file(examples, job.task.batch))
    return FetchedInputs(len(examples), lambda positions: features[positions].to(device))


def _part(job: Job[Train] | Job[Evaluate] | Job[Refresh], workspace: Workspace, first: int, probe: Tensor) -> ModelPart:
    """Return the part from atom `first` to the task's exit; `probe` is one sample, which gives the head its shape."""
    task = job.task
    body = workspace.part(first, task.last, prior=job.prior)
    if task.head is None:
        return body
    with torch.no_grad(), body.mode(training=False):
        head = build_head(tuple(body.features(body.take(probe)).shape[1:]), workspace.classes).to(workspace.device)
        for name, parameter in head.named_parameters():
            parameter.copy_(task.parameters[f"{head_name(task.head)}.{name}"])
    return replace(body, head=head)
