"""AutoAttack on many clients at once: rows of all of them form one batch, each with its client's norm layers.

A batch of a client's samples meets the draws that it meets on the plain path, so that both give the same verdicts,
apart from rounding. Everything is in float32.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeGuard, TypeVar

import torch
from torch import Tensor

from fedprophet.attacks.autoattack import SUITES, RowOutcome, Samples, attack_rows
from fedprophet.cascade.norms import norm_names
from fedprophet.client.job import Client, Job
from fedprophet.client.measure import attacked_batches
from fedprophet.client.part import ModelPart
from fedprophet.client.run import evaluated_part
from fedprophet.client.workspace import Workspace
from fedprophet.engines.fusing import check_known
from fedprophet.engines.plain import LESS_MEMORY, PlainEngine
from fedprophet.engines.row_model import RowModel, check_rows
from fedprophet.errors import memory_for
from fedprophet.fast.reading import NotFusableError
from fedprophet.messages.answers import Answer
from fedprophet.messages.tasks import Evaluate, Task

ROWS = 2048
"""The most rows at once: enough for a large GPU, few enough that a stop loses a minute or two."""
IMAGES = 64
"""How many copies of its image a row may need besides its activations, which FAB does."""
T = TypeVar("T")


@dataclass(frozen=True)
class _Batch:
    """Samples of one client that share their draws; `job` is its number among the jobs."""

    job: int
    seed: int
    positions: Tensor


class RowAttacks:
    """Carries out evaluations under AutoAttack; the activations of one batch take at most `limit` bytes."""

    def __init__(self, workspaces: Mapping[str, Workspace], limit: int) -> None:
        self._workspaces = workspaces
        self._limit = limit
        self._row_bytes: dict[str, int | str] = {}
        """By architecture what a row takes, or why rows cannot be run together."""

    def job(self, task: Task, client: Client) -> Job[Evaluate] | None:
        """Return the job of a task that is for this class; None for any other.

        Raises NotFusableError where its rows cannot be run among others.
        """
        if not is_for_rows(task):
            return None
        check_known(task, tuple(SUITES))
        if task.kept_channels or task.adversarial_statistics:
            raise NotFusableError(f"{task.attack} on sub-networks, or with two sets of norm statistics")
        self._most_rows(task.architecture)
        return Job(task, client, self._workspaces[task.architecture])

    def map(self, tasks: Iterable[Task], plain: PlainEngine) -> Iterator[Answer]:
        """Carry out tasks of this kind; those that cannot be run among others one by one, on the plain engine."""
        groups: dict[Hashable, list[Job[Evaluate]]] = {}
        for task in tasks:
            try:
                job = self.job(task, plain.client(task.client))
            except NotFusableError:
                job = None
            if job is None:
                yield from plain.map([task])
            else:
                groups.setdefault(self.group_key(job), []).append(job)
        for group in groups.values():
            yield from self.run(group)

    def group_key(self, job: Job[Evaluate]) -> Hashable:
        """Return what the jobs of one group have in common: all but their norm layers and label frequencies."""
        task, own = job.task, set(norm_names(job.workspace.chain))
        sent = tuple((name, id(tensor)) for name, tensor in task.parameters.items() if name not in own)
        frozen = tuple(module.digest for module in task.frozen)
        return task.architecture, task.last, task.head, frozen, sent, task.attack, task.threat

    def run(self, group: Sequence[Job[Evaluate]]) -> Iterator[Answer]:
        """Carry out the jobs of a group, as many at a time as there is room for."""
        yield from (job.evaluated(0, 0, {}) for job in group if not len(job.held_out))
        jobs = [job for job in group if len(job.held_out)]
        most = self._most_rows(group[0].task.architecture)
        for some in packed(jobs, lambda job: len(job.held_out), most):
            with memory_for(f"{len(some)} clients were attacked together", LESS_MEMORY):
                tallies = self._attack(some, most)
            for job, tally in zip(some, tallies, strict=True):
                yield job.evaluated(tally.clean, tally.correct, tally.broken)

    def _attack(self, jobs: Sequence[Job[Evaluate]], most: int) -> list["_Tally"]:
        task, workspace = jobs[0].task, jobs[0].workspace
        assert task.threat is not None
        # As the model is written: a plan may have folded the norm layers.
        part = replace(evaluated_part(jobs[0]), chain=workspace.chain)
        priors = [torch.zeros(workspace.classes) if job.prior is None else job.prior for job in jobs]
        model = RowModel(part, [job.tensors for job in jobs], torch.stack(priors))
        batches = [
            _Batch(number, seed, positions)
            for number, job in enumerate(jobs)
            for seed, positions in attacked_batches(job.task, job.held_out)
        ]
        tallies = [_Tally() for _ in jobs]
        for some in packed(batches, lambda batch: len(batch.positions), most):
            samples, owners = _samples(jobs, some, part)

            def logits(x: Tensor, rows: Tensor, owners: Tensor = owners) -> Tensor:
                return model.logits(x, owners[rows])

            with model.still():
                outcome = attack_rows(SUITES[task.attack], logits, samples, task.threat)
            for number in {batch.job for batch in some}:
                tallies[number].add(outcome, owners == number)
        return tallies

    def _most_rows(self, architecture: str) -> int:
        """Return how many rows are attacked at once; NotFusableError where they cannot be."""
        if architecture not in self._row_bytes:
            try:
                self._row_bytes[architecture] = _bytes_of_a_row(self._workspaces[architecture])
            except NotFusableError as reason:
                self._row_bytes[architecture] = str(reason)
        found = self._row_bytes[architecture]
        if isinstance(found, str):
            raise NotFusableError(found)
        return max(1, min(ROWS, self._limit // found))


def is_for_rows(task: Task) -> TypeGuard[Evaluate]:
    """Whether a task is an evaluation under one of the suites."""
    return isinstance(task, Evaluate) and task.attack in SUITES and task.threat is not None


@dataclass
class _Tally:
    """How many samples of a job are right, how many under attack, and how many each component newly broke."""

    clean: int = 0
    correct: int = 0
    broken: Counter[str] = field(default_factory=Counter)

    def add(self, outcome: RowOutcome, own: Tensor) -> None:
        """Count some rows of an outcome."""
        self.clean += int(outcome.clean[own].sum())
        self.correct += int(outcome.correct[own].sum())
        self.broken.update({name: int(rows[own].sum()) for name, rows in outcome.broken.items()})


def _samples(jobs: Sequence[Job[Evaluate]], batches: Sequence[_Batch], part: ModelPart) -> tuple[Samples, Tensor]:
    """Return the samples of some batches, and the number of the job that each row is of."""
    held_out = [(jobs[batch.job].client.data.validation, batch.positions) for batch in batches]
    images = torch.cat([examples.fetch(positions) for examples, positions in held_out])
    labels = torch.cat([examples.labels[positions] for examples, positions in held_out])
    sizes = torch.tensor([len(batch.positions) for batch in batches])
    groups = torch.arange(len(batches)).repeat_interleave(sizes)
    owners = torch.tensor([batch.job for batch in batches]).repeat_interleave(sizes)
    images, labels, groups, owners = (part.take(tensor) for tensor in (images, labels, groups, owners))
    return Samples(images, labels, groups, [batch.seed for batch in batches]), owners


def _bytes_of_a_row(workspace: Workspace) -> int:
    """Return how much memory a row of the whole model takes under attack."""
    check_rows(workspace.chain)
    chain = workspace.chain
    model = RowModel(ModelPart(chain, 0, len(chain), None), [chain.tensors], None)
    image = torch.zeros(workspace.input_shape, device=workspace.device)
    # What is kept for the gradient, as much again while it is made, and what the attacks keep.
    return 2 * model.row_bytes(image) + IMAGES * image.nbytes


def packed(items: Iterable[T], size: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Yield items in order, together as long as their sizes sum up to at most `most`; a larger one comes alone."""
    some: list[T] = []
    for item in items:
        if some and sum(map(size, some)) + size(item) > most:
            yield some
            some = []
        some.append(item)
    if some:
        yield some
