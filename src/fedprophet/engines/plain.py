"""The embedded engine: every client runs in this process, one after the other."""

from collections.abc import Iterable, Iterator, Mapping

from fedprophet.client.run import Client, run_client
from fedprophet.client.workspace import Workspace
from fedprophet.fleet.population import Population
from fedprophet.messages.task import ClientTask, ClientUpdate, Resources


class EmbeddedEngine:
    """Clients are made when a task names them, so that those who take no part cost nothing.

    There is one workspace for each architecture that tasks name; clients use it one after the other. `reserve` is
    R_min, the memory that even the poorest device keeps free for training.
    """

    def __init__(self, population: Population, workspaces: Mapping[str, Workspace], reserve: int) -> None:
        self._population = population
        self._workspaces = workspaces
        self._reserve = reserve

    def map(self, tasks: Iterable[ClientTask]) -> Iterator[ClientUpdate]:
        """Run the tasks in the order given."""
        for task in tasks:
            yield run_client(task, self.client(task.client), self._workspaces[task.architecture])

    def client(self, number: int) -> Client:
        """Return a client of the population."""

        def resources(round: int) -> Resources:
            return self._population.resources(number, round, self._reserve)

        return Client(self._population.client_data(number), resources)
