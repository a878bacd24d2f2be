"""What the tests of whole runs share: a very small run, and ways to play and disturb it."""

import copy
import importlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import processes
import pytest
import torch
from hypothesis import HealthCheck, settings
from torch import Tensor

from fedprophet.config.config import Config
from fedprophet.config.load import parse_config
from fedprophet.messages.answers import Answer, Evaluated, Reported
from fedprophet.messages.tasks import Report, Task
from fedprophet.runs.session import Session, assemble
from fedprophet.server.coordinator import Engine, Record, play_round
from fedprophet.threads import torch_threads

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")  # how long an example takes depends on what else the machine has to do

PATIENCE = 600
"""Seconds after which something is stuck, on a machine with very much else to do."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Every test begins with one thread; floating-point sums differ between their numbers."""
    with torch_threads(1):
        yield


@pytest.fixture(scope="session")
def wait_until() -> Callable[[Callable[[], Any]], None]:
    """Return a function that waits for an event."""

    def wait(true: Callable[[], Any]) -> None:
        end = time.monotonic() + PATIENCE
        while not true():
            assert time.monotonic() < end, "never happened"
            time.sleep(0.01)

    return wait


TINY: Mapping[str, Any] = {
    "rounds": 3,
    "threads": 1,
    "model": {"options": {"width": 4}},
    "memory": {"budget": "45%"},  # three modules
    "population": {"clients": 6, "cohort": 2},
    "train": {"iterations": 2, "batch": 16, "learning_rate": 0.1, "warmup": 1},
    "attack": {"radius": 0.1, "steps": 2, "feature_steps": 2},
    "convergence": {"gate": 0, "patience": 2},
    "evaluate": {"steps": 2, "batch": 64},
    "measure": {"steps": 2},
}


def changed(table: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a nested table with `{"train.batch": 8}` put in."""
    result = copy.deepcopy(dict(table))
    for key, value in changes.items():
        *sections, name = key.split(".")
        inner = result
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = value
    return result


def flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


Tiny = Callable[..., Config]


@pytest.fixture(scope="session")
def tiny() -> Tiny:
    """Return the configuration of a run of a second, with `{"train.batch": 8}` put in."""
    return lambda changes=None: parse_config(changed(TINY, changes or {}))


@pytest.fixture(scope="session")
def tiny_flags() -> Callable[..., list[str]]:
    """Return the same as `--set` flags for the command line: every key, so that no preset shows through."""

    def flags(changes: Mapping[str, Any] | None = None) -> list[str]:
        pairs = flat(changed(parse_config(TINY).model_dump(), changes or {}))
        texts = [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in pairs]
        return [word for text in texts for word in ("--set", text)]

    return flags


class Recorder:
    """An engine that keeps what was asked and what came back."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.exchanges: list[tuple[list[Task], list[Answer]]] = []

    def map(self, tasks: Iterable[Task]) -> Iterator[Answer]:
        asked = list(tasks)
        answers = list(self.engine.map(asked))
        self.exchanges.append((asked, answers))
        yield from answers


@pytest.fixture(scope="session")
def recorder() -> type[Recorder]:
    """Return what wraps an engine to keep its exchanges."""
    return Recorder


@dataclass
class Played:
    """A run in memory: the state after each round (the first is before any), its records, and who was asked what."""

    session: Session
    states: list[Any]
    records: list[Record] = field(default_factory=list)
    exchanges: list[list[tuple[list[Task], list[Answer]]]] = field(default_factory=list)
    layers: list[dict[int, Mapping[str, Tensor]]] = field(default_factory=list)

    def of(self, round: int, kind: str) -> tuple[list[Task], list[Answer]]:
        """Return the tasks of a kind in a round (from 1), and their updates."""
        found = [pair for pair in self.exchanges[round - 1] if pair[0] and pair[0][0].kind == kind]
        assert len(found) <= 1
        return found[0] if found else ([], [])


def own_layers(session: Session, state: Any) -> dict[int, Mapping[str, Tensor]]:
    """Return the layers that each client has in a state."""
    timeline, clients = session.method.timeline(state), session.population.eligible.tolist()
    tasks = [Report(round=state.round, client=k, seed=0, timeline=timeline, wants_local=True) for k in clients]
    return {answer.client: answer.local for answer in session.engine.map(tasks) if isinstance(answer, Reported)}


@pytest.fixture(scope="session")
def play_in_memory() -> Callable[..., Played]:
    """Return a function that plays a configuration without a folder; `wrap` puts an engine around the session's."""

    def play(config: Config, wrap: Callable[[Engine], Engine] = lambda engine: engine, rounds: int = 999) -> Played:
        session = assemble(config)
        method, engine = session.method, wrap(session.engine)
        played = Played(session, [method.initial()])
        while not method.finished(played.states[-1]) and len(played.records) < rounds:
            recorder = Recorder(engine)
            state, record = play_round(method.round(played.states[-1]), recorder)
            played.states.append(state)
            played.records.append(record)
            played.exchanges.append(recorder.exchanges)
            played.layers.append(own_layers(session, state))
        return played

    return play


class Shuffled:
    """An engine that carries tasks out, and brings answers back, in an order of its own."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def map(self, tasks: Iterable[Task]) -> Iterator[Answer]:
        asked = list(tasks)
        order = torch.randperm(len(asked), generator=torch.Generator().manual_seed(len(asked))).tolist()
        answers = list(self.engine.map([asked[index] for index in order]))
        yield from reversed(answers)


@pytest.fixture(scope="session")
def shuffled() -> Callable[[Engine], Engine]:
    return Shuffled


class Scripted:
    """An engine whose clients' accuracies, clean and adversarial, are those of a table of rounds."""

    def __init__(self, engine: Engine, accuracies: Mapping[int, tuple[float, float]]) -> None:
        self.engine, self.accuracies = engine, accuracies

    def map(self, tasks: Iterable[Task]) -> Iterator[Answer]:
        for update in self.engine.map(tasks):
            if isinstance(update, Evaluated) and update.round in self.accuracies:
                clean, adversarial = (round(1000 * value) for value in self.accuracies[update.round])
                update = replace(update, samples=1000, clean=clean, adversarial=adversarial)
            yield update


@pytest.fixture(scope="session")
def scripted() -> Callable[..., Callable[[Engine], Engine]]:
    """Return `scripted({round: (clean, adversarial)})`, to be wrapped around an engine."""
    return lambda accuracies: lambda engine: Scripted(engine, accuracies)


Poison = Callable[[Any], Answer]


class Poisoned:
    """An engine whose clients send back what `poison` makes of their answers of one kind, in the rounds given."""

    def __init__(
        self, engine: Engine, poison: Poison, rounds: Sequence[int], clients: Sequence[int] | None, kind: str
    ) -> None:
        self.engine, self.poison, self.rounds, self.clients, self.kind = engine, poison, rounds, clients, kind

    def map(self, tasks: Iterable[Task]) -> Iterator[Answer]:
        for update in self.engine.map(tasks):
            chosen = update.round in self.rounds and (self.clients is None or update.client in self.clients)
            yield self.poison(update) if chosen and update.kind == self.kind else update


@pytest.fixture(scope="session")
def poisoned() -> Callable[..., Callable[[Engine], Engine]]:
    """Return `poisoned(poison, rounds, clients, kind)`, to be wrapped around an engine."""
    return lambda poison, rounds, clients=None, kind="train": (
        lambda engine: Poisoned(engine, poison, rounds, clients, kind)
    )


@pytest.fixture
def same_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let attacks begin at a point of the ball that depends on the clean input alone.

    Random starts are drawn in another way for stacks of clients. That is all that tells the attacks apart, and moves
    the losses of some hundred samples by 5 %.
    """

    def start(clean: Tensor, radius: Any, one: Tensor) -> Any:
        return radius * torch.cos(50 * clean) / math.sqrt(one.numel())

    plain, stacked = (importlib.import_module(f"fedprophet.{name}").STARTS for name in ("attacks.pgd", "fast.attack"))
    for norm in plain:
        monkeypatch.setitem(plain, norm, lambda clean, radius, _: start(clean, radius, clean[0]))
        monkeypatch.setitem(stacked, norm, lambda clean, ball, _: start(clean, ball.radius, clean[0, 0]))


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Whether two sets of tensors are equal bit for bit."""
    return set(a) == set(b) and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="session")
def same_tensors() -> Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], bool]:
    return same


class FakeGrid:
    """Flower's connection without Flower: a node is a function from the record it is sent to what it answers.

    That is a record, an `Error`, several of these in a list, or None for a node that does not answer. What is in `held`
    comes when it is let go. With a `forger`, all answers say that they are that node's.
    """

    def __init__(self, nodes: Mapping[int, Callable[[Any], Any]]) -> None:
        self.nodes = dict(nodes)
        self.sent: list[tuple[int, Any]] = []
        self.replies: list[Any] = []
        self.held: list[Any] = []
        self.holding: set[int] = set()
        self.forger: int | None = None
        self.most_waiting = 0
        self._waiting: set[str] = set()

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Any]) -> Iterable[str]:
        from flwr.app import Message

        ids = []
        for message in messages:
            ids.append(f"message {len(self.sent)}")
            message.metadata.__dict__["_message_id"] = ids[-1]
            node = message.metadata.dst_node_id
            self.sent.append((node, message.content))
            self._waiting.add(ids[-1])
            self.most_waiting = max(self.most_waiting, len(self._waiting))
            found = self.nodes[node](message.content)
            answers = found if isinstance(found, list) else [] if found is None else [found]
            place = self.held if node in self.holding else self.replies
            place += [Message(answer, reply_to=message) for answer in answers]
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Any]:
        asked = set(message_ids)
        found = [reply for reply in self.replies if reply.metadata.reply_to_message_id in asked]
        self.replies = [reply for reply in self.replies if reply not in found]
        self._waiting -= {reply.metadata.reply_to_message_id for reply in found}
        for reply in found if self.forger is not None else ():
            reply.metadata.__dict__["_src_node_id"] = self.forger
        return found

    def let_go(self) -> None:
        self.replies += self.held
        self.held = []


@pytest.fixture
def fake_grid(monkeypatch: pytest.MonkeyPatch) -> type[FakeGrid]:
    """Return what takes the place of Flower's connection; messages can be made in this process."""
    pytest.importorskip("flwr")
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    return FakeGrid


class Clock:
    """A time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return the time by which the server waits for Flower's nodes."""
    pytest.importorskip("flwr")
    clock = Clock()
    for module in ("engine", "node_registry", "server_app"):
        monkeypatch.setattr(f"fedprophet.flower.{module}.time", clock)
    return clock


@pytest.fixture(scope="session")
def steering() -> str:
    """Return what clears a terminal, renames its window and turns its letters round, if it is let through."""
    return "\x1b[2J\x1b]0;owned\x07\u202e"


@pytest.fixture(scope="session")
def free_ports() -> Callable[[int], list[int]]:
    """Return a function that finds ports on loopback for servers, which no test beside this one is given."""
    return processes.free_ports
