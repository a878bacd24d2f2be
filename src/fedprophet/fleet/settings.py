"""The configuration of the clients' devices."""

from typing import Annotated

from pydantic import Field

from fedprophet.fleet.availability import SHARES
from fedprophet.settings.section import Section
from fedprophet.settings.values import OneOf


class FleetSettings(Section):
    """The devices of the clients."""

    pool: str = Field(
        default="small", description="Name of a device pool that ships, or the path of a pool's TOML file."
    )
    exponent: float = Field(
        default=0.0,
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
