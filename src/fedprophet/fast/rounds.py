"""Local training, evaluation and measuring of a group of clients at once: tasks that differ in nothing but the client.

A plan holds the memory of one kind of group and is used round after round. On a GPU what it does is captured as a
graph, so that a local iteration is one launch; elsewhere it is called as it is.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedprophet.client.task import LocalTraining
from fedprophet.fast.attack import Gradient, attack
from fedprophet.fast.draws import Draws
from fedprophet.fast.kernels import Kernels
from fedprophet.fast.program import Program
from fedprophet.fast.stack import Folded, Layout, Tensors
from fedprophet.fast.training import Training
from fedprophet.randomness import key
from fedprophet.threat import ThreatModel

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Turns a piece of work on fixed memory into one that is cheap to repeat."""


@dataclass(frozen=True)
class Backend:
    """A device, what it computes with, and how it repeats itself."""

    device: torch.device
    kernels: Kernels
    compute: torch.dtype
    capture: Capture


def uncaptured(work: Callable[[], None]) -> Callable[[], None]:
    """Return work that is simply done again each time."""
    return work


class _Threat:
    """A threat whose radius and step may change between uses of a captured graph."""

    def __init__(self, threat: ThreatModel, device: torch.device) -> None:
        self.model = threat
        self.radius = torch.empty((), device=device)
        self.step = torch.empty((), device=device)

    def set(self, threat: ThreatModel) -> None:
        self.radius.fill_(threat.radius)
        self.step.fill_(threat.step)

    def on(self, gradient: Gradient, x: Tensor, draws: Draws) -> Tensor:
        """Return inputs perturbed so that what the gradient is of is high."""
        return attack(gradient, x, self.model, self.radius, self.step, draws)


def one_hot(labels: Tensor, classes: int) -> Tensor:
    """Return labels as float32 targets; torch's own would look at the labels from the host."""
    return (labels.unsqueeze(-1) == torch.arange(classes, device=labels.device)).float()


@dataclass(frozen=True)
class _Iteration:
    """A captured local iteration: the memory that says which samples, its draws, and what does it."""

    positions: Tensor
    draws: Draws
    run: Callable[[], None]


@dataclass
class TrainingPlan:
    """The memory of a group in training, and a captured iteration for each batch size that occurs."""

    program: Program
    backend: Backend
    clients: int
    samples: int
    hyper: LocalTraining
    threat: ThreatModel | None
    _iterations: dict[int, "_Iteration"] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        device = self.backend.device
        channels, height, width = self.program.shape
        self.inputs = torch.empty((self.clients, self.samples, height, width, channels), device=device)
        self.labels = torch.empty((self.clients, self.samples), dtype=torch.long, device=device)
        self.layout = Layout(self.program, self.backend.kernels.multiple)
        self.classes = self.program.dense[-1].outputs
        self._attack = None if self.threat is None or self.threat.harmless else _Threat(self.threat, device)
        self.training: Training | None = None
        self.folded: Folded | None = None

    def load(
        self,
        parameters: Sequence[Tensors],
        data: Sequence[tuple[Tensor, Tensor]],
        hyper: LocalTraining,
        threat: ThreatModel | None,
    ) -> None:
        """Take over a group: its parameters, its inputs and labels, and what may change from round to round."""
        stacks = self.layout.stacked(parameters, self.backend.device)
        if self.training is None:
            kernels, compute = self.backend.kernels, self.backend.compute
            # Training writes in place, and stacks may be views of what tasks brought.
            owned = {name: value.clone(memory_format=torch.contiguous_format) for name, value in stacks.items()}
            self.training = Training(self.program, kernels, compute, owned, self.hyper)
            self.folded = Folded(self.program, kernels, compute)
            self.folded.fold(stacks)
        else:
            for name, value in stacks.items():
                self.training.stacks[name].copy_(value)
        self.training.reset(hyper.learning_rate)
        for number, (inputs, labels) in enumerate(data):
            self.inputs[number].copy_(inputs)
            self.labels[number].copy_(labels)
        if self._attack is not None and threat is not None:
            self._attack.set(threat)

    def run(self, batches: Iterator[Tensor], seeds: Sequence[int]) -> None:
        """Do one local iteration for each batch: K×N positions of the samples of every client, one seed for each."""
        for number, positions in enumerate(batches):
            size = positions.shape[1]
            if size not in self._iterations:
                self._iterations[size] = self._captured(positions)
            iteration = self._iterations[size]
            iteration.positions.copy_(positions)
            iteration.draws.renew([key(seed, "iteration", number) for seed in seeds])
            iteration.run()

    def _captured(self, positions: Tensor) -> _Iteration:
        """Capture an iteration for batches of this size. That runs it, so what it changes is put back."""
        assert self.training is not None
        chosen, draws = positions.clone(), Draws(self.backend.device)
        before = self.training.snapshot()
        work = self.backend.capture(self._work(chosen, draws))
        self.training.restore(before)
        return _Iteration(chosen, draws, work)

    def _work(self, chosen: Tensor, draws: Draws) -> Callable[[], None]:
        rows = torch.arange(self.clients, device=self.backend.device).unsqueeze(1)
        training, folded = self.training, self.folded
        assert training is not None
        assert folded is not None

        def iteration() -> None:
            x, targets = self.inputs[rows, chosen], one_hot(self.labels[rows, chosen], self.classes)
            if self._attack is not None:
                folded.fold(training.stacks)
                x = self._attack.on(lambda z: folded.loss_gradient(z, targets, self.hyper.strong_convexity), x, draws)
            training.step(x, targets, draws)

        return iteration

    def results(self) -> tuple[dict[str, Tensor], list[float], list[bool]]:
        """Return all clients' tensors, one behind the other, their mean losses, and whose tensors are all finite."""
        assert self.training is not None
        stacks = self.training.stacks
        finite = torch.stack([torch.isfinite(stack).flatten(1).all(dim=1) for stack in stacks.values()]).all(dim=0)
        losses, sound = torch.stack([self.training.losses / self.hyper.iterations, finite.float()]).tolist()
        return self.layout.clients(stacks), losses, [bool(value) for value in sound]

    @property
    def nbytes(self) -> int:
        """How much memory it holds on to, besides what a captured graph computes in."""
        held = [self.inputs, self.labels]
        if self.training is not None:
            held += [*self.training.stacks.values(), *self.training.velocity.values()]
        drawn = sum(iteration.draws.nbytes for iteration in self._iterations.values())
        return sum(tensor.nbytes for tensor in held) + drawn + (self.folded.nbytes if self.folded else 0)


@dataclass
class EvaluationPlan:
    """The memory of a group that is evaluated or measured on `samples` inputs of every client."""

    program: Program
    backend: Backend
    clients: int
    samples: int
    threat: ThreatModel | None
    measures: bool = False
    """Whether the attack maximises how far the feature moves, not the loss."""

    def __post_init__(self) -> None:
        device = self.backend.device
        channels, height, width = self.program.shape
        self.inputs = torch.empty((self.clients, self.samples, height, width, channels), device=device)
        self.labels = torch.zeros((self.clients, self.samples), dtype=torch.long, device=device)
        self.folded = Folded(self.program, self.backend.kernels, self.backend.compute)
        self._attack = None if self.threat is None or self.threat.harmless else _Threat(self.threat, device)
        self._draws = Draws(device)
        self._found: dict[str, Tensor] = {}
        self._captured: Callable[[], None] | None = None

    def run(
        self,
        parameters: Sequence[Tensors],
        data: Sequence[tuple[Tensor, Tensor]],
        threat: ThreatModel | None,
        seeds: Sequence[int],
    ) -> dict[str, list[float]]:
        """Return counts of right answers, clean and attacked, or the mean shift of the feature, for every client."""
        layout = self.folded.layout
        self.folded.fold(layout.stacked(parameters, self.backend.device))
        for number, (inputs, labels) in enumerate(data):
            self.inputs[number].copy_(inputs)
            self.labels[number].copy_(labels)
        if self._attack is not None and threat is not None:
            self._attack.set(threat)
        if self._captured is None:
            self._captured = self.backend.capture(self._measure if self.measures else self._evaluate)
        self._draws.renew(seeds)
        self._captured()
        return {name: value.tolist() for name, value in self._found.items()}

    @property
    def nbytes(self) -> int:
        """How much memory it holds on to, besides what a captured graph computes in."""
        return self.inputs.nbytes + self.labels.nbytes + self._draws.nbytes + self.folded.nbytes

    def _note(self, name: str, value: Tensor) -> None:
        """Keep a result in memory that stays where it is."""
        self._found.setdefault(name, torch.empty_like(value)).copy_(value)

    def _evaluate(self) -> None:
        folded = self.folded
        self._note("clean", self._right(self.inputs))
        if self._attack is None:
            if self.threat is not None:
                self._note("adversarial", self._right(self.inputs))
            return
        targets = one_hot(self.labels, self.program.dense[-1].outputs)
        # The attack on a whole cascade raises the cross-entropy alone.
        attacked = self._attack.on(lambda z: folded.loss_gradient(z, targets, 0.0), self.inputs, self._draws)
        self._note("adversarial", self._right(attacked))

    def _measure(self) -> None:
        if self._attack is None:
            self._note("magnitude", torch.zeros(self.clients, device=self.backend.device))
            return
        folded = self.folded
        clean = folded.features(self.inputs)
        attacked = self._attack.on(lambda z: folded.shift_gradient(z, clean), self.inputs, self._draws)
        moved = (folded.features(attacked).float() - clean.float()).flatten(2).norm(dim=2)
        self._note("magnitude", moved.mean(dim=1))

    def _right(self, x: Tensor) -> Tensor:
        return (self.folded.scores(x).argmax(dim=2) == self.labels).sum(dim=1).float()
