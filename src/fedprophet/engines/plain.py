"""The plain engine: every client runs in this process, one after the other."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from fedprophet.client.job import Client
from fedprophet.client.run import run_client
from fedprophet.client.workspace import Workspace
from fedprophet.engines.registry import EngineParts, engine
from fedprophet.errors import memory_for
from fedprophet.fleet.population import Population
from fedprophet.messages.answers import Answer
from fedprophet.messages.tasks import Task

LESS_MEMORY = (
    "Use fewer workers (threads; for an existing run, in its config.toml), or a new run with a lower train.batch, "
    "evaluate.batch or memory.budget"
)


@engine("plain", "one client after the other, in this process")
def make_plain(parts: EngineParts) -> "PlainEngine":
    return PlainEngine(parts.population, parts.workspaces, parts.reserve)


@dataclass(frozen=True, eq=False)
class PlainEngine:
    """Makes a client when a task names it, so that clients that take no part cost nothing.

    Clients share one workspace for each architecture. `reserve` is R_min, the memory that even the smallest device has
    available for training.
    """

    population: Population
    workspaces: Mapping[str, Workspace]
    reserve: int

    def map(self, tasks: Iterable[Task]) -> Iterator[Answer]:
        """Run the tasks in the order given."""
        for task in tasks:
            with memory_for(f"client {task.client} was to {task.kind}", LESS_MEMORY):
                answer = run_client(task, self.client(task.client), self.workspaces[task.architecture])
            yield answer

    def client(self, number: int) -> Client:
        """Return a client of the population."""
        data = self.population.client_data(number)
        return Client(data, lambda at_round: self.population.resources(number, at_round, self.reserve))
