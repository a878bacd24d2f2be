"""The stacked engine: tasks that differ in nothing but the client are carried out together (`fedprophet.fast`).

What it cannot fuse (another kind of model, sub-networks, attacks other than PGD) goes to the plain path on the same
device, and it says so once.
"""

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedprophet.cascade.atoms import Chain
from fedprophet.client.measure import drawn_samples
from fedprophet.client.modules import digest
from fedprophet.client.run import Client, shard_weight
from fedprophet.client.task import ClientTask, ClientUpdate, LocalTraining
from fedprophet.client.trainer import batches
from fedprophet.client.workspace import Workspace
from fedprophet.data.dataset import LocalExamples
from fedprophet.engines.embedded import EmbeddedEngine
from fedprophet.fast.program import NotFusableError, Program, read_program
from fedprophet.fast.rounds import Backend, EvaluationPlan, TrainingPlan
from fedprophet.fast.stack import Folded
from fedprophet.fleet.population import Population
from fedprophet.randomness import key as draw_key
from fedprophet.threat import ThreatModel

log = logging.getLogger("fedprophet")
P = TypeVar("P")
PLANS = 64
"""Plans that are kept: each holds the parameters and inputs of a group."""
PROGRAMS = 256
FEW = 4
"""Groups up to this size are planned as they are."""


@dataclass(frozen=True)
class Limits:
    """How many bytes of activations a group may take, and of inputs may stay on the device between rounds."""

    activations: int
    resident: int


@dataclass(frozen=True)
class _Job:
    """A task with its client, and the client's own layers."""

    task: ClientTask
    client: Client
    own: Mapping[str, Tensor]


class StackedEngine:
    """Groups tasks, plans each kind of group once, and runs what it can on stacks of clients."""

    def __init__(
        self,
        population: Population,
        workspaces: Mapping[str, Workspace],
        reserve: int,
        backend: Backend,
        limits: Limits,
    ) -> None:
        self._plain = EmbeddedEngine(population, workspaces, reserve)
        self._workspaces = workspaces
        self._backend = backend
        self._limits = limits
        self._plans: OrderedDict[Hashable, Any] = OrderedDict()
        self._inputs: OrderedDict[Hashable, Tensor] = OrderedDict()
        self._labels: dict[Hashable, Tensor] = {}
        self._said: set[str] = set()
        self._program = lru_cache(PROGRAMS)(self._read)

    def map(self, tasks: Iterable[ClientTask]) -> Iterator[ClientUpdate]:
        """Carry out the tasks, group after group."""
        groups: dict[Hashable, list[ClientTask]] = {}
        for task in tasks:
            groups.setdefault(self._kind_of(task), []).append(task)
        for kind, group in groups.items():
            if kind is None:
                yield from self._plain.map(group)
            else:
                yield from WORK[group[0].kind](self, [self._job(task) for task in group])

    # What can be fused, and with what.

    def _kind_of(self, task: ClientTask) -> Hashable | None:
        """Return what the tasks of one group have in common; None for the plain path."""
        if task.kind not in WORK or (task.kind == "evaluate" and task.attack != "pgd"):
            return None
        client = self._plain.client(task.client)
        samples = self._samples(task, client)
        if samples == 0:
            return None
        try:
            if task.kept or task.adversarial_statistics:
                raise NotFusableError("sub-networks" if task.kept else "two sets of norm statistics")
            if task.kind == "train" and min(_sizes(task, samples)) < 2:
                raise NotFusableError("a batch of a single sample")
            self._program(*self._span(task))
        except NotFusableError as reason:
            self._say(f"the GPU engine leaves this to the plain path: {reason}")
            return None
        frozen = tuple(module.digest for module in task.frozen)
        return (task.kind, *self._span(task), frozen, samples, task.training, task.threat)

    def _samples(self, task: ClientTask, client: Client) -> int:
        if task.kind == "evaluate":
            return len(evaluated_positions(task, len(client.data.validation)))
        return len(client.data.train)

    def _span(self, task: ClientTask) -> tuple[str, int, int, int | None]:
        """Return architecture, first and last atom and exit of what a task runs."""
        first = 0 if task.kind == "evaluate" else task.first
        return task.architecture, first, task.last, task.head

    def _read(self, architecture: str, first: int, last: int, head: int | None) -> Program:
        workspace = self._workspaces[architecture]
        shape = feature_shape(workspace, first)
        return read_program(workspace.chain, first, last, head, shape, workspace.classes)

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            log.warning(text)

    def _job(self, task: ClientTask) -> _Job:
        before = task.round if task.kind == "train" else task.round + 1
        layers = self._workspaces[task.architecture].layers
        own = layers.get(task.architecture, task.client, task.timeline, before) or {}
        return _Job(task, self._plain.client(task.client), own)

    def _plan(self, key: Hashable, make: Callable[[], P]) -> P:
        """Return a plan that is kept, or make it; the one that was not used for longest goes."""
        if key not in self._plans:
            while len(self._plans) >= PLANS:
                self._plans.popitem(last=False)
            self._plans[key] = make()
        self._plans.move_to_end(key)
        plan: P = self._plans[key]
        return plan

    # Training.

    def _train(self, jobs: Sequence[_Job]) -> Iterator[ClientUpdate]:
        for part in self._chunks(jobs, jobs[0].task.training.batch if jobs[0].task.training else 1):
            yield from self._train_together(part)

    def _train_together(self, jobs: Sequence[_Job]) -> Iterator[ClientUpdate]:
        task = jobs[0].task
        assert task.training is not None
        program, samples = self._program(*self._span(task)), len(jobs[0].client.data.train)
        constant, threat = replace(task.training, learning_rate=0.0), _constant(task.threat)
        group = _filled(jobs)
        plan = self._plan(
            ("train", program, len(group), samples, constant, threat),
            lambda: TrainingPlan(program, self._backend, len(group), samples, constant, threat),
        )
        inputs = self._training_inputs(group)
        data = [(x, self._labels_of(job, "train", job.client.data.train)) for job, x in zip(group, inputs, strict=True)]
        plan.load(self._parameters(group), data, task.training, task.threat)
        plan.run(self._schedule(group, samples), _seed(jobs))
        yield from self._updates(jobs, plan, task.training)

    def _schedule(self, jobs: Sequence[_Job], samples: int) -> Iterator[Tensor]:
        """Yield the positions of every local iteration, those of all clients together, from the device's memory."""
        hyper = jobs[0].task.training
        assert hyper is not None
        drawn = [list(batches(samples, hyper.batch, hyper.iterations, job.task)) for job in jobs]
        sizes = [len(batch) for batch in drawn[0]]
        everything = torch.stack([torch.cat(positions) for positions in drawn]).to(self._backend.device)
        yield from torch.split(everything, sizes, dim=1)

    def _updates(self, jobs: Sequence[_Job], plan: TrainingPlan, hyper: LocalTraining) -> Iterator[ClientUpdate]:
        tensors, losses, sound = plan.results()
        task = jobs[0].task
        chain = self._workspaces[task.architecture].chain
        own_names = [name for name in chain.local(task.first, task.last) if name in tensors]
        layers = {name: tensors[name].cpu() for name in own_names}
        sent = [name for name in tensors if name not in layers]
        for number, (job, loss, finite) in enumerate(zip(jobs, losses, sound, strict=False)):
            task, workspace = job.task, self._workspaces[job.task.architecture]
            local = {name: values[number] for name, values in layers.items()}
            kept = {**job.own, **local, **self._counters(chain, task, job.own, workspace, hyper.iterations)}
            loss = loss if finite else math.nan
            if math.isfinite(loss):
                workspace.layers.put(task.architecture, task.client, task.round, kept, task.timeline)
            yield ClientUpdate(
                task.kind,
                task.round,
                task.client,
                weight=shard_weight(job.client),
                metrics={"loss": loss, "samples": float(len(job.client.data.train))},
                local=kept if task.wants_local else {},
                parameters={name: tensors[name][number] for name in sent},
                number=task.number,
            )

    @staticmethod
    def _counters(
        chain: Chain, task: ClientTask, own: Mapping[str, Tensor], workspace: Workspace, steps: int
    ) -> dict[str, Tensor]:
        """Return the norm layers' counts of batches, which nothing computes with, as the plain path leaves them."""
        names = [name for name in chain.local(task.first, task.last) if name.endswith("num_batches_tracked")]
        return {name: own.get(name, workspace.initial[name]) + steps for name in names}

    # Evaluation and measuring.

    def _evaluate(self, jobs: Sequence[_Job]) -> Iterator[ClientUpdate]:
        samples = self._samples(jobs[0].task, jobs[0].client)
        for part in self._chunks(jobs, samples):
            counts = self._answered(part, samples, [self._held_out(job) for job in part])
            for number, job in enumerate(part):
                metrics = {"samples": float(samples), **{name: values[number] for name, values in counts.items()}}
                yield _answer(job, shard_weight(job.client), metrics)

    def _measure(self, jobs: Sequence[_Job]) -> Iterator[ClientUpdate]:
        samples = self._samples(jobs[0].task, jobs[0].client)
        unlabelled = torch.zeros(samples, dtype=torch.long, device=self._backend.device)
        for part in self._chunks(jobs, samples):
            found = self._answered(part, samples, [(x, unlabelled) for x in self._training_inputs(part)])
            for job, magnitude in zip(part, found["magnitude"], strict=True):
                yield _answer(job, float(samples), {"samples": float(samples), "magnitude": magnitude})

    def _answered(
        self, jobs: Sequence[_Job], samples: int, data: Sequence[tuple[Tensor, Tensor]]
    ) -> dict[str, list[float]]:
        """Return what a group that does not train was asked for, for each of its clients."""
        task, clients = jobs[0].task, len(jobs)
        program, threat = self._program(*self._span(task)), _constant(task.threat)
        measures = task.kind == "measure"
        plan = self._plan(
            (task.kind, program, clients, samples, threat),
            lambda: EvaluationPlan(program, self._backend, clients, samples, threat, measures),
        )
        return plan.run(self._parameters(jobs), data, task.threat, _seed(jobs))

    def _held_out(self, job: _Job) -> tuple[Tensor, Tensor]:
        """Return the images and labels that an evaluation is about."""
        examples = job.client.data.validation
        positions = evaluated_positions(job.task, len(examples)).to(self._backend.device)
        images, labels = self._images(job, "validation", examples), self._labels_of(job, "validation", examples)
        return images[positions], labels[positions]

    # What tasks are loaded with.

    def _parameters(self, jobs: Sequence[_Job]) -> list[Mapping[str, Tensor]]:
        """Return every tensor that the clients' programs need, from wherever it is kept."""
        found: list[Mapping[str, Tensor]] = []
        for job in jobs:
            workspace = self._workspaces[job.task.architecture]
            frozen = {n: v for module in job.task.frozen for n, v in workspace.modules[module.digest].items()}
            found.append({**workspace.initial, **job.own, **frozen, **job.task.parameters})
        return found

    def _training_inputs(self, jobs: Sequence[_Job]) -> list[Tensor]:
        """Return what atom `first` reads for every training sample: images, or features that stay on the device."""
        if not jobs[0].task.frozen:
            return [self._images(job, "train", job.client.data.train) for job in jobs]
        keys = [self._feature_key(job) for job in jobs]
        missing = [job for job, key in zip(jobs, keys, strict=True) if key not in self._inputs]
        found = dict(zip([self._feature_key(job) for job in missing], self._features(missing), strict=True))
        inputs = [found[key] if key in found else self._inputs[key] for key in keys]
        for key, value in found.items():
            self._keep(key, value)
        return inputs

    def _feature_key(self, job: _Job) -> Hashable:
        chain = self._workspaces[job.task.architecture].chain
        own = digest({name: job.own[name] for name in chain.local(0, job.task.first) if name in job.own})
        return "features", job.task.client, tuple(module.digest for module in job.task.frozen), own

    def _features(self, jobs: Sequence[_Job]) -> Iterator[Tensor]:
        """Run the frozen prefix of every client over its training samples, in evaluation mode."""
        for job in jobs:
            task = job.task
            program = self._program(task.architecture, 0, task.first, None)
            folded = Folded(program, self._backend.kernels, self._backend.compute)
            folded.fold(folded.layout.stacked(self._parameters([job]), self._backend.device))
            images = self._images(job, "train", job.client.data.train).unsqueeze(0)
            yield torch.cat([folded.features(part)[0] for part in torch.split(images, task.batch, dim=1)])

    def _images(self, job: _Job, part: str, examples: LocalExamples) -> Tensor:
        key = ("images", job.task.client, part)
        if key not in self._inputs:
            images = examples.fetch(torch.arange(len(examples))).to(self._backend.device)
            self._keep(key, images.permute(0, 2, 3, 1).contiguous())
        self._inputs.move_to_end(key)
        return self._inputs[key]

    def _labels_of(self, job: _Job, part: str, examples: LocalExamples) -> Tensor:
        key = (job.task.client, part)
        if key not in self._labels:
            self._labels[key] = examples.labels.to(self._backend.device)
        return self._labels[key]

    def _keep(self, key: Hashable, value: Tensor) -> None:
        """Let inputs stay on the device; those not used for longest make room."""
        self._inputs[key] = value
        while sum(kept.nbytes for kept in self._inputs.values()) > self._limits.resident and len(self._inputs) > 1:
            self._inputs.popitem(last=False)

    def _chunks(self, jobs: Sequence[_Job], samples: int) -> Iterator[Sequence[_Job]]:
        """Cut a group so that the activations of each part fit."""
        program = self._program(*self._span(jobs[0].task))
        _, height, width = program.shape
        elements = 0
        for block in program.blocks:
            elements += 2 * block.outputs * height * width
            height, width = (height // 2, width // 2) if block.pool else (height, width)
        size = self._backend.compute.itemsize * elements * samples
        most = max(1, self._limits.activations // max(size, 1))
        # Parts of one size need one plan.
        parts = math.ceil(len(jobs) / most)
        each = math.ceil(len(jobs) / parts)
        for start in range(0, len(jobs), each):
            yield jobs[start : start + each]


WORK: Mapping[str, Callable[[StackedEngine, Sequence[_Job]], Iterator[ClientUpdate]]] = {
    "train": StackedEngine._train,
    "evaluate": StackedEngine._evaluate,
    "measure": StackedEngine._measure,
}


def evaluated_positions(task: ClientTask, available: int) -> Tensor:
    """Return which held-out samples an evaluation is about."""
    chosen = drawn_samples(task, available)
    first, last = task.part or (0, len(chosen))
    return chosen[first:last]


def feature_shape(workspace: Workspace, first: int) -> tuple[int, ...]:
    """Return the shape of one input of atom `first`."""
    probe = torch.zeros((1, *workspace.input_shape), device=workspace.device)
    with torch.no_grad(), workspace.chain.mode(0, first, training=False):
        return tuple(workspace.chain.run(probe, 0, first).shape[1:])


def _sizes(task: ClientTask, samples: int) -> set[int]:
    """Return the sizes of the batches that a task trains on."""
    assert task.training is not None
    full, rest = divmod(samples, task.training.batch)
    passes = full + (rest > 0)
    sizes = {task.training.batch} if full else set()
    return sizes | {rest} if rest and task.training.iterations >= passes else sizes or {rest}


def _answer(job: _Job, weight: float, metrics: Mapping[str, float]) -> ClientUpdate:
    task = job.task
    return ClientUpdate(task.kind, task.round, task.client, weight=weight, metrics=metrics, number=task.number)


def _filled(jobs: Sequence[_Job]) -> list[_Job]:
    """Return a group of an even size, so that fewer plans are needed; whoever fills it up is trained for nothing."""
    return [*jobs, jobs[-1]] if len(jobs) > FEW and len(jobs) % 2 else list(jobs)


def _constant(threat: ThreatModel | None) -> ThreatModel | None:
    """Return what of a threat a plan depends on: radius and step may change while it is kept."""
    return threat if threat is None or threat.harmless else replace(threat, radius=1.0, step=1.0)


def _seed(jobs: Sequence[_Job]) -> int:
    """Return the seed of a group's draws: it depends on who is in the group."""
    task = jobs[0].task
    who = [number for job in jobs for number in (job.task.client, job.task.number)]
    return draw_key(task.seed, f"fast {task.kind}", task.round, *who)
