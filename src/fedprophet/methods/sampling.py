"""Which clients take part in a round."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt


class ClientPool(Protocol):
    """The clients that could take part. The server knows their ids, never their data."""

    def draw(self, round: int, count: int, seed: int, purpose: str) -> tuple[int, ...]: ...

    @property
    def eligible(self) -> npt.NDArray[np.int64]: ...


@dataclass(frozen=True)
class ClientSampler:
    """Draws clients by the run's seed."""

    pool: ClientPool
    seed: int
    cohort_size: int

    def cohort(self, round: int) -> tuple[int, ...]:
        """Return the clients that train in a round."""
        return self.pool.draw(round, self.cohort_size, self.seed, "cohort")

    def trained(self, round: int) -> tuple[int, ...]:
        """Return the clients that were drawn to train in any round up to one."""
        return tuple(sorted({client for number in range(1, round + 1) for client in self.cohort(number)}))

    def sample(self, clients: int | str, round: int, purpose: str) -> tuple[int, ...]:
        """Return as many clients as the setting says, or all of them."""
        if isinstance(clients, str):
            return tuple(self.pool.eligible.tolist())
        return self.pool.draw(round, clients, self.seed, purpose)
