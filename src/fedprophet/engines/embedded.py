"""The embedded engine: every client runs in this process, one after the other."""

from collections.abc import Iterable, Iterator

from fedprophet.client.run import Client, Workspace, run_client
from fedprophet.client.task import ClientTask, ClientUpdate, Resources
from fedprophet.fleet.population import Population


class EmbeddedEngine:
    """Clients are made when a task names them, so that those who take no part cost nothing.

    `reserve` is R_min, the memory that even the poorest device keeps free for training.
    """

    def __init__(self, population: Population, workspace: Workspace, reserve: int) -> None:
        self._population = population
        self._workspace = workspace
        self._reserve = reserve

    def map(self, tasks: Iterable[ClientTask]) -> Iterator[ClientUpdate]:
        """Run the tasks in the order given."""
        for task in tasks:
            yield run_client(task, self._client(task.client), self._workspace)

    def _client(self, number: int) -> Client:
        def resources(round: int) -> Resources:
            return self._population.resources(number, round, self._reserve)

        return Client(self._population.client_data(number), resources)
