"""How long training would take on a fleet, without any training.

A method plays its rounds with clients that only say what they have available. It asks, assigns and counts time as in a
run; what comes back of a training task cannot be used, so the model stays as it is. Cohorts, devices and available
resources are those of a run with the same seed.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fedprophet.bench.synthetic import Sizes, SyntheticExamples, sizes_of
from fedprophet.config.config import Config
from fedprophet.data.dataset import Dataset
from fedprophet.engines import EngineParts
from fedprophet.messages.answers import Answer, Measured, Reported, Trained
from fedprophet.messages.tasks import Task
from fedprophet.runs.session import assemble
from fedprophet.runs.summary import simulated_seconds
from fedprophet.server.coordinator import play_round

STILL = ("engine=plain", "model.weights=", "evaluate.clients=1", "measure.clients=1")
"""Changes of a configuration that leave the clock as it is."""


@dataclass(frozen=True)
class RoundTime:
    """Mean simulated seconds of a round, and how many rounds a whole run has at most."""

    computation: float
    access: float
    rounds: int

    @property
    def total(self) -> float:
        return self.computation + self.access


class _Idle:
    """Clients that report as usual and train nothing: their updates have no parameters, so none is usable."""

    def __init__(self, parts: EngineParts) -> None:
        self._population, self._reserve = parts.population, parts.reserve

    def map(self, tasks: Iterable[Task]) -> Iterator[Answer]:
        """Answer what time depends on; nobody evaluates."""
        answers = {"report": self._report, "train": self._train, "measure": self._measure}
        yield from (answers[task.kind](task) for task in tasks if task.kind in answers)

    def _report(self, task: Task) -> Answer:
        return Reported(**_about(task), resources=self._population.resources(task.client, task.round, self._reserve))

    def _train(self, task: Task) -> Answer:
        return Trained(**_about(task), loss=1.0, samples=len(self._population.client_data(task.client).train))

    def _measure(self, task: Task) -> Answer:
        return Measured(**_about(task), samples=1, magnitude=1.0)


def _about(task: Task) -> dict[str, Any]:
    return {"round": task.round, "client": task.client, "number": task.number, "weight": 1.0}


def round_time(config: Config, rounds: int) -> RoundTime:
    """Return the mean time of a round, over a run in which every stage has so many rounds instead of its own number."""
    short = config.model_copy(update={"rounds": rounds})
    session = assemble(short, dataset=_blank(sizes_of(config.data)), engine=_Idle)
    state, records = session.method.initial(), []
    while not session.method.trained(state):
        state, record = play_round(session.method.round(state), session.engine)
        records.append(record)
    seconds = simulated_seconds(records)
    return RoundTime(
        seconds["computation_s"] / len(records),
        seconds["access_s"] / len(records),
        config.rounds * len(session.world.modules),
    )


def _blank(sizes: Sizes) -> Dataset:
    """Return a dataset of the right size, all of whose images are one: nobody looks at them."""
    image = torch.zeros(1, *sizes.shape, dtype=torch.uint8)
    train, test = (SyntheticExamples(sizes, length, image) for length in (sizes.train, sizes.test))
    channels = sizes.shape[0]
    return Dataset("blank images", train, test, sizes.classes, sizes.shape, (0.0,) * channels, (1.0,) * channels)
