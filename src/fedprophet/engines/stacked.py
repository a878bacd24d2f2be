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
from fedprophet.client.run import Client, layers_before, shard_weight
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
P = TypeVar("P", TrainingPlan, EvaluationPlan)
FEW = 4
"""Groups up to this size are planned as they are."""
CLIENTS = 4096
"""Clients that are kept at hand: which samples are theirs is soon said, but not for everybody every round."""


@dataclass(frozen=True)
class Limits:
    """How many bytes the activations of a group may take, and how many of inputs and of plans stay between rounds."""

    activations: int
    resident: int
    plans: int = 8 * 2**30


@dataclass(frozen=True)
class _Job:
    """A task with its client, and the client's own layers."""

    task: ClientTask
    client: Client
    own: Mapping[str, Tensor]


class Resident:
    """Tensors that stay on the device, at most so many bytes; those not used for longest make room."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: OrderedDict[Hashable, Tensor] = OrderedDict()
        self.nbytes = 0

    def get(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """Return the tensor of that key, made now where it is not there."""
        if key not in self._kept:
            self._kept[key] = make()
            self.nbytes += self._kept[key].nbytes
        self._kept.move_to_end(key)
        while self.nbytes > self._limit and len(self._kept) > 1:
            self.nbytes -= self._kept.popitem(last=False)[1].nbytes
        return self._kept[key]


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
        self._client = lru_cache(CLIENTS)(self._plain.client)
        self._workspaces = workspaces
        self._backend = backend
        self._limits = limits
        self._plans: OrderedDict[Hashable, Any] = OrderedDict()
        self._resident = Resident(limits.resident)
        self._said: set[str] = set()
        self._programs: dict[Hashable, Program | str] = {}

    def map(self, tasks: Iterable[ClientTask]) -> Iterator[ClientUpdate]:
        """Carry out the tasks, group after group."""
        groups: dict[Hashable, list[ClientTask]] = {}
        for task in tasks:
            groups.setdefault(self._kind_of(task), []).append(task)
        for kind, group in groups.items():
            if kind is None:
                yield from self._plain.map(group)
                continue
            for part in self._chunks(group):
                yield from WORK[part[0].kind](self, [self._job(task) for task in part])

    # What can be fused, and with what.

    def _kind_of(self, task: ClientTask) -> Hashable | None:
        """Return what the tasks of one group have in common; None for the plain path."""
        if task.kind in EFFORTLESS:
            return None
        samples = self._samples(task)
        if samples == 0:
            return None
        try:
            self._check(task, samples)
        except NotFusableError as reason:
            self._say(f"the GPU engine leaves this to the plain path: {reason}")
            return None
        frozen = tuple(module.digest for module in task.frozen)
        return (task.kind, *self._span(task), frozen, samples, task.training, task.threat)

    def _check(self, task: ClientTask, samples: int) -> None:
        """Raise NotFusableError where a task cannot be carried out on a stack."""
        if task.kind not in WORK:
            raise NotFusableError(f"tasks of the kind {task.kind!r}")
        if task.kind == "evaluate" and task.threat is not None and task.attack != "pgd":
            raise NotFusableError(f"attack {task.attack!r}")
        if task.kept or task.adversarial_statistics:
            raise NotFusableError("sub-networks" if task.kept else "two sets of norm statistics")
        if task.kind == "train" and min(_sizes(task, samples)) < 2:
            raise NotFusableError("a batch of a single sample")
        program = self._program(*self._span(task))
        if bool(program.dense) == (task.kind == "measure"):
            raise NotFusableError("measuring class scores" if program.dense else "a model without a linear layer")
        if task.frozen and task.kind != "evaluate" and self._program(*self._prefix(task)).dense:
            raise NotFusableError("a linear layer in front of a convolution")
        if self._activations(task, samples) > self._limits.activations:
            raise NotFusableError(f"{samples} samples of one client at once, which need more memory than there is")

    def _samples(self, task: ClientTask) -> int:
        data = self._client(task.client).data
        if task.kind == "evaluate":
            return len(evaluated_positions(task, len(data.validation)))
        return len(data.train)

    @staticmethod
    def _span(task: ClientTask) -> tuple[str, int, int, int | None]:
        """Return architecture, first and last atom and exit of what a task runs."""
        first = 0 if task.kind == "evaluate" else task.first
        return task.architecture, first, task.last, task.head

    @staticmethod
    def _prefix(task: ClientTask) -> tuple[str, int, int, None]:
        """Return the same for what lies in front of it."""
        return task.architecture, 0, task.first, None

    def _program(self, *span: Any) -> Program:
        """Read a span once, also where it is refused."""
        if span not in self._programs:
            try:
                self._programs[span] = self._read(*span)
            except NotFusableError as reason:
                self._programs[span] = str(reason)
        found = self._programs[span]
        if isinstance(found, str):
            raise NotFusableError(found)
        return found

    def _read(self, architecture: str, first: int, last: int, head: int | None) -> Program:
        workspace = self._workspaces[architecture]
        shape = feature_shape(workspace, first)
        return read_program(workspace.chain, first, last, head, shape, workspace.classes)

    def _activations(self, task: ClientTask, samples: int) -> int:
        """Return how many bytes of activations one client of a group needs."""
        program = self._program(*self._span(task))
        together = min(samples, task.training.batch) if task.training and task.kind == "train" else samples
        _, height, width = program.shape
        elements = 0
        for block in program.blocks:
            elements += 2 * block.outputs * height * width
            height, width = (height // 2, width // 2) if block.pool else (height, width)
        return self._backend.compute.itemsize * elements * together

    def _chunks(self, tasks: Sequence[ClientTask]) -> Iterator[Sequence[ClientTask]]:
        """Cut a group so that the activations of each part fit."""
        size = self._activations(tasks[0], self._samples(tasks[0]))
        most = max(1, self._limits.activations // size)
        # Parts of one size need one plan.
        parts = math.ceil(len(tasks) / most)
        each = math.ceil(len(tasks) / parts)
        for start in range(0, len(tasks), each):
            yield tasks[start : start + each]

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            log.warning(text)

    def _job(self, task: ClientTask) -> _Job:
        layers = self._workspaces[task.architecture].layers
        own = layers.get(task.architecture, task.client, task.timeline, layers_before(task)) or {}
        return _Job(task, self._client(task.client), own)

    def _plan(self, key: Hashable, make: Callable[[], P]) -> P:
        """Return a plan that is kept, or make it; those not used for longest make room."""
        if key not in self._plans:
            while self._plans and sum(plan.nbytes for plan in self._plans.values()) > self._limits.plans:
                self._plans.popitem(last=False)
            self._plans[key] = make()
        self._plans.move_to_end(key)
        plan: P = self._plans[key]
        return plan

    # Training.

    def _train(self, jobs: Sequence[_Job]) -> Iterator[ClientUpdate]:
        task = jobs[0].task
        assert task.training is not None
        program, samples = self._program(*self._span(task)), len(jobs[0].client.data.train)
        constant, threat = replace(task.training, learning_rate=0.0), _constant(task.threat)
        group = _filled(jobs)
        plan = self._plan(
            ("train", program, len(group), samples, constant, threat),
            lambda: TrainingPlan(program, self._backend, len(group), samples, constant, threat),
        )
        data = [(self._inputs(job), self._labels(job, "train", job.client.data.train)) for job in group]
        plan.load(self._parameters(group), data, task.training, task.threat)
        plan.run(self._schedule(group, samples), _seeds(group))
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
        task, workspace = jobs[0].task, self._workspaces[jobs[0].task.architecture]
        chain = workspace.chain
        names = [name for name in chain.local(task.first, task.last) if name in tensors]
        layers = brought_home({name: tensors[name] for name in names})
        sent = [name for name in tensors if name not in layers]
        for number, (job, loss, finite) in enumerate(zip(jobs, losses, sound, strict=False)):
            task = job.task
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
        samples = self._samples(jobs[0].task)
        counts = self._answered(jobs, samples, [self._held_out(job) for job in jobs])
        for number, job in enumerate(jobs):
            metrics = {"samples": float(samples), **{name: values[number] for name, values in counts.items()}}
            yield _answer(job, shard_weight(job.client), metrics)

    def _measure(self, jobs: Sequence[_Job]) -> Iterator[ClientUpdate]:
        samples = self._samples(jobs[0].task)
        unlabelled = torch.zeros(samples, dtype=torch.long, device=self._backend.device)
        found = self._answered(jobs, samples, [(self._inputs(job), unlabelled) for job in jobs])
        for job, magnitude in zip(jobs, found["magnitude"], strict=True):
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
        return plan.run(self._parameters(jobs), data, task.threat, _seeds(jobs))

    def _held_out(self, job: _Job) -> tuple[Tensor, Tensor]:
        """Return the images and labels that an evaluation is about."""
        examples = job.client.data.validation
        images, labels = self._images(job, "validation", examples), self._labels(job, "validation", examples)
        chosen = evaluated_positions(job.task, len(examples))
        if len(chosen) == len(examples):
            return images, labels
        positions = chosen.to(self._backend.device)
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

    def _inputs(self, job: _Job) -> Tensor:
        """Return what atom `first` reads for every training sample: images, or features that stay on the device."""
        if not job.task.frozen:
            return self._images(job, "train", job.client.data.train)
        chain = self._workspaces[job.task.architecture].chain
        own = digest({name: job.own[name] for name in chain.local(0, job.task.first) if name in job.own})
        key = "features", job.task.client, tuple(module.digest for module in job.task.frozen), own
        return self._resident.get(key, lambda: self._features(job))

    def _features(self, job: _Job) -> Tensor:
        """Run a client's frozen prefix over its training samples, in evaluation mode."""
        program = self._program(*self._prefix(job.task))
        folded = Folded(program, self._backend.kernels, self._backend.compute)
        folded.fold(folded.layout.stacked(self._parameters([job]), self._backend.device))
        images = self._images(job, "train", job.client.data.train).unsqueeze(0)
        parts = [folded.features(part)[0] for part in torch.split(images, job.task.batch, dim=1)]
        # The padding of channels is the kernels' own affair.
        return torch.cat(parts)[..., : program.feature[0]].contiguous()

    def _images(self, job: _Job, part: str, examples: LocalExamples) -> Tensor:
        def fetch() -> Tensor:
            images = examples.fetch(torch.arange(len(examples))).to(self._backend.device)
            return images.permute(0, 2, 3, 1).contiguous()

        return self._resident.get(("images", job.task.client, part), fetch)

    def _labels(self, job: _Job, part: str, examples: LocalExamples) -> Tensor:
        key = ("labels", job.task.client, part)
        return self._resident.get(key, lambda: examples.labels.to(self._backend.device))


WORK: Mapping[str, Callable[[StackedEngine, Sequence[_Job]], Iterator[ClientUpdate]]] = {
    "train": StackedEngine._train,
    "evaluate": StackedEngine._evaluate,
    "measure": StackedEngine._measure,
}
EFFORTLESS = ("report", "adopt")
"""Tasks that compute nothing: where they are carried out is not worth a word."""


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


def brought_home(stacks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return stacks of all clients in the host's memory, in one transfer."""
    if not stacks:
        return {}
    flat = torch.cat([stack.flatten(1) for stack in stacks.values()], dim=1).cpu()
    parts = torch.split(flat, [stack[0].numel() for stack in stacks.values()], dim=1)
    return {name: part.reshape(stack.shape) for (name, stack), part in zip(stacks.items(), parts, strict=True)}


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


def _seeds(jobs: Sequence[_Job]) -> list[int]:
    """Return the seed of each task's draws: it does not depend on who else is in the group."""
    tasks = [job.task for job in jobs]
    return [draw_key(t.seed, f"fast {t.kind}", t.round, t.client, t.part[0] if t.part else 0) for t in tasks]
