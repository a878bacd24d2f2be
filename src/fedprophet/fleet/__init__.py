"""The clients: their devices, what is free on them, how long they take, and their data."""

from fedprophet.fleet.availability import APPS, SHARES, Availability, device_probabilities, draw_device
from fedprophet.fleet.device import POOLS, Device, Pool, load_pool, pool_text
from fedprophet.fleet.latency import Time, Workload, batch_sizes, client_seconds, local_time, workload_of
from fedprophet.fleet.network import NETWORKS, Link, Network, communication_time, draw_link, payload_bytes
from fedprophet.fleet.population import Population

__all__ = [
    "APPS",
    "NETWORKS",
    "POOLS",
    "SHARES",
    "Availability",
    "Device",
    "Link",
    "Network",
    "Pool",
    "Population",
    "Time",
    "Workload",
    "batch_sizes",
    "client_seconds",
    "communication_time",
    "device_probabilities",
    "draw_device",
    "draw_link",
    "load_pool",
    "local_time",
    "payload_bytes",
    "pool_text",
    "workload_of",
]
