"""Which device a client has, and what of it is free in a round."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedprophet.errors import ConfigError, unknown
from fedprophet.fleet.device import Device, Pool
from fedprophet.messages.values import Resources
from fedprophet.randomness import numpy_generator

APPS: Mapping[str, float] = {
    "idle": 1.0,
    "1080p video": 0.735,
    "4k video": 0.459,
    "inference": 0.524,
    "detection": 0.167,
    "web": 0.231,
}
"""The share of a device's performance that each co-running load leaves free."""


@dataclass(frozen=True)
class Availability:
    """How the free shares of a device are drawn: performance as named, memory from U[0, memory_share].

    `floor` is the smallest share of performance that `uniform` draws.
    """

    performance: str = "uniform"
    floor: float = 0.05
    memory_share: float = 0.2

    def __post_init__(self) -> None:
        if self.performance not in SHARES:
            raise ConfigError(unknown("availability of performance", self.performance, SHARES))
        if not 0 < self.floor <= 1:
            raise ConfigError(f"the floor of available performance must be above 0 and at most 1, not {self.floor}")
        if not 0 < self.memory_share <= 1:
            raise ConfigError(f"the share of available memory must be above 0 and at most 1, not {self.memory_share}")

    def resources(self, device: Device, seed: int, round: int, client: int, minimum: int) -> Resources:
        """Return what the client's device has available in this round; memory is never below `minimum` (R_min)."""
        rng = numpy_generator(seed, "availability", round, client)
        memory = max(minimum, int(device.memory * rng.uniform(0.0, self.memory_share)))
        share = SHARES[self.performance].draw(rng, self.floor)
        return Resources(memory, device.performance * share, device.bandwidth)


def _uniform(rng: np.random.Generator, floor: float) -> float:
    return float(rng.uniform(floor, 1.0))


def _apps(rng: np.random.Generator, floor: float) -> float:
    return float(rng.choice(list(APPS.values())))


@dataclass(frozen=True)
class Share:
    """A way to draw the share of a device's performance that is free, and its line of help."""

    draw: Callable[[np.random.Generator, float], float]
    help: str


SHARES: Mapping[str, Share] = {
    "uniform": Share(_uniform, "drawn from [performance_floor, 1]"),
    "apps": Share(_apps, "drawn from six co-running loads"),
}


def device_probabilities(pool: Pool, exponent: float = 0.0) -> npt.NDArray[np.float64]:
    """Return how likely each device of the pool is: ∝ (performance · memory)^exponent.

    0 is balanced; below 0, weak devices are more frequent.
    """
    if not np.isfinite(exponent):
        raise ConfigError(f"the exponent of the device probabilities must be a finite number, not {exponent}")
    # In logarithms, because performance · memory is about 10^20 and its powers overflow.
    logarithms = exponent * np.log([device.performance * device.memory for device in pool.devices])
    weights = np.exp(logarithms - logarithms.max())
    return np.asarray(weights / weights.sum())


def draw_device(pool: Pool, seed: int, client: int, exponent: float = 0.0) -> Device:
    """Return the device that the client has for the whole run."""
    rng = numpy_generator(seed, "device", client)
    return pool.devices[int(rng.choice(len(pool.devices), p=device_probabilities(pool, exponent)))]
