"""What the tests of methods for unlike devices share: fleets of chosen memory, a model of four channels, a resume."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedprophet.config.config import Config
from fedprophet.data.dataset import from_tensors
from fedprophet.messages.answers import Answer, Reported, Trained
from fedprophet.messages.codec import decode, encode
from fedprophet.messages.tasks import Task, Train
from fedprophet.messages.values import Resources
from fedprophet.runs.session import Session, assemble
from fedprophet.server.coordinator import Engine, Record, play_round

DEVICE = '[[device]]\nname = "{name}"\nperformance = "1 GFLOPS"\nmemory = {memory}\nbandwidth = "10MB/s"\n'


@pytest.fixture(scope="session")
def fleet(tmp_path_factory) -> Callable[..., dict[str, Any]]:
    """Return the settings of a fleet with devices of these peak memories, of which U[0, 1] is free."""

    def settings(*memories: int) -> dict[str, Any]:
        path = tmp_path_factory.mktemp("pool") / "pool.toml"
        path.write_text("\n".join(DEVICE.format(name=f"device {m}", memory=m) for m in memories))
        return {"fleet.pool": str(path), "fleet.memory_share": 1.0}

    return settings


@pytest.fixture(scope="session")
def resumed() -> Callable[[Config, Path, int], tuple[Session, Any, Record]]:
    """Return a function that plays a round again from the state before it, which a first try left behind.

    That try got to the end of the round and stored what clients keep, but not its state.
    """

    def play(config: Config, folder: Path, round: int) -> tuple[Session, Any, Record]:
        first = assemble(config, folder)
        state = first.method.initial()
        for _ in range(round - 1):
            state, _ = play_round(first.method.round(state), first.engine)
        data, tensors = encode(state)
        play_round(first.method.round(state), first.engine)
        first.layers.flush()
        again = assemble(config, folder)
        saved = decode(again.method.state, json.loads(json.dumps(data)), tensors)
        return again, *play_round(again.method.round(saved), again.engine)

    return play


class Memories:
    """An engine whose clients report exactly the memory of the architecture that a table of rounds gives them."""

    def __init__(self, engine: Engine, needed: Mapping[str, int], trained: Mapping[int, Mapping[int, str]]) -> None:
        self.engine, self.needed, self.trained = engine, needed, trained

    def map(self, tasks: Iterable[Task]) -> Iterator[Answer]:
        for answer in self.engine.map(tasks):
            if isinstance(answer, Reported) and answer.resources is not None and answer.round in self.trained:
                memory = self.needed[self.trained[answer.round][answer.client]]
                answer = replace(answer, resources=replace(answer.resources, memory=memory))
            yield answer


@pytest.fixture(scope="session")
def memories() -> type[Memories]:
    return Memories


@pytest.fixture(scope="session")
def half_width(tiny) -> Callable[..., list[Train]]:
    """Return a function that returns the tasks of a round for six clients of the tiny model at half its width."""

    def tasks(method: str, round: int, seed: int = 0) -> list[Train]:
        made = assemble(tiny({"method": method, "seed": seed})).method
        half = Resources(made.world.cost.total_memory // 2, 1.0, 1.0)
        return made.assign(replace(made.initial(), round=round), dict.fromkeys(range(6), half), {})

    return tasks


@dataclass(frozen=True)
class FourChannels:
    """A method for the model conv 1 → 4, linear 4 → 2 on single pixels; channel c of both layers starts at 10 (c + 1).

    Its biases are 0.5 for each channel and -1 for each class.
    """

    method: Any

    def tasks(self, round: int, widths: Mapping[int, float]) -> list[Train]:
        """Return what clients of these width fractions are asked in a round."""
        whole = self.method.world.cost.total_memory
        available = {client: Resources(int(r * whole), 1.0, 1.0) for client, r in widths.items()}
        return self.method.assign(self.state(round), available, {})

    def state(self, round: int) -> Any:
        ten = torch.tensor([10.0, 20.0, 30.0, 40.0])
        model = {
            "0.weight": ten.view(4, 1, 1, 1),
            "0.bias": torch.full((4,), 0.5),
            "2.weight": torch.stack([ten, -ten]),
            "2.bias": torch.full((2,), -1.0),
        }
        initial = self.method.initial()
        assert {name: value.shape for name, value in initial.model.items()} == {n: v.shape for n, v in model.items()}
        return replace(initial, model=model, round=round)

    def joined(self, tasks: Sequence[Train], weights: Sequence[float], sent: Sequence[Mapping[str, Any]]) -> Any:
        """Return the model after clients of these weights sent these numbers, and the rest as they were given it."""
        updates = [
            Trained(
                round=task.round,
                client=task.client,
                weight=q,
                loss=1.0,
                samples=8,
                parameters=_like(task.parameters, numbers),
            )
            for task, q, numbers in zip(tasks, weights, sent, strict=True)
        ]
        try:
            next(self.method.join(self.state(tasks[0].round), list(zip(tasks, updates, strict=True)), {}))
        except StopIteration as end:
            return {name: value.flatten().tolist() for name, value in end.value.model.items()}
        raise AssertionError("joining needs no further task")


def _like(parameters: Mapping[str, torch.Tensor], numbers: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    sent = {name: torch.tensor(values, dtype=torch.float32) for name, values in numbers.items()}
    return {**parameters, **{name: values.view_as(parameters[name]) for name, values in sent.items()}}


@pytest.fixture(scope="session")
def four_channels(tiny) -> Callable[..., FourChannels]:
    """Return a function that makes a method for a model of four channels."""

    def make(method: str, changes: Mapping[str, Any] | None = None) -> FourChannels:
        images, labels = torch.rand(8, 1, 1, 1), torch.arange(8) % 2
        settings = {"method": method, "population.clients": 2, "shards.kind": "iid", **(changes or {})}
        model = nn.Sequential(nn.Conv2d(1, 4, 1), nn.Flatten(), nn.Linear(4, 2))
        session = assemble(tiny(settings), model=model, dataset=from_tensors(images, labels, images, labels))
        return FourChannels(session.method)

    return make
