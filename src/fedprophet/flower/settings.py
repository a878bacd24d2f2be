"""The table [flower] of the configuration."""

from typing import ClassVar, Literal

from pydantic import Field

from fedprophet.settings.section import Section, section
from fedprophet.settings.values import Size


@section("flower")
class FlowerSettings(Section):
    """Runs on Flower, in simulation and on real devices."""

    machine_keys: ClassVar[frozenset[str]] = frozenset({"deadline", "cache", "cpus"})

    deadline: float = Field(
        default=600.0,
        gt=0,
        le=10**7,
        description="Seconds that a phase of a round may take; a client that has not answered by then is left out.",
    )
    updates: Literal["float32", "bfloat16"] = Field(
        default="float32", description='Number type of the updates that clients send; "bfloat16" halves them.'
    )
    cache: Size = Field(default="2GB", description="Disk space on a node for frozen modules.")
    cpus: int = Field(default=1, ge=1, le=1024, description="Simulation: CPU cores for one client.")
