"""The stacked engine: tasks that differ in the client and in how far they go are carried out together (`fast`).

Sub-networks of fewer channels are padded to widths that several of them share (`fast.narrow`). What it cannot fuse
(another kind of model, attacks other than PGD) goes to the plain path on the same device, and it says so once.
"""

import logging
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fedprophet.cascade.narrow import narrow_chain
from fedprophet.client.run import shard_weight
from fedprophet.client.statistics import under_attack
from fedprophet.client.trainer import batches
from fedprophet.client.workspace import Workspace
from fedprophet.engines.inputs import Inputs, evaluated_positions
from fedprophet.engines.job import Job
from fedprophet.engines.plain import EmbeddedEngine
from fedprophet.fast.folded import Folded
from fedprophet.fast.layout import sent, transferred
from fedprophet.fast.narrow import WHOLE, fitted, room, run_at, scalable, shapes_in, width_of, work
from fedprophet.fast.program import Ladder, Program, continues
from fedprophet.fast.reading import NotFusableError, read_program
from fedprophet.fast.rounds import Backend, Evaluation, TrainingPlan
from fedprophet.fleet.population import Population
from fedprophet.messages.task import ClientTask, ClientUpdate, LocalTraining
from fedprophet.threat import ThreatModel

log = logging.getLogger("fedprophet")
BEGINNING = 10
"""So many of the clients to evaluate come first: the device has something to do while the others are prepared."""
FLOATS = 6
"""So often inputs lie in memory in float32: clean, perturbed, drawn, and on their way."""
CLIENTS = 4096
"""Clients that are kept at hand: which samples are theirs is soon said, but not for everybody every round."""


@dataclass(frozen=True)
class Limits:
    """How many bytes the activations of a group may take, and how many of inputs and of plans stay between rounds."""

    activations: int
    resident: int
    plans: int = 8 * 2**30


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
        self._plans: OrderedDict[Hashable, TrainingPlan] = OrderedDict()
        self._inputs = Inputs(backend.device, limits.resident)
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
            # The device works on one part while the next is prepared.
            asked: Iterator[ClientUpdate] = iter(())
            for jobs in self._parts(group):
                before, asked = asked, WORK[jobs[0].task.kind](self, jobs)
                yield from before
            yield from asked

    def _parts(self, tasks: Sequence[ClientTask]) -> Iterator[list[Job]]:
        """Yield the tasks of a group in the parts that are carried out together."""
        for width, abreast in self._abreast(tasks).items():
            for ladder in self._ladders(abreast, width):
                for part in self._chunks(ladder, width):
                    yield self._jobs(part, width)

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
        # Only where they train, and whole, may clients leave at different exits.
        leave = (task.last, task.head) if task.kept or task.kind != "train" else None
        what = task.kind, task.architecture, task.first, frozen, leave, bool(task.kept), task.adversarial_statistics
        return *what, samples, task.training, task.threat

    def _check(self, task: ClientTask, samples: int) -> None:
        """Raise NotFusableError where a task cannot be carried out on a stack."""
        if task.kind not in WORK:
            raise NotFusableError(f"tasks of the kind {task.kind!r}")
        if task.kind == "evaluate" and task.threat is not None and task.attack != "pgd":
            raise NotFusableError(f"attack {task.attack!r}")
        if task.kept and (task.first or task.frozen or task.head is not None):
            raise NotFusableError("sub-networks of a part of the model")
        if task.adversarial_statistics and (task.kept or task.frozen):
            raise NotFusableError("two sets of norm statistics in a sub-network or a cascade")
        if task.kind == "train" and min(_sizes(task, samples)) < 2:
            raise NotFusableError("a batch of a single sample")
        width = self._width(task)
        program = self._program(*self._span(task, width))
        if bool(program.dense) == (task.kind == "measure"):
            raise NotFusableError("measuring class scores" if program.dense else "a model without a linear layer")
        if task.frozen and task.kind != "evaluate" and self._program(*self._prefix(task)).dense:
            raise NotFusableError("a linear layer in front of a convolution")
        # A sub-network may be run among wider ones.
        if self._activations(task, samples) > self._limits.activations:
            raise NotFusableError(f"{samples} samples of one client at once, which need more memory than there is")

    def _samples(self, task: ClientTask) -> int:
        data = self._client(task.client).data
        if task.kind == "evaluate":
            return len(evaluated_positions(task, len(data.validation)))
        return len(data.train)

    def _width(self, task: ClientTask) -> int:
        """Return the least width that has room for what a task runs."""
        return width_of(self._workspaces[task.architecture].channels, task.kept) if task.kept else WHOLE

    @staticmethod
    def _span(task: ClientTask, width: int) -> tuple[str, int, int, int | None, int]:
        """Return architecture, first and last atom, exit and width of what a task runs."""
        first = 0 if task.kind == "evaluate" else task.first
        return task.architecture, first, task.last, task.head, width

    @staticmethod
    def _prefix(task: ClientTask) -> tuple[str, int, int, None, int]:
        """Return the same for what lies in front of it."""
        return task.architecture, 0, task.first, None, WHOLE

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

    def _read(self, architecture: str, first: int, last: int, head: int | None, width: int) -> Program:
        workspace = self._workspaces[architecture]
        shape, chain = feature_shape(workspace, first), workspace.chain
        if width < WHOLE:
            # Factors are in the stacks, so that layers are of their usual kinds.
            chain = narrow_chain(chain, workspace.channels, self._room(workspace, width), scaled=False)
        return read_program(chain, first, last, head, shape, workspace.classes)

    def _room(self, workspace: Workspace, width: int) -> dict[str, Tensor]:
        """Return the channels that a network of a width has."""
        return room(workspace.chain.model, workspace.channels, width, self._backend.kernels.tile)

    def _activations(self, task: ClientTask, samples: int, width: int = WHOLE) -> int:
        """Return how many bytes of inputs and activations one client of a group needs."""
        program = self._program(*self._span(task, width))
        together = min(samples, task.training.batch) if task.training and task.kind == "train" else samples
        elements = 0
        for block, (lines, columns) in zip(program.blocks, program.sizes, strict=False):
            elements += 2 * len(block.convolutions) * block.outputs * lines * columns // block.stride**2
        return together * (self._backend.compute.itemsize * elements + FLOATS * 4 * math.prod(program.shape))

    def _abreast(self, tasks: Sequence[ClientTask]) -> Mapping[int, Sequence[ClientTask]]:
        """Return tasks by the width that they are run at: sub-networks with wider ones where that costs less."""
        if not tasks[0].kept:
            return {WHOLE: tasks}
        widths = [self._width(task) for task in tasks]
        wider = run_at(Counter(widths), lambda width: work(self._program(*self._span(tasks[0], width))))
        found: dict[int, list[ClientTask]] = {}
        for task, width in zip(tasks, widths, strict=True):
            found.setdefault(wider[width], []).append(task)
        return found

    def _ladders(self, tasks: Sequence[ClientTask], width: int) -> Iterator[Sequence[ClientTask]]:
        """Yield tasks whose programs begin alike together, those that go furthest first."""
        ladder: list[ClientTask] = []
        for task in sorted(tasks, key=lambda task: (-task.last, task.client, task.number)):
            if ladder and not continues(*(self._program(*self._span(one, width)) for one in (ladder[-1], task))):
                yield ladder
                ladder = []
            ladder.append(task)
        yield ladder

    def _chunks(self, tasks: Sequence[ClientTask], width: int = WHOLE) -> Iterator[Sequence[ClientTask]]:
        """Cut a group so that the activations of each part fit; the first task goes furthest."""
        size = self._activations(tasks[0], self._samples(tasks[0]), width)
        most = max(1, self._limits.activations // size)
        if tasks[0].kind != "train" and len(tasks) > 4 * BEGINNING and most >= BEGINNING:
            yield tasks[:BEGINNING]
            tasks = tasks[BEGINNING:]
        # Parts of one size need one plan.
        parts = math.ceil(len(tasks) / most)
        each = math.ceil(len(tasks) / parts)
        for start in range(0, len(tasks), each):
            yield tasks[start : start + each]

    def _ladder(self, jobs: Sequence[Job]) -> Ladder:
        return Ladder(tuple(self._program(*self._span(job.task, job.width)) for job in jobs))

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            log.warning(text)

    def _jobs(self, tasks: Sequence[ClientTask], width: int) -> list[Job]:
        return [Job(task, self._client(task.client), self._workspaces[task.architecture], width) for task in tasks]

    def _plan(self, key: Hashable, make: Callable[[], TrainingPlan]) -> TrainingPlan:
        """Return a plan that is kept, or make it; those not used for longest make room."""
        if key not in self._plans:
            while self._plans and sum(plan.nbytes for plan in self._plans.values()) > self._limits.plans:
                self._plans.popitem(last=False)[1].release()
            self._plans[key] = make()
        self._plans.move_to_end(key)
        return self._plans[key]

    # Training.

    def _train(self, jobs: Sequence[Job]) -> Iterator[ClientUpdate]:
        task = jobs[0].task
        assert task.training is not None
        ladder, samples = self._ladder(jobs), len(jobs[0].client.data.train)
        hyper, threat = replace(task.training, learning_rate=0.0), _constant(task.threat)
        # Whatever the factors are, the same parameters have some: a plan serves the next round as well.
        scaled = scalable(jobs[0].workspace.channels, ladder) if task.kept else ()
        kind = ladder, self._backend, samples, hyper, threat, scaled, task.adversarial_statistics
        plan = self._plan(kind, lambda: TrainingPlan(*kind))
        data = list(zip(self._inputs.read(jobs, self._features), self._inputs.labels(jobs), strict=True))
        plan.load(self._parameters(jobs), data, task.training, task.threat, [job.factors for job in jobs])
        plan.run(self._schedule(jobs, samples), [job.seed for job in jobs])
        yield from self._updates(jobs, plan, task.training)

    def _schedule(self, jobs: Sequence[Job], samples: int) -> Iterator[Tensor]:
        """Yield the positions of every local iteration, those of all clients together, from the device's memory."""
        hyper = jobs[0].task.training
        assert hyper is not None
        drawn = [list(batches(samples, hyper.batch, hyper.iterations, job.task)) for job in jobs]
        sizes = [len(batch) for batch in drawn[0]]
        everything = sent(torch.stack([torch.cat(positions) for positions in drawn]), self._backend.device)
        yield from torch.split(everything, sizes, dim=1)

    def _updates(self, jobs: Sequence[Job], plan: TrainingPlan, hyper: LocalTraining) -> Iterator[ClientUpdate]:
        stacks, losses, sound = plan.results()
        trained = [job.taken(tensors) for job, tensors in zip(jobs, stacks, strict=True)]
        layers = brought_home([job.local(tensors) for job, tensors in zip(jobs, trained, strict=True)])
        for job, tensors, own, loss, finite in zip(jobs, trained, layers, losses, sound, strict=True):
            task = job.task
            kept = {**job.own, **own, **job.counters(hyper.iterations)}
            loss = loss if finite else math.nan
            if math.isfinite(loss):
                job.layers.put(task.architecture, task.client, task.round, kept, task.timeline)
            yield ClientUpdate(
                task.kind,
                task.round,
                task.client,
                weight=shard_weight(job.client),
                metrics={"loss": loss, "samples": float(len(job.client.data.train))},
                local=kept if task.wants_local else {},
                parameters={name: value for name, value in tensors.items() if name not in own},
                number=task.number,
            )

    # Evaluation and measuring.

    def _evaluate(self, jobs: Sequence[Job]) -> Iterator[ClientUpdate]:
        samples, threat = self._samples(jobs[0].task), jobs[0].task.threat
        images, labels = zip(*map(self._inputs.held_out, jobs), strict=True)
        parameters = self._parameters(jobs)
        if jobs[0].task.adversarial_statistics:
            # Clean images keep the clean statistics; only what an attack makes of them is judged with the others.
            attacked = [under_attack(own) for own in parameters]
            counts = self._evaluation(jobs, parameters, images, labels, None).answers()
            counts |= self._evaluation(jobs, attacked, images, labels, threat).attacked()
        else:
            counts = self._evaluation(jobs, parameters, images, labels, threat).answers()
        return _answers(jobs, samples, [shard_weight(job.client) for job in jobs], counts)

    def _measure(self, jobs: Sequence[Job]) -> Iterator[ClientUpdate]:
        samples = self._samples(jobs[0].task)
        unlabelled = [torch.zeros(samples, dtype=torch.long, device=self._backend.device)] * len(jobs)
        threat, inputs = jobs[0].task.threat, self._inputs.read(jobs, self._features)
        magnitudes = self._evaluation(jobs, self._parameters(jobs), inputs, unlabelled, threat).magnitudes()
        return _answers(jobs, samples, [float(samples)] * len(jobs), magnitudes)

    def _evaluation(
        self,
        jobs: Sequence[Job],
        parameters: Sequence[Mapping[str, Tensor]],
        inputs: Sequence[Tensor],
        labels: Sequence[Tensor],
        threat: ThreatModel | None,
    ) -> Evaluation:
        """Return what a group that does not train is asked with."""
        folded = self._folded(self._ladder(jobs), parameters)
        together = torch.stack(tuple(inputs)).float(), torch.stack(tuple(labels))
        return Evaluation(folded, *together, threat, [job.seed for job in jobs])

    def _folded(self, ladder: Ladder, parameters: Sequence[Mapping[str, Tensor]]) -> Folded:
        """Return networks in evaluation mode."""
        folded = Folded(ladder, self._backend.kernels, self._backend.compute)
        folded.fold(folded.layout.stacked(parameters, self._backend.device))
        return folded

    # What tasks are loaded with.

    def _parameters(self, jobs: Sequence[Job]) -> Sequence[Mapping[str, Tensor]]:
        """Return every tensor that the clients' programs need, as it lies in a stack."""
        tensors = [job.tensors for job in jobs]
        if not jobs[0].task.kept:
            return tensors
        workspace, used = jobs[0].workspace, self._ladder(jobs).spans
        full = {name: value for name, value in workspace.chain.tensors.items() if name in used}
        shapes = shapes_in(workspace.channels, self._room(workspace, jobs[0].width), full)
        return fitted(tensors, [job.factors for job in jobs], shapes, self._backend.device)

    def _features(self, jobs: Sequence[Job]) -> list[Tensor]:
        """Run the clients' frozen prefixes over their training samples, in evaluation mode."""
        program = self._program(*self._prefix(jobs[0].task))
        folded = self._folded(Ladder((program,) * len(jobs)), self._parameters(jobs))
        parts = torch.split(torch.stack(self._inputs.images(jobs)), jobs[0].task.batch, dim=1)
        # The padding of channels is the kernels' own affair.
        made = torch.cat([folded.features(folded.prepare(part))[..., : program.feature[0]] for part in parts], dim=1)
        return [features.clone() for features in made]


WORK: Mapping[str, Callable[[StackedEngine, Sequence[Job]], Iterator[ClientUpdate]]] = {
    "train": StackedEngine._train,
    "evaluate": StackedEngine._evaluate,
    "measure": StackedEngine._measure,
}
EFFORTLESS = ("report", "adopt")
"""Tasks that compute nothing: where they are carried out is not worth a word."""


def feature_shape(workspace: Workspace, first: int) -> tuple[int, ...]:
    """Return the shape of one input of atom `first`."""
    probe = torch.zeros((1, *workspace.input_shape), device=workspace.device)
    with torch.no_grad(), workspace.chain.mode(0, first, training=False):
        return tuple(workspace.chain.run(probe, 0, first).shape[1:])


def brought_home(tables: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Return tensors in the host's memory, all of them in one transfer."""
    values = iter(transferred([value for table in tables for value in table.values()], torch.device("cpu")))
    return [{name: next(values) for name in table} for table in tables]


def _sizes(task: ClientTask, samples: int) -> set[int]:
    """Return the sizes of the batches that a task trains on."""
    assert task.training is not None
    full, rest = divmod(samples, task.training.batch)
    passes = full + (rest > 0)
    sizes = {task.training.batch} if full else set()
    return sizes | {rest} if rest and task.training.iterations >= passes else sizes or {rest}


def _answers(
    jobs: Sequence[Job], samples: int, weights: Sequence[float], found: Mapping[str, Tensor]
) -> Iterator[ClientUpdate]:
    """Return an iterator over what was found for each client under every name. Who asks first waits for the device."""
    rows = _on_its_way(torch.stack(list(found.values()), dim=1))
    return _read(jobs, samples, weights, tuple(found), rows)


def _read(
    jobs: Sequence[Job],
    samples: int,
    weights: Sequence[float],
    names: Sequence[str],
    rows: Callable[[], Sequence[Sequence[float]]],
) -> Iterator[ClientUpdate]:
    for job, weight, values in zip(jobs, weights, rows(), strict=True):
        task, metrics = job.task, {"samples": float(samples), **dict(zip(names, values, strict=True))}
        yield ClientUpdate(task.kind, task.round, task.client, weight=weight, metrics=metrics, number=task.number)


def _on_its_way(values: Tensor) -> Callable[[], Sequence[Sequence[float]]]:
    """Send numbers to the host; return what waits for them, and not for what the device is asked for later."""
    if not values.is_cuda:
        return values.tolist
    home = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record()

    def wait() -> Sequence[Sequence[float]]:
        arrived.synchronize()
        rows: list[list[float]] = home.tolist()
        return rows

    return wait


def _constant(threat: ThreatModel | None) -> ThreatModel | None:
    """Return what of a threat a plan depends on: radius and step may change while it is kept."""
    return threat if threat is None or threat.harmless else replace(threat, radius=1.0, step=1.0)
