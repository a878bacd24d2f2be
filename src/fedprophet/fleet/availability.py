"""Which device a client has, and what of it is free in a round."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import Field

from fedprophet.errors import ConfigError
from fedprophet.fleet.device import Device, Pool
from fedprophet.messages.values import Resources
from fedprophet.randomness import numpy_generator
from fedprophet.settings.section import Section
from fedprophet.settings.toml import shown
from fedprophet.settings.values import OneOf

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
class Share:
    """A way to draw the share of a device's performance that is free, and its line of help."""

    draw: Callable[[np.random.Generator, float], float]
    help: str


SHARES: Mapping[str, Share] = {
    "uniform": Share(lambda rng, floor: float(rng.uniform(floor, 1.0)), "drawn from [performance_floor, 1]"),
    "apps": Share(lambda rng, floor: float(rng.choice(list(APPS.values()))), "drawn from six co-running loads"),
}


class FleetSettings(Section):
    """The devices of the clients."""

    pool: str = Field(
        default="small", description="Name of a device pool that ships, or the path of a pool's TOML file."
    )
    exponent: float = Field(
        default=0.0,
        ge=-100,
        le=100,
        description="A device is drawn with a probability proportional to (performance · memory)^exponent: 0 draws all "
        "alike, below 0 favours weak devices.",
    )
    performance: Annotated[str, OneOf(lambda: {name: share.help for name, share in SHARES.items()})] = Field(
        default="uniform", description="Share of its peak performance that a device has available."
    )
    performance_floor: float = Field(default=0.05, gt=0, le=1, description='"uniform": the lowest share that is drawn.')
    memory_share: float = Field(
        default=0.2,
        gt=0,
        le=1,
        description="A device has U[0, memory_share] of its peak memory available, but never less than the budget.",
    )

    def idle(self, config: Any) -> Iterator[tuple[str, str]]:
        if self.performance != "uniform":
            yield "performance_floor", f"fleet.performance = {shown(self.performance)}"

    def resources(self, device: Device, seed: int, round: int, client: int, minimum: int) -> Resources:
        """Return what the client's device has available in this round; memory is never below `minimum` (R_min)."""
        rng = numpy_generator(seed, "availability", round, client)
        memory = max(minimum, int(device.memory * rng.uniform(0.0, self.memory_share)))
        share = SHARES[self.performance].draw(rng, self.performance_floor)
        return Resources(memory, device.performance * share, device.bandwidth)


def device_probabilities(pool: Pool, exponent: float = 0.0) -> npt.NDArray[np.float64]:
    """Return how likely each device is: ∝ (performance · memory)^exponent; below 0, weak ones are more frequent."""
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
