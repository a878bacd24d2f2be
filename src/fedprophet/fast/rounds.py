"""Local training, evaluation and measuring of a group of clients at once, whose tasks differ in little else.

A plan holds the memory of one kind of group in training and is used round after round. On a GPU the pieces of its
iterations are captured as graphs, so that each is one launch; elsewhere they are called as they are. Evaluation keeps
nothing: its pieces are so large that launching them takes no noticeable time.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedprophet.client.statistics import ADVERSARIAL, under_attack
from fedprophet.fast.aims import Teacher, one_hot
from fedprophet.fast.attack import StackAttack
from fedprophet.fast.draws import Draws
from fedprophet.fast.folded import FoldedStack
from fedprophet.fast.kernels import Kernels
from fedprophet.fast.layout import StackLayout, Tensors
from fedprophet.fast.narrow import Factors, Squares
from fedprophet.fast.program import Ladder
from fedprophet.fast.training import TrainingStack
from fedprophet.messages.values import LocalTraining
from fedprophet.randomness import key
from fedprophet.threat import ThreatModel

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Turns a piece of work on fixed memory into one that is cheap to repeat. It does not run it."""


Trainings = tuple[list[dict[str, Tensor]], list[float], list[bool]]
"""Each client's tensors, mean loss, and whether all of its tensors are finite."""


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


def _attack(threat: ThreatModel | None, device: torch.device) -> StackAttack | None:
    return None if threat is None or threat.harmless else StackAttack(threat, device)


@dataclass
class TrainingPlan:
    """The memory of a group in training, and an iteration for each batch size that occurs.

    `scaled` names the parameters that a group of sub-networks brings multiplied by a factor for each client.
    `observes`: clients bring a second set of norm statistics, under the names of `client.statistics`. They train with
    that one, while the first follows the clean batches. `calibrated`: clients add numbers of their own to class scores.
    `anchored` names the parameters that a proximal term draws back to where they started. `taught`: samples come with a
    teacher, and perhaps without labels (`aims`).
    """

    ladder: Ladder
    backend: Backend
    samples: int
    hyper: LocalTraining
    threat: ThreatModel | None
    scaled: tuple[str, ...] = ()
    observes: bool = False
    calibrated: bool = False
    anchored: tuple[str, ...] = ()
    taught: bool = False
    _iterations: dict[int, "_Iteration"] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        device, clients = self.backend.device, self.ladder.clients
        channels, height, width = self.ladder.longest.shape
        self.inputs = torch.empty((clients, self.samples, height, width, channels), device=device)
        self.labels = torch.empty((clients, self.samples), dtype=torch.long, device=device)
        self.layout = StackLayout(self.ladder, self.backend.kernels.multiple)
        self.classes = self.ladder.longest.dense[-1].outputs
        self.attack = _attack(self.threat, device)
        self.rows = torch.arange(clients, device=device).unsqueeze(1)
        self.folded = FoldedStack(self.ladder, self.backend.kernels, self.backend.compute)
        self.prior = torch.zeros((clients, self.classes), device=device) if self.calibrated else None
        drawn = self.taught or self.hyper.consistency
        self.teacher = Teacher.empty((clients, self.samples), self.classes, device) if drawn else None
        """What samples come with, or what the networks that a group brings predict for its clean inputs, where training
        draws back to that."""
        self.training: TrainingStack | None = None

    def load(
        self,
        parameters: Sequence[Tensors],
        data: Sequence[tuple[Tensor, Tensor]],
        hyper: LocalTraining,
        threat: ThreatModel | None,
        factors: Sequence[Factors] = (),
        prior: Tensor | None = None,
        teachers: Sequence[Teacher] = (),
    ) -> None:
        """Take over a group: its parameters, its inputs and labels, and what may change from round to round.

        `factors` are those of each client's scaled parameters, `prior` what clients add to class scores, and `teachers`
        what their samples come with, where there are any.
        """
        used = [under_attack(own) for own in parameters] if self.observes else parameters
        stacks = self.layout.stacked(used, self.backend.device)
        if self.training is None:
            self.training = self._begun(stacks)
        else:
            for name, value in stacks.items():
                self.training.stacks[name].copy_(value)
        if self.observes:
            clean = self.layout.stacked(parameters, self.backend.device)
            for name, values in self.training.observed.items():
                values.copy_(clean[name])
        for name, anchor in self.training.anchors.items():
            anchor.copy_(self.training.stacks[name])
        if self.prior is not None and prior is not None:
            self.prior.copy_(prior)
        self.training.reset(hyper.learning_rate)
        if self.training.squares is not None:
            self.training.squares.set(factors)
        for number, (inputs, labels) in enumerate(data):
            self.inputs[number].copy_(inputs)
            self.labels[number].copy_(labels)
        if self.attack is not None and threat is not None:
            self.attack.set(threat)
        if self.teacher is not None and not self.taught:
            self._predict(self.teacher)
        for number, teacher in enumerate(teachers):
            assert self.teacher is not None
            self.teacher[number].take(teacher)

    def _predict(self, teacher: Teacher) -> None:
        """Note the probabilities that `client.boundary` draws to, as many samples at a time as a step sees.

        They are those of evaluation mode, for clean inputs: of two sets of norm statistics by the one for these.
        """
        assert self.training is not None
        self.folded.fold({**self.training.stacks, **self.training.observed})
        teacher.weights.fill_(self.hyper.consistency)
        pieces = (torch.split(tensor, self.hyper.batch, dim=1) for tensor in (self.inputs, teacher.probabilities))
        for inputs, found in zip(*pieces, strict=True):
            found.copy_(self.folded.scores(self.folded.prepare(inputs)).softmax(dim=2))

    def _begun(self, stacks: Tensors) -> TrainingStack:
        """Return networks in training that begin with these parameters, and all memory that later rounds use."""
        # Training writes in place, and stacks may be views of what tasks brought.
        owned = {name: value.clone(memory_format=torch.contiguous_format) for name, value in stacks.items()}
        training = TrainingStack(self.ladder, self.backend.kernels, self.backend.compute, owned, self.hyper)
        training.squares = Squares(self.scaled, self.ladder, self.backend.device) if self.scaled else None
        names = self.layout.statistics() if self.observes else []
        training.observed = {name: torch.empty_like(owned[name]) for name in names}
        training.anchors = {name: torch.empty_like(owned[name]) for name in self.anchored}
        training.prior = self.folded.prior = self.prior
        return training

    def run(self, batches: Iterator[Tensor], seeds: Sequence[int]) -> None:
        """Do one local iteration for each batch: K×N positions of the samples of every client, one seed for each."""
        for number, positions in enumerate(batches):
            size = positions.shape[1]
            if size not in self._iterations:
                self._iterations[size] = _Iteration(self, size)
            self._iterations[size].run(positions, [key(seed, "iteration", number) for seed in seeds])

    def results(self) -> Trainings:
        """Return each client's tensors, mean loss, and whether all of its tensors are finite."""
        assert self.training is not None
        stacks, observed = self.training.stacks, self.training.observed
        named = [(ADVERSARIAL if name in observed else "", name, stack) for name, stack in stacks.items()]
        named += [("", name, stack) for name, stack in observed.items()]
        finite = torch.ones(self.ladder.clients, dtype=torch.bool, device=self.backend.device)
        tensors: list[dict[str, Tensor]] = [{} for _ in range(self.ladder.clients)]
        for prefix, name, stack in named:
            span = slice(*self.ladder.spans[name])
            finite[span] &= torch.isfinite(stack).flatten(1).all(dim=1)
            for own, value in zip(tensors[span], self.layout.unstacked(name, stack).unbind(), strict=True):
                own[prefix + name] = value
        losses, sound = torch.stack([self.training.losses / self.hyper.iterations, finite.float()]).tolist()
        return tensors, losses, [bool(value) for value in sound]

    def release(self) -> None:
        """Let go of the iterations. They know their plan, so nothing would be freed before Python looks for cycles."""
        for iteration in self._iterations.values():
            iteration.pieces.clear()
        self._iterations.clear()

    @property
    def nbytes(self) -> int:
        """How much memory it holds on to, besides what a captured graph computes in."""
        held: list[Tensor | Teacher] = [self.inputs, self.labels]
        if self.teacher is not None:
            held.append(self.teacher)
        if self.training is not None:
            held += [tensor for part in self.training.held for tensor in part.values()]
        iterations = sum(iteration.nbytes for iteration in self._iterations.values())
        return sum(each.nbytes for each in held) + iterations + self.folded.nbytes


class _Iteration:
    """A local iteration on batches of one size, in memory of its own: the batch, what an attack makes of it, the draws.

    Its three pieces are captured one by one. A step of the attack, which is most of the work, is so captured once and
    repeated: a new plan is soon as fast as one that has been used before.
    """

    def __init__(self, plan: TrainingPlan, size: int) -> None:
        device, (clients, _, *shape) = plan.backend.device, plan.inputs.shape
        self._plan = plan
        self._positions = torch.empty((clients, size), dtype=torch.long, device=device)
        self._clean = torch.empty((clients, size, *shape), device=device)
        self._perturbed = torch.empty_like(self._clean)
        self._prepared = plan.folded.prepare(self._clean)
        self._targets = torch.empty((clients, size, plan.classes), device=device)
        drawn = plan.teacher is not None
        self._teacher = Teacher.empty((clients, size), plan.classes, device) if drawn else None
        self._draws = Draws(device)
        self.pieces = [plan.backend.capture(piece) for piece in (self._begin, self._climb, self._step)]

    def run(self, positions: Tensor, seeds: Sequence[int]) -> None:
        """Take these samples of every client, with one seed for each."""
        self._positions.copy_(positions)
        self._draws.renew(seeds)
        begin, climb, step = self.pieces
        begin()
        for _ in range(self._plan.attack.steps if self._plan.attack else 0):
            climb()
        step()

    def _begin(self) -> None:
        plan = self._plan
        assert plan.training is not None
        self._clean.copy_(plan.inputs[plan.rows, self._positions])
        self._targets.copy_(one_hot(plan.labels[plan.rows, self._positions], plan.classes))
        if self._teacher is not None and plan.teacher is not None:
            self._teacher.take(plan.teacher[plan.rows, self._positions])
        if plan.observes:
            plan.training.observe(plan.folded.prepare(self._clean))
        x = self._clean
        if plan.attack is not None:
            plan.folded.fold(plan.training.stacks)
            x = self._perturbed.copy_(plan.attack.start(self._clean, self._draws))
        self._prepared.copy_(plan.folded.prepare(x))

    def _climb(self) -> None:
        plan = self._plan
        assert plan.attack is not None

        def gradient(z: Tensor) -> Tensor:
            return plan.folded.loss_gradient(z, self._targets, plan.hyper.strong_convexity)

        plan.attack.climb(gradient, self._clean, self._perturbed, self._prepared, plan.folded)

    def _step(self) -> None:
        assert self._plan.training is not None
        self._plan.training.step(self._prepared, self._targets, self._draws, self._teacher)

    @property
    def nbytes(self) -> int:
        """How much memory it holds on to."""
        held: list[Tensor | Teacher] = [self._clean, self._perturbed, self._prepared, self._targets]
        if self._teacher is not None:
            held.append(self._teacher)
        return sum(each.nbytes for each in held) + self._draws.nbytes


@dataclass(frozen=True)
class StackEvaluation:
    """Clients that are evaluated or measured: folded networks, inputs and labels, and the attack on them."""

    folded: FoldedStack
    inputs: Tensor
    labels: Tensor
    threat: ThreatModel | None
    seeds: Sequence[int]

    def clean(self) -> Tensor:
        """Return how many samples each client gets right."""
        return self._right(self.folded.prepare(self.inputs))

    def adversarial(self) -> Tensor:
        """Return how many samples each client gets right under attack."""
        targets = one_hot(self.labels, self.folded.ladder.longest.dense[-1].outputs)
        # The attack on a whole cascade raises the cross-entropy alone.
        attacked = self._attacked(lambda z: self.folded.loss_gradient(z, targets, 0.0))
        return self.clean() if attacked is None else self._right(attacked)

    def magnitudes(self) -> Tensor:
        """Return how far the attack moves the feature of each client, in the mean over its samples."""
        clean = self.folded.features(self.folded.prepare(self.inputs))
        attacked = self._attacked(lambda z: self.folded.shift_gradient(z, clean))
        if attacked is None:
            return torch.zeros(len(self.inputs), device=self.inputs.device)
        moved = (self.folded.features(attacked).float() - clean.float()).flatten(2).norm(dim=2)
        mean: Tensor = moved.mean(dim=1)
        return mean

    def _attacked(self, gradient: Callable[[Tensor], Tensor]) -> Tensor | None:
        attack = _attack(self.threat, self.inputs.device)
        if attack is None or self.threat is None:
            return None
        attack.set(self.threat)
        draws = Draws(self.inputs.device)
        draws.renew(self.seeds)
        return attack(gradient, self.inputs, self.folded, draws)

    def _right(self, z: Tensor) -> Tensor:
        return (self.folded.scores(z).argmax(dim=2) == self.labels).sum(dim=1).float()
