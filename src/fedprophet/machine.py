"""The machine of a measurement: its parts and versions, its clock, its memory, its matrix products."""

import importlib.metadata
import os
import platform
import resource
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from fedprophet.randomness import generator
from fedprophet.threads import torch_threads
from fedprophet.version import __version__

PROC = Path("/proc")
PRODUCT_SIDE = {"cuda": 8192, "cpu": 2048}
PRODUCT_TYPE = {"cuda": torch.bfloat16, "cpu": torch.float32}
PRODUCT_SECONDS = 0.5
"""How long products are repeated."""


def has_gpu() -> bool:
    return torch.cuda.is_available()


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    """Return the name of the processor, if the system tells it."""
    names = []
    with suppress(OSError):
        lines = (PROC / "cpuinfo").read_text().splitlines()
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else f"{platform.machine()} processor"


def load() -> float:
    """Return how many processes wanted a core in the last minute; if more than the cores, times mean little."""
    return round(os.getloadavg()[0], 2)


def describe(gpu: bool = True) -> dict[str, Any]:
    """Return what a reader must know about the machine to trust or repeat a number; a GPU unless it was not used."""
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "processor": processor(),
        "cores": cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load": load(),
        **(_gpu() if gpu and has_gpu() else dict.fromkeys(("gpu", "gpu_memory_bytes", "cuda", "triton", "tf32"))),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "fedprophet": __version__,
    }


def _gpu() -> dict[str, Any]:
    matrix, convolution = torch.backends.cuda.matmul, torch.backends.cudnn
    return {
        "gpu": torch.cuda.get_device_name(),
        "gpu_memory_bytes": torch.cuda.get_device_properties(0).total_memory,
        "cuda": torch.version.cuda,
        "triton": _version("triton"),
        "tf32": {"convolutions": convolution.allow_tf32, "products": matrix.allow_tf32},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return getattr(sys.modules.get(package), "__version__", None)


def now() -> float:
    """Return the clock's seconds, after the GPU has finished all its work."""
    if has_gpu():
        torch.cuda.synchronize()
    return time.perf_counter()


def product() -> dict[str, Any]:
    """Return the matrix product that rates are compared with: its side, type and FLOP/s."""
    device = "cuda" if has_gpu() else "cpu"
    kind = str(PRODUCT_TYPE[device]).removeprefix("torch.")
    return {"side": PRODUCT_SIDE[device], "type": kind, "flops": product_rate(device)}


def product_rate(device: str, seconds: float = PRODUCT_SECONDS, side: int | None = None) -> float:
    """Return the FLOP/s of a large square matrix product on the whole machine, the best of several."""
    side, kind = side or PRODUCT_SIDE[device], PRODUCT_TYPE[device]
    draw = generator(0, "matrix product", device=device)
    a, b = (torch.randn(side, side, generator=draw, device=device).to(kind) for _ in range(2))
    result = torch.empty_like(a)
    with torch_threads(cores()):
        best, end = 0.0, now() + seconds
        torch.mm(a, b, out=result)
        while not best or now() < end:
            began = now()
            torch.mm(a, b, out=result)
            best = max(best, 2 * side**3 / (now() - began))
    return best


# Memory: what torch has allocated on a GPU, the resident pages on a CPU.


def forget_peak(workers: Sequence[int] = ()) -> None:
    """Forget the peak memory so far, of this process and of its workers."""
    if has_gpu():
        torch.cuda.reset_peak_memory_stats()
        return
    for process in (os.getpid(), *workers):
        with suppress(OSError):  # without it the peak is that of the process's whole life
            (PROC / str(process) / "clear_refs").write_text("5")


def peak_bytes(workers: Sequence[int] = ()) -> int:
    """Return the peak memory since `forget_peak`; pages that processes share count once for each."""
    if has_gpu():
        return torch.cuda.max_memory_allocated()
    own = _status(os.getpid(), "VmHWM") or _life_peak()
    return own + sum(_status(process, "VmHWM") for process in workers)


def resident_bytes() -> int:
    return _status(os.getpid(), "VmRSS") or _life_peak()


def _status(process: int, field: str) -> int:
    """Return a field of a process's status in bytes; 0 if the system does not tell it."""
    try:
        lines = (PROC / str(process) / "status").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:")), 0)


def _life_peak() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
