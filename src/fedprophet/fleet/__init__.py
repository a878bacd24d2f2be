"""The clients: their devices, what is free on them, how long they take, and their data."""

from fedprophet.fleet.latency import client_seconds, workload_of
from fedprophet.fleet.network import draw_link
from fedprophet.messages.values import batch_sizes

__all__ = ["batch_sizes", "client_seconds", "draw_link", "workload_of"]
