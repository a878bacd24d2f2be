"""The plain engine: every client runs in this process, one after the other."""

from collections.abc import Iterable, Iterator, Mapping

from fedprophet.client.job import Client
from fedprophet.client.run import run_client
from fedprophet.client.workspace import Workspace
from fedprophet.engines.registry import EngineParts, engine
from fedprophet.fleet.population import Population
from fedprophet.messages.answers import Answer
from fedprophet.messages.tasks import Task
from fedprophet.messages.values import Resources


@engine("plain", "one client after the other, in this process")
def make_plain(parts: EngineParts) -> "PlainEngine":
    """Make the engine."""
    return PlainEngine(parts.population, parts.workspaces, parts.reserve)


class PlainEngine:
    """Makes a client when a task names it, so that clients that take no part cost nothing.

    Clients share one workspace for each architecture. `reserve` is R_min, the memory that even the smallest device has
    available for training.
    """

    def __init__(self, population: Population, workspaces: Mapping[str, Workspace], reserve: int) -> None:
        self._population = population
        self._workspaces = workspaces
        self._reserve = reserve

    def map(self, tasks: Iterable[Task]) -> Iterator[Answer]:
        """Run the tasks in the order given."""
        for task in tasks:
            yield run_client(task, self.client(task.client), self._workspaces[task.architecture])

    def client(self, number: int) -> Client:
        """Return a client of the population."""

        def resources(round: int) -> Resources:
            return self._population.resources(number, round, self._reserve)

        return Client(self._population.client_data(number), resources)
