"""All clients of a run. A client's data and device are made on demand, so clients that sit out cost nothing."""

from functools import cached_property

import numpy as np
import numpy.typing as npt

from fedprophet.data.dataset import ClientData, Dataset
from fedprophet.data.examples import LocalExamples
from fedprophet.data.shards import ShardSettings, make_shards, split
from fedprophet.fleet.availability import FleetSettings, draw_device
from fedprophet.fleet.device import Device, Pool
from fedprophet.messages.values import SERVER, Resources
from fedprophet.randomness import numpy_generator


class Population:
    """Clients 0 … size − 1: the data and the device of each, and what it has available in a round."""

    def __init__(
        self,
        dataset: Dataset,
        shards: ShardSettings,
        pool: Pool,
        seed: int,
        clients: int,
        *,
        fleet: FleetSettings | None = None,
        validation: float = 0.2,
        mirror: bool = False,
        shift: int = 0,
        public: int = 0,
    ) -> None:
        """Deal out the training set, and move `public` samples from the test set to the server's public set."""
        self.dataset = dataset
        self.pool = pool
        self.seed = seed
        self.fleet = fleet or FleetSettings()
        self._validation = validation
        self._mirror, self._shift = mirror, shift
        order = numpy_generator(seed, "public set").permutation(len(dataset.test))
        self._public, self._test = np.sort(order[:public]), np.sort(order[public:])
        self._shards = make_shards(dataset.train.labels, dataset.classes, clients, shards, seed)

    @property
    def size(self) -> int:
        """The number of clients, those without data included."""
        return len(self._shards)

    @cached_property
    def eligible(self) -> npt.NDArray[np.int64]:
        """The clients that own at least one sample, in ascending order."""
        clients = np.flatnonzero(self._shards.sizes)
        clients.setflags(write=False)
        return clients

    def samples(self, client: int) -> int:
        """Return the size of a client's shard, its validation part included."""
        return len(self._shards.client(client))

    def client_data(self, client: int) -> ClientData:
        """Return a client's own examples; for `SERVER` the public set, and the rest of the test set as held out."""
        if client == SERVER:
            test = self.dataset.test
            return ClientData(LocalExamples(test, self._public), LocalExamples(test, self._test))
        train, validation = split(self._shards.client(client), self.seed, client, self._validation)
        every = self.dataset.train
        return ClientData(LocalExamples(every, train), LocalExamples(every, validation), self._mirror, self._shift)

    def device(self, client: int) -> Device:
        """Return the device that a client has for the whole run."""
        if not 0 <= client < self.size:
            raise IndexError(f"client {client} of {self.size}")
        return draw_device(self.pool, self.seed, client, self.fleet.exponent)

    def resources(self, client: int, round: int, minimum: int) -> Resources:
        """Return what a client has available in a round, at least `minimum` bytes of memory (R_min)."""
        return self.fleet.resources(self.device(client), self.seed, round, client, minimum)

    def draw(self, round: int, count: int, seed: int, purpose: str) -> tuple[int, ...]:
        """Draw `count` different clients that own data, or all of them if they are fewer, in ascending order."""
        count = min(count, len(self.eligible))
        chosen = numpy_generator(seed, purpose, round).choice(self.eligible, size=count, replace=False)
        return tuple(np.sort(chosen).tolist())
