"""How long a computation takes on a device."""

import time

import torch


def finish(device: torch.device) -> None:
    """Wait until a device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def clock(device: torch.device) -> float:
    """Return seconds of computation."""
    finish(device)
    return time.perf_counter() if device.type == "cuda" else time.process_time()
