"""Which tasks the stacked engine can carry out, and which of them together.

It knows the classes of tasks and the fields that are listed here. A task that has anything else to say is left to the
plain path.
"""

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedprophet.cascade.narrow import narrow_chain
from fedprophet.client.job import Client
from fedprophet.client.workspace import Workspace
from fedprophet.engines.stack_job import AtomSpan, StackJob
from fedprophet.fast.narrow import WHOLE, room, run_at, width_of, work
from fedprophet.fast.program import Ladder, LayerProgram, continues
from fedprophet.fast.reading import NotFusableError, read_program
from fedprophet.fast.rounds import Backend
from fedprophet.messages.tasks import TASKS, Distill, Evaluate, Measure, ModelTask, Predict, Task, Train
from fedprophet.messages.values import FrozenModule, LocalTraining, Timeline
from fedprophet.threat import ThreatModel

BEGINNING = 10
"""How many clients of an evaluation come first, so that the device is busy while the others are prepared."""
FLOATS = 6
"""How many copies of the inputs lie in memory in float32: clean, perturbed, drawn, and in transfer."""

_TASK = {"round", "client", "seed", "number", "architecture", "timeline"}
_WHOLE = _TASK | {"last", "batch", "parameters", "starting"}
_MODEL = _WHOLE | {"first", "head", "frozen"}
_VARIANT = {"threat", "adversarial_statistics", "kept_channels", "calibration"}
KNOWN_FIELDS: Mapping[type, frozenset[str]] = {
    Train: frozenset(_MODEL | _VARIANT | {"training", "wants_local"}),
    Evaluate: frozenset(_MODEL | _VARIANT | {"attack", "samples", "part", "drawn"}),
    Measure: frozenset(_MODEL | {"threat", "drawn"}),
    Predict: frozenset(_WHOLE),
    Distill: frozenset(_WHOLE | {"training", "targets"}),
    LocalTraining: frozenset(
        {"iterations", "batch", "learning_rate", "momentum", "weight_decay", "strong_convexity", "summed_heads"}
        | {"fixed_statistics", "proximal", "consistency"}
    ),
    ThreatModel: frozenset({"norm", "radius", "step", "steps", "bounds"}),
    Timeline: frozenset({"discarded", "floor"}),
    FrozenModule: frozenset({"first", "last", "digest"}),
}
"""The tasks that stacks can carry out, and the fields that are understood, in them and in what they are made of."""
KNOWN_ATTACKS, KNOWN_NORMS = ("pgd",), ("linf", "l2")


def check_known(task: Task, attacks: Sequence[str] = KNOWN_ATTACKS) -> None:
    """Raise NotFusableError for a task that is, has or asks for anything that stacks do not know."""
    # A class without a kind of its own has its base's, so that the kind alone does not tell what a task is.
    listed = TASKS.get(task.kind, Task)
    if listed not in KNOWN_FIELDS or not isinstance(task, listed):
        raise NotFusableError(f"tasks of the kind {task.kind or type(task).__name__!r}")
    if isinstance(task, Train) and task.threat is None:  # then there is no attacked sample to be weighted
        task = replace(task, training=replace(task.training, boundary_weights=False))
    _check_fields(task, KNOWN_FIELDS[listed])
    threat = task.threat if isinstance(task, Train | Evaluate | Measure) else None
    if threat is not None and threat.norm not in KNOWN_NORMS:
        raise NotFusableError(f"norm {threat.norm!r}")
    if threat is not None and isinstance(task, Evaluate) and task.attack not in attacks:
        raise NotFusableError(f"attack {task.attack!r}")


def _check_fields(value: Any, known: frozenset[str]) -> None:
    for each in fields(value):
        found = getattr(value, each.name)
        default = each.default if each.default_factory is MISSING else each.default_factory()
        if each.name not in known and found != default:
            raise NotFusableError(f"{type(value).__name__}.{each.name}")
        for part in found if isinstance(found, tuple) else (found,):
            if is_dataclass(part) and type(part) not in KNOWN_FIELDS:
                raise NotFusableError(type(part).__name__)
            if is_dataclass(part):
                _check_fields(part, KNOWN_FIELDS[type(part)])


class Fusing:
    """Finds jobs that a backend can run as one stack; the activations of a stack take at most `limit` bytes."""

    def __init__(self, workspaces: Mapping[str, Workspace], backend: Backend, limit: int) -> None:
        self._workspaces = workspaces
        self._backend = backend
        self._limit = limit
        self._programs: dict[AtomSpan, LayerProgram | str] = {}

    def job(self, task: ModelTask, client: Client) -> StackJob[ModelTask] | None:
        """Return the task's job, at the least width that has room for its model; None where there are no samples.

        Raises NotFusableError where stacks cannot carry it out.
        """
        check_known(task)
        job = StackJob(task, client, self._workspaces[task.architecture])
        if not job.samples:
            return None
        if job.kept_channels and (task.first or task.frozen or task.head is not None):
            raise NotFusableError("sub-networks of a part of the model")
        if job.two_statistics and (job.kept_channels or task.frozen):
            raise NotFusableError("two sets of norm statistics in a sub-network or a cascade")
        if job.training is not None and min(job.training.batch_sizes(job.samples)) < 2:
            raise NotFusableError("a batch of a single sample")
        if isinstance(task, Distill):
            check_distilled(task, len(job.workspace.chain))
        if job.kept_channels:
            job = at_width(job, width_of(job.workspace.channels, job.kept_channels))
        self._check_programs(job)
        # A sub-network may be run among wider ones.
        if self._activations(at_width(job, WHOLE)) > self._limit:
            raise NotFusableError(f"{job.at_once} samples of one client at once, which need more memory than there is")
        return job

    def _check_programs(self, job: StackJob[ModelTask]) -> None:
        program, measures = self.program(job.span), isinstance(job.task, Measure)
        if bool(program.dense) == measures:
            raise NotFusableError("measuring class scores" if measures else "a model without a linear layer")
        if job.task.frozen and not isinstance(job.task, Evaluate) and self.program(job.prefix).dense:
            raise NotFusableError("a linear layer in front of a convolution")

    def group_key(self, job: StackJob[ModelTask]) -> Hashable:
        """Return what the jobs of one group have in common."""
        task = job.task
        # Clients may leave at different exits only where they train, and train the whole width.
        same_exit = job.kept_channels or not isinstance(task, Train)
        exit_ = (task.last, task.head) if same_exit else None
        frozen = tuple(module.digest for module in task.frozen)
        what = task.kind, task.architecture, task.first, frozen, exit_, bool(job.kept_channels), job.two_statistics
        return *what, job.is_calibrated, job.samples, job.training, job.threat

    def stacks(self, group: Sequence[StackJob[ModelTask]]) -> Iterator[Sequence[StackJob[ModelTask]]]:
        """Yield the jobs of a group in the stacks that they are run as."""
        for abreast in self._abreast(group):
            for ladder in self._ladders(abreast):
                yield from self._chunks(ladder)

    def ladder(self, jobs: Sequence[StackJob[ModelTask]]) -> Ladder:
        """Return the programs of jobs that are run together."""
        return Ladder(tuple(self.program(job.span) for job in jobs))

    def room(self, workspace: Workspace, width: int) -> dict[str, Tensor]:
        """Return the channels that a network of a width has."""
        return room(workspace.chain.model, workspace.channels, width, self._backend.kernels.tile)

    def program(self, span: AtomSpan) -> LayerProgram:
        """Read a span as a program. It is read once, also if it is refused."""
        if span not in self._programs:
            try:
                self._programs[span] = self._read(span)
            except NotFusableError as reason:
                self._programs[span] = str(reason)
        found = self._programs[span]
        if isinstance(found, str):
            raise NotFusableError(found)
        return found

    def _read(self, span: AtomSpan) -> LayerProgram:
        workspace = self._workspaces[span.architecture]
        shape, chain = feature_shape(workspace, span.first), workspace.chain
        if span.width < WHOLE:
            # Factors are in the stacks, so that layers are of their usual kinds.
            chain = narrow_chain(chain, workspace.channels, self.room(workspace, span.width), scaled=False)
        return read_program(chain, span.first, span.last, span.head, shape, workspace.classes)

    def _activations(self, job: StackJob[ModelTask]) -> int:
        """Return how many bytes of inputs and activations one client of a group needs."""
        program = self.program(job.span)
        elements = 0
        for block, (lines, columns) in zip(program.blocks, program.sizes, strict=False):
            elements += 2 * len(block.convolutions) * block.outputs * lines * columns // block.stride**2
        return job.at_once * (self._backend.compute.itemsize * elements + FLOATS * 4 * math.prod(program.shape))

    def _abreast(self, jobs: Sequence[StackJob[ModelTask]]) -> Iterable[Sequence[StackJob[ModelTask]]]:
        """Return jobs by the width that they are run at: sub-networks with wider ones where that costs less."""
        if not jobs[0].kept_channels:
            return [jobs]
        counts = Counter(job.width for job in jobs)
        wider = run_at(counts, lambda width: work(self.program(at_width(jobs[0], width).span)))
        found: dict[int, list[StackJob[ModelTask]]] = {}
        for job in jobs:
            found.setdefault(wider[job.width], []).append(at_width(job, wider[job.width]))
        return found.values()

    def _ladders(self, jobs: Sequence[StackJob[ModelTask]]) -> Iterator[Sequence[StackJob[ModelTask]]]:
        """Yield jobs whose programs begin alike together, those that go furthest first."""
        ladder: list[StackJob[ModelTask]] = []
        for job in sorted(jobs, key=lambda job: (-job.task.last, job.task.client, job.task.number)):
            if ladder and not continues(self.program(ladder[-1].span), self.program(job.span)):
                yield ladder
                ladder = []
            ladder.append(job)
        yield ladder

    def _chunks(self, jobs: Sequence[StackJob[ModelTask]]) -> Iterator[Sequence[StackJob[ModelTask]]]:
        """Cut a group so that the activations of each part fit; the first job goes furthest."""
        most = max(1, self._limit // self._activations(jobs[0]))
        if jobs[0].training is None and len(jobs) > 4 * BEGINNING and most >= BEGINNING:
            yield jobs[:BEGINNING]
            jobs = jobs[BEGINNING:]
        # Parts of one size need one plan.
        parts = math.ceil(len(jobs) / most)
        each = math.ceil(len(jobs) / parts)
        for start in range(0, len(jobs), each):
            yield jobs[start : start + each]


def check_distilled(task: Distill, atoms: int) -> None:
    """Raise NotFusableError where stacks would distil in another way than the plain path."""
    if task.last < atoms:
        raise NotFusableError("distilling a part of the model")
    if task.training.fixed_statistics or task.training.consistency:
        raise NotFusableError("distilling with what local training has alone")


def at_width(job: StackJob[ModelTask], width: int) -> StackJob[ModelTask]:
    """Return a job at a width; the same one where it has that already, with what it has cached."""
    return job if job.width == width else replace(job, width=width)


def feature_shape(workspace: Workspace, first: int) -> tuple[int, ...]:
    """Return the shape of one input of atom `first`."""
    probe = torch.zeros((1, *workspace.input_shape), device=workspace.device)
    with torch.no_grad(), workspace.chain.mode(0, first, training=False):
        return tuple(workspace.chain.run(probe, 0, first).shape[1:])
