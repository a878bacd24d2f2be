"""The stacked engine: jobs that differ in the client and in how far they go are computed together (`fast`).

Sub-networks of fewer channels are padded to widths that several of them share (`fast.narrow`). AutoAttack runs on rows
of many clients (`engines.row_attacks`). What cannot be fused (`engines.fusing`) goes to the plain path on the same
device, and it says so once.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fedprophet.client.descent import batches
from fedprophet.client.job import Job
from fedprophet.client.statistics import under_attack
from fedprophet.engines.fusing import Fusing
from fedprophet.engines.inputs import Inputs
from fedprophet.engines.plain import PlainEngine
from fedprophet.engines.returning import later, to_host
from fedprophet.engines.row_attacks import RowAttacks
from fedprophet.engines.stack_job import StackJob
from fedprophet.fast.aims import Teacher
from fedprophet.fast.folded import FoldedStack
from fedprophet.fast.layout import sent
from fedprophet.fast.narrow import fitted, scalable, shapes_in
from fedprophet.fast.program import Ladder
from fedprophet.fast.reading import NotFusableError
from fedprophet.fast.rounds import Backend, StackEvaluation, TrainingPlan, Trainings
from fedprophet.messages.answers import Answer
from fedprophet.messages.tasks import Distill, Evaluate, Measure, ModelTask, Predict, Task, Train
from fedprophet.threat import ThreatModel

log = logging.getLogger("fedprophet")
CLIENTS = 4096
"""The most clients that stay in memory: which samples are theirs is not worked out anew in every round."""

Jobs = Sequence[StackJob[ModelTask]]


@dataclass(frozen=True)
class Limits:
    """How many bytes the activations of a group may take, and how many of inputs and of plans stay between rounds."""

    activations: int
    resident: int
    plans: int = 8 * 2**30


class StackedEngine:
    """Groups jobs, plans each kind of group once, and runs what it can on stacks of clients."""

    def __init__(self, plain: PlainEngine, backend: Backend, limits: Limits) -> None:
        self._plain = plain
        self._client = lru_cache(CLIENTS)(plain.client)
        self._backend = backend
        self._limits = limits
        self._fusing = Fusing(plain.workspaces, backend, limits.activations)
        self._rows = RowAttacks(plain.workspaces, limits.activations)
        self._inputs = Inputs(backend.device, limits.resident)
        self._plans: OrderedDict[Hashable, TrainingPlan] = OrderedDict()
        self._said: set[str] = set()

    def map(self, tasks: Iterable[Task]) -> Iterator[Answer]:
        """Carry out the tasks, group after group."""
        plain: list[Task] = []
        groups: dict[Hashable, list[StackJob[ModelTask]]] = {}
        attacked: dict[Hashable, list[Job[Evaluate]]] = {}
        for task in tasks:
            job = self._job(task)
            if job is None:
                plain.append(task)
            elif isinstance(job, StackJob):
                groups.setdefault(self._fusing.group_key(job), []).append(job)
            else:
                attacked.setdefault(self._rows.group_key(job), []).append(job)
        yield from self._plain.map(plain)
        for rows in attacked.values():
            yield from self._rows.run(rows)
        for group in groups.values():
            # The device works on one stack while the next is prepared.
            asked: Iterator[Answer] = iter(())
            for jobs in self._fusing.stacks(group):
                before, asked = asked, _COMPUTE[jobs[0].task.kind](self, jobs)
                yield from before
            yield from asked

    def _job(self, task: Task) -> StackJob[ModelTask] | Job[Evaluate] | None:
        """Return the task's job on a stack, or on rows of several clients; None for the plain path."""
        if not isinstance(task, ModelTask):
            return None
        try:
            client = self._client(task.client)
            return self._rows.job(task, client) or self._fusing.job(task, client)
        except NotFusableError as reason:
            text = f"the GPU engine leaves this to the plain path: {reason}"
            if text not in self._said:
                self._said.add(text)
                log.warning(text)
            return None

    def _plan(self, key: Hashable, make: Callable[[], TrainingPlan]) -> TrainingPlan:
        """Return a plan that is kept, or make it; those not used for longest make room."""
        if key not in self._plans:
            while self._plans and sum(plan.nbytes for plan in self._plans.values()) > self._limits.plans:
                self._plans.popitem(last=False)[1].release()
            self._plans[key] = make()
        self._plans.move_to_end(key)
        return self._plans[key]

    # The computations of each kind of task.

    def _train(self, jobs: Sequence[StackJob[Train]]) -> Iterator[Answer]:
        data = list(zip(self._read(jobs), map(self._inputs.labels, jobs), strict=True))
        stacks, losses, sound = self._descended(jobs, data, self._prior(jobs))
        trained = [job.cut_out(tensors) for job, tensors in zip(jobs, stacks, strict=True)]
        layers = to_host([job.local_of(tensors) for job, tensors in zip(jobs, trained, strict=True)])
        for job, tensors, own, loss, finite in zip(jobs, trained, layers, losses, sound, strict=True):
            counters = job.counters()
            local = {**own, **job.local_of(counters)}
            shared = {name: value for name, value in {**tensors, **counters}.items() if name not in local}
            yield job.trained(loss, shared, local, finite)

    def _distil(self, jobs: Sequence[StackJob[Distill]]) -> Iterator[Answer]:
        data = [(self._inputs.images(job), job.labels) for job in jobs]
        stacks, losses, _ = self._descended(jobs, data, teachers=[job.teacher for job in jobs])
        for job, tensors, loss in zip(jobs, stacks, losses, strict=True):
            yield job.distilled(loss, {**tensors, **job.counters()})

    def _predict(self, jobs: Sequence[StackJob[Predict]]) -> Iterator[Answer]:
        folded = self._folded(self._fusing.ladder(jobs), self._parameters(jobs))
        pieces = zip(*(torch.split(self._inputs.images(job), jobs[0].at_once) for job in jobs), strict=True)
        scores = [folded.scores(folded.prepare(torch.stack(piece))) for piece in pieces]
        return later(jobs, torch.cat(scores, dim=1), lambda job, row: job.predicted(row.clone()))

    def _evaluate(self, jobs: Sequence[StackJob[Evaluate]]) -> Iterator[Answer]:
        images, labels = zip(*map(self._inputs.held_out, jobs), strict=True)
        parameters, threat = self._parameters(jobs), jobs[0].threat
        prior = self._prior(jobs)
        evaluation = self._evaluation(jobs, parameters, images, labels, threat, prior)
        clean = evaluation.clean()
        if jobs[0].two_statistics and threat is not None:
            # Clean images keep the clean statistics; attacked images are evaluated with the adversarial ones.
            attacked = [under_attack(own) for own in parameters]
            evaluation = self._evaluation(jobs, attacked, images, labels, threat, prior)
        adversarial = torch.zeros_like(clean) if threat is None else evaluation.adversarial()
        counts = torch.stack([clean, adversarial], dim=1)
        return later(jobs, counts, lambda job, row: job.evaluated(int(row[0]), int(row[1]), {}))

    def _measure(self, jobs: Sequence[StackJob[Measure]]) -> Iterator[Answer]:
        unlabelled = [torch.zeros(jobs[0].samples, dtype=torch.long, device=self._backend.device)] * len(jobs)
        evaluation = self._evaluation(jobs, self._parameters(jobs), self._read(jobs), unlabelled, jobs[0].threat)
        return later(jobs, evaluation.magnitudes(), lambda job, row: job.measured(row.item()))

    # What the computations are made of.

    def _descended(
        self,
        jobs: Sequence[StackJob[Train | Distill]],
        data: Sequence[tuple[Tensor, Tensor]],
        prior: Tensor | None = None,
        teachers: Sequence[Teacher] = (),
    ) -> Trainings:
        """Train on inputs and labels in a plan for jobs of this kind."""
        first, training = jobs[0], jobs[0].task.training
        ladder = self._fusing.ladder(jobs)
        hyper, threat = replace(training, learning_rate=0.0), _constant(first.threat)
        # A plan knows which parameters have factors, not their values, so that it serves the next round as well.
        scaled = scalable(first.workspace.channels, ladder) if first.kept_channels else ()
        # Each exit has a head of its own.
        anchored = tuple(dict.fromkeys(name for job in jobs for name in job.anchored if name in ladder.spans))
        flags = first.two_statistics, first.is_calibrated
        kind = ladder, self._backend, first.samples, hyper, threat, scaled, *flags, anchored, bool(teachers)
        plan = self._plan(kind, lambda: TrainingPlan(*kind))
        factors = [job.factors for job in jobs]
        plan.load(self._parameters(jobs), data, training, first.threat, factors, prior, teachers)
        plan.run(self._schedule(jobs), [job.seed for job in jobs])
        return plan.results()

    def _schedule(self, jobs: Sequence[StackJob[Train | Distill]]) -> Iterator[Tensor]:
        """Yield the positions of every local iteration, those of all clients together, from the device's memory."""
        hyper, samples = jobs[0].task.training, jobs[0].samples
        drawn = [list(batches(samples, hyper.batch, hyper.iterations, job.task)) for job in jobs]
        sizes = [len(batch) for batch in drawn[0]]
        everything = sent(torch.stack([torch.cat(positions) for positions in drawn]), self._backend.device)
        yield from torch.split(everything, sizes, dim=1)

    def _evaluation(
        self,
        jobs: Jobs,
        parameters: Sequence[Mapping[str, Tensor]],
        inputs: Sequence[Tensor],
        labels: Sequence[Tensor],
        threat: ThreatModel | None,
        prior: Tensor | None = None,
    ) -> StackEvaluation:
        """Return the computation of a stack that does not train."""
        folded = self._folded(self._fusing.ladder(jobs), parameters)
        folded.prior = prior
        together = torch.stack(tuple(inputs)).float(), torch.stack(tuple(labels))
        return StackEvaluation(folded, *together, threat, [job.seed for job in jobs])

    def _prior(self, jobs: Sequence[StackJob[Train]] | Sequence[StackJob[Evaluate]]) -> Tensor | None:
        """Return what each client adds to its class scores, K×classes; None where nothing is calibrated."""
        rows = [job.prior for job in jobs if job.prior is not None]
        return sent(torch.stack(rows), self._backend.device) if rows else None

    def _folded(self, ladder: Ladder, parameters: Sequence[Mapping[str, Tensor]]) -> FoldedStack:
        """Return networks in evaluation mode."""
        folded = FoldedStack(ladder, self._backend.kernels, self._backend.compute)
        folded.fold(folded.layout.stacked(parameters, self._backend.device))
        return folded

    def _parameters(self, jobs: Jobs) -> Sequence[Mapping[str, Tensor]]:
        """Return every tensor that the clients' programs need, in the shape that it has in the stack."""
        tensors = [job.tensors for job in jobs]
        if not jobs[0].kept_channels:
            return tensors
        workspace, used = jobs[0].workspace, self._fusing.ladder(jobs).spans
        full = {name: value for name, value in workspace.chain.tensors.items() if name in used}
        shapes = shapes_in(workspace.channels, self._fusing.room(workspace, jobs[0].width), full)
        return fitted(tensors, [job.factors for job in jobs], shapes, self._backend.device)

    def _read(self, jobs: Jobs) -> list[Tensor]:
        """Return what atom `first` reads for every training sample: images, or features of the frozen modules."""
        if jobs[0].task.frozen:
            return self._inputs.features(jobs, self._features)
        return list(map(self._inputs.images, jobs))

    def _features(self, jobs: Jobs) -> list[Tensor]:
        """Run the clients' frozen modules over their training samples, in evaluation mode."""
        program = self._fusing.program(jobs[0].prefix)
        folded = self._folded(Ladder((program,) * len(jobs)), self._parameters(jobs))
        images = torch.stack(list(map(self._inputs.images, jobs)))
        parts = torch.split(images, jobs[0].task.batch, dim=1)
        # The kernels pad channels; cached features are not padded.
        made = torch.cat([folded.features(folded.prepare(part))[..., : program.feature[0]] for part in parts], dim=1)
        return [features.clone() for features in made]


_COMPUTE: Mapping[str, Callable[[StackedEngine, Sequence[Any]], Iterator[Answer]]] = {
    Train.kind: StackedEngine._train,
    Evaluate.kind: StackedEngine._evaluate,
    Measure.kind: StackedEngine._measure,
    Predict.kind: StackedEngine._predict,
    Distill.kind: StackedEngine._distil,
}


def _constant(threat: ThreatModel | None) -> ThreatModel | None:
    """Return what of a threat a plan depends on: radius and step may change while it is kept."""
    return threat if threat is None or threat.harmless else replace(threat, radius=1.0, step=1.0)
