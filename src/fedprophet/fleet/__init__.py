"""The clients: their devices, what is free on them, and their data."""

from fedprophet.fleet.availability import APPS, SHARES, Availability, device_probabilities, draw_device
from fedprophet.fleet.device import POOLS, Device, Pool, load_pool
from fedprophet.fleet.population import Population

__all__ = [
    "APPS",
    "POOLS",
    "SHARES",
    "Availability",
    "Device",
    "Pool",
    "Population",
    "device_probabilities",
    "draw_device",
    "load_pool",
]
