"""What the tests of engines share: tasks of every kind, and the stacked engine on the CPU beside the plain one."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedprophet.engines.stacked import Limits, StackedEngine
from fedprophet.fast.kernels import Kernels
from fedprophet.fast.rounds import Backend, TrainingPlan, uncaptured
from fedprophet.messages.answers import Answer, Reported
from fedprophet.messages.tasks import Task
from fedprophet.messages.values import Resources
from fedprophet.runs.session import Session, assemble
from fedprophet.server.coordinator import Engine

PLENTY = 10**9
ROOMY = Limits(PLENTY, PLENTY)


# Sessions and what was played.


@pytest.fixture(scope="session")
def settings(tiny):
    """Return a configuration whose session has the plain engine, wherever the tests run."""
    return lambda changes=None: tiny({"engine": "plain", "population.cohort": 3, **(changes or {})})


@pytest.fixture(scope="session")
def session_of(settings):
    return lambda changes=None: assemble(settings(changes))


@pytest.fixture(scope="session")
def play_cascade(settings, play_in_memory):
    """Return what plays a run of FedProphet to its second module, on the plain engine."""
    changes = {"rounds": 2, "train.warmup": 1, "convergence.patience": 1}
    return lambda: play_in_memory(settings(changes), rounds=5)


@pytest.fixture(scope="session")
def cascade(play_cascade):
    """A run of FedProphet that has come to its second module. What tasks leave on its clients, later tests meet."""
    played = play_cascade()
    assert played.states[-1].stage == 2
    return played


@pytest.fixture(scope="session")
def learn(settings, play_in_memory):
    """Return a function that gives a run of jFAT that knows something."""

    def played(changes):
        usual = {"method": "jfat", "train.iterations": 12, "train.batch": 32, "rounds": 4}
        played = play_in_memory(settings({**usual, "model.options": {"width": 6}, **changes}), rounds=3)
        assert played.records[-1]["clean"] > 0.3
        return played

    return played


@pytest.fixture(scope="session")
def learned(learn):
    """A run of jFAT that knows something."""
    return learn({})


@pytest.fixture(scope="session")
def learned_cnn3(learn):
    """The same for a model whose exit pools to maxima."""
    return learn({"model.name": "cnn3"})


# The stacked engine.


def stacked_engine(session: Session, limits: Limits = ROOMY, kernels: Kernels | None = None) -> StackedEngine:
    """Return the stacked engine on the CPU, on the workspaces of a session."""
    backend = Backend(torch.device("cpu"), kernels or Kernels(), torch.float32, uncaptured)
    return StackedEngine(session.engine, backend, limits)


@pytest.fixture(scope="session")
def stacked() -> Callable[..., StackedEngine]:
    return stacked_engine


@pytest.fixture
def plans(monkeypatch) -> list[TrainingPlan]:
    """Return a list that every plan is put into when it is made."""
    made: list[TrainingPlan] = []
    real = TrainingPlan.__post_init__
    monkeypatch.setattr(TrainingPlan, "__post_init__", lambda self: (made.append(self), real(self))[1])
    return made


# Devices.


@dataclass(frozen=True)
class Dealt:
    """An engine on whose devices client k has what the k-th model of the family takes."""

    engine: Engine
    memories: tuple[int, ...]

    def map(self, tasks: Iterable[Task]) -> Iterator[Answer]:
        for answer in self.engine.map(tasks):
            if isinstance(answer, Reported):
                memory = self.memories[answer.client % len(self.memories)]
                answer = replace(answer, resources=Resources(memory, 1e9, 1e9))
            yield answer


@pytest.fixture(scope="session")
def dealt() -> Callable[[Session, Engine], Dealt]:
    """Return a function that deals out the models of a session's family to the clients that an engine asks."""
    return lambda session, engine: Dealt(engine, tuple(m.cost.total_memory for m in session.world.family.values()))


# Tasks.


@pytest.fixture(scope="session")
def joint() -> Callable[..., list[Task]]:
    """Return a function that gives the training tasks of jFAT in a round."""

    def tasks(session: Session, round: int = 1, clients: Iterable[int] = (0, 1, 2, 3), **changes: Any) -> list[Task]:
        state = replace(session.method.initial(), round=round)
        return [replace(session.method.train_task(state, client), **changes) for client in clients]

    return tasks


@pytest.fixture(scope="session")
def partial_tasks() -> Callable[..., list[Task]]:
    """Return a function that gives training tasks of sub-networks of some fractions, cut out of the initial model."""

    def tasks(
        session: Session,
        widths: Sequence[float],
        round: int = 1,
        clients: Iterable[int] | None = None,
        **changes: Any,
    ) -> list[Task]:
        method = session.method
        state = replace(method.initial(), round=round)
        memory = session.world.cost.total_memory
        chosen = range(len(widths)) if clients is None else clients
        available = {c: Resources(int(r * memory) + 1, 1e9, 1e9) for c, r in zip(chosen, widths, strict=True)}
        return [replace(task, **changes) for task in method.assign(state, available, {})]

    return tasks


@pytest.fixture(scope="session")
def evaluations() -> Callable[..., list[Task]]:
    """Return a function that gives the tasks of an evaluation."""

    def tasks(session: Session, state: Any, clients: Iterable[int], threat: Any, **changes: Any) -> list[Task]:
        return [replace(session.method.evaluation_task(state, client, threat), **changes) for client in clients]

    return tasks


# Two engines side by side.


def pairs_of(one: Iterable[Answer], other: Iterable[Answer]) -> list[tuple[Answer, Answer]]:
    """Return the updates of two engines side by side; both must have answered the same tasks."""
    mine, theirs = ({(u.client, u.number): u for u in updates} for updates in (one, other))
    assert set(mine) == set(theirs)
    return [(mine[key], theirs[key]) for key in sorted(mine)]


@pytest.fixture(scope="session")
def paired() -> Callable[..., list[tuple[Answer, Answer]]]:
    return pairs_of


def nearly_equal(found: Tensor, expected: Tensor, tolerance: float = 1e-4, noise: float = 1e-6) -> bool:
    """Whether two tensors are equal to 1e-4 relative. A convolution's bias before a batch norm is nothing but noise."""
    return float((found.cpu() - expected.cpu()).norm()) <= tolerance * float(expected.norm()) + noise


@pytest.fixture(scope="session")
def close() -> Callable[..., bool]:
    return nearly_equal


def assert_same_tensors(one: Mapping[str, Tensor], other: Mapping[str, Tensor], tolerance: float, noise: float) -> None:
    assert set(one) == set(other)
    for name in other:
        assert one[name].shape == other[name].shape
        assert one[name].dtype == other[name].dtype
        assert one[name].is_contiguous()
        if name.endswith("num_batches_tracked"):
            assert one[name] == other[name]
        else:
            assert nearly_equal(one[name], other[name], tolerance, noise), name


@pytest.fixture(scope="session")
def assert_same_training() -> Callable[..., list[Answer]]:
    """Return a function that trains on both engines and compares what comes back and what clients keep."""

    def check(
        session: Session,
        tasks: Iterable[Task],
        engine: Engine | None = None,
        tolerance: float = 1e-4,
        noise: float = 1e-6,
    ) -> list[Answer]:
        tasks = [replace(task, wants_local=True) for task in tasks]

        def trained(engine: Engine) -> tuple[list[Answer], list[Any]]:
            updates = list(engine.map(tasks))
            return updates, [session.layers.get(t.architecture, t.client, t.timeline, t.round + 1) for t in tasks]

        expected, plain_layers = trained(session.engine)
        found, layers = trained(engine or stacked_engine(session))
        for mine, theirs in pairs_of(found, expected):
            assert (mine.kind, mine.round, mine.weight) == (theirs.kind, theirs.round, theirs.weight)
            assert mine.samples == theirs.samples
            assert mine.loss == pytest.approx(theirs.loss, rel=1e-5)
            assert_same_tensors(mine.parameters, theirs.parameters, tolerance, noise)
            assert_same_tensors(mine.local, theirs.local, tolerance, noise)
        for own, their_own in zip(layers, plain_layers, strict=True):
            assert_same_tensors(own or {}, their_own or {}, tolerance, noise)
        return found

    return check


@pytest.fixture(scope="session")
def assert_same_evaluation() -> Callable[..., None]:
    """Return a function that evaluates on both engines; attacks may differ in a tenth of the samples."""

    def check(session: Session, tasks: Sequence[Task], engine: Engine | None = None) -> None:
        for mine, theirs in pairs_of((engine or stacked_engine(session)).map(tasks), session.engine.map(tasks)):
            assert (mine.weight, mine.kind, mine.round) == (theirs.weight, theirs.kind, theirs.round)
            assert (mine.samples, mine.clean, mine.broken) == (theirs.samples, theirs.clean, theirs.broken)
            assert abs(mine.adversarial - theirs.adversarial) <= 0.1 * theirs.samples

    return check
