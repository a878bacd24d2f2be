"""Clients that answer anything: extreme numbers, wrong shapes and names, no answer or two, damaged messages."""

import dataclasses
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from fedprophet.errors import FedProphetError
from fedprophet.messages.answers import Answer
from fedprophet.messages.codec import encode
from fedprophet.messages.tasks import Task
from fedprophet.messages.values import SERVER, Resources
from fedprophet.methods import METHODS
from fedprophet.runs.journal import journal_line
from fedprophet.runs.session import assemble
from fedprophet.server.coordinator import Engine, play_round
from fedprophet.server.rules import RULES

from .conftest import NUMBERS, REALS, TEXTS, Input, damaged

protocol = pytest.importorskip("fedprophet.flower.protocol")
pytestmark = pytest.mark.slow

QUICK = {"train.iterations": 1, "evaluate.clients": 2, "measure.clients": 2, "distillation.iterations": 1}
KEPT = 3
"""States that lies are told to: the first, and those after honest rounds."""


class Honest:
    """An engine that computes each answer once."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._known: dict[Any, Answer] = {}

    def map(self, tasks: Iterable[Task]) -> Iterator[Answer]:
        for task in tasks:
            place = (getattr(task, name, None) for name in ("first", "last", "head", "architecture"))
            key = (type(task), task.round, task.client, task.number, *place)
            if key not in self._known:
                (self._known[key],) = self._engine.map([task])
            yield self._known[key]


def _tensor(rng: random.Random, value: Tensor) -> Tensor:
    choices: tuple[Callable[[], Tensor], ...] = (
        lambda: torch.full_like(value, rng.choice((float("nan"), float("inf"), -1.0, 0.0)), dtype=torch.float32),
        lambda: value.float() * rng.choice((1e30, -10.0, 3e38, 1e-40)),
        lambda: value.flatten()[: rng.randint(0, 3)],
        lambda: value[None],
        lambda: value.to(rng.choice((torch.float64, torch.int64, torch.bool, torch.float16, torch.bfloat16))),
        lambda: torch.zeros(()),
    )
    return rng.choice(choices)()


def _table(rng: random.Random, value: Mapping[str, Any]) -> Mapping[str, Any]:
    name = rng.choice(list(value) or ["more"])
    fresh = value.get(name, torch.zeros(2))
    choices: tuple[Callable[[], Mapping[str, Any]], ...] = (
        lambda: {key: part for key, part in value.items() if key != name},
        lambda: {**value, rng.choice((*TEXTS, "more")): fresh},
        dict,
        *(3 * (lambda: {**value, name: _field(rng, fresh)},)),
    )
    return rng.choice(choices)()


def _field(rng: random.Random, value: Any) -> Any:
    if isinstance(value, Tensor):
        return _tensor(rng, value)
    if isinstance(value, Mapping):
        return _table(rng, value)
    if isinstance(value, Resources):
        return rng.choice((None, dataclasses.replace(value, **_one(rng, value))))
    if isinstance(value, str):
        return rng.choice(TEXTS)
    return rng.choice(NUMBERS if isinstance(value, int) else REALS)


def _one(rng: random.Random, value: Any) -> dict[str, Any]:
    field = rng.choice(dataclasses.fields(value))
    return {field.name: _field(rng, getattr(value, field.name))}


class Lying:
    """An engine whose clients lie about something, as far as the protocol lets them."""

    def __init__(self, engine: Engine, rng: random.Random) -> None:
        self._engine, self._rng, self.told = engine, rng, list[str]()

    def map(self, tasks: Iterable[Task]) -> Iterator[Answer]:
        share = self._rng.choice((0.2, 1.0))
        for answer in self._engine.map(tasks):
            if answer.client == SERVER or self._rng.random() > share:
                yield answer
                continue
            lie = _one(self._rng, answer)
            self.told.append(f"{answer.kind} of {answer.client}: {lie!r:.200}")
            try:
                answer = protocol.unpack_answer(protocol.pack_answer(dataclasses.replace(answer, **lie)))
            except (FedProphetError, ValueError, TypeError, AttributeError):
                continue  # it could not be sent, or was not understood
            yield from [answer] * self._rng.choice((1, 1, 1, 2))


@pytest.fixture(scope="module")
def worlds(tiny: Callable[..., Any]) -> Callable[[str, str], tuple[Any, Engine, list[Any]]]:
    """Return a function that gives a method, an honest engine and states, for a method's and a rule's name."""
    made: dict[tuple[str, str], tuple[Any, Engine, list[Any]]] = {}

    def world(method: str, rule: str) -> tuple[Any, Engine, list[Any]]:
        if (method, rule) not in made:
            limited = {"memory.enforce": method == "jfat", "memory.budget": "100%" if method == "jfat" else "45%"}
            settings = {**QUICK, **limited, "method": method, "aggregate.rule": rule, "engine": "plain"}
            session = assemble(tiny(settings))
            engine, states = Honest(session.engine), [session.method.initial()]
            while len(states) < KEPT:
                states.append(play_round(session.method.round(states[-1]), engine)[0])
            made[method, rule] = session.method, engine, states
        return made[method, rule]

    return world


def test_lies(fuzz: Any, worlds: Any) -> None:
    """A round in which clients lie leads to a state that can be written and played on, or ends in a sentence."""

    def make(rng: random.Random) -> Input:
        name = rng.choice(list(METHODS))
        method, honest, states = worlds(name, rng.choice(list(RULES)) if name in ("fedprophet", "jfat") else "mean")
        liars = Lying(honest, rng)

        def play() -> None:
            state, record = play_round(method.round(rng.choice(states)), liars)
            journal_line(record)
            encode(state)
            if not method.finished(state):
                play_round(method.round(state), honest)

        return liars.told, play

    tried = fuzz("lies", 600, make)
    assert tried.accepted > 300


def test_messages(fuzz: Any, worlds: Any) -> None:
    """A message with damaged bytes is understood or refused."""
    method, honest, states = worlds("fedprophet", "mean")
    answers: list[Answer] = []

    class Recording:
        def map(self, tasks: Iterable[Task]) -> Iterator[Answer]:
            for answer in honest.map(tasks):
                answers.append(answer)
                yield answer

    play_round(method.round(states[0]), Recording())

    def make(rng: random.Random) -> Input:
        record = protocol.pack_answer(rng.choice(answers))
        part = rng.choice(list(record.values()))
        key = rng.choice(list(part))
        value = part[key]
        if isinstance(value, str):
            part[key] = damaged(rng, value.encode()).decode(errors="replace")
        elif isinstance(value, int):
            part[key] = rng.choice(NUMBERS)
        else:
            data = damaged(rng, value.data)
            part[key] = type(value)(value.dtype, (len(data),), value.stype, data)
        return (key, part[key]), lambda: protocol.unpack_answer(record)

    tried = fuzz("messages", 800, make)
    assert tried.refused > 200
