"""One NVIDIA GPU as the fast engine's device: bf16 or float32, Triton kernels, captured graphs."""

import gc
import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch

from fedprophet.client.workspace import Workspace
from fedprophet.engines.stacked import Limits, StackedEngine
from fedprophet.errors import ConfigError
from fedprophet.fast.rounds import Backend
from fedprophet.fleet.population import Population

USES_BEFORE = 4
"""So often work is done as it is: kernels are compiled when they first run, and a graph must be used to pay."""
AHEAD = 1.25
"""Where the device is busy so many times longer than the host is with asking, launches cost no time."""
ACTIVATIONS_SHARE, RESIDENT_SHARE, PLANS_SHARE = 0.25, 0.25, 0.25
"""Shares of the device's memory for the activations of one group, and for inputs and plans that stay between rounds."""


PRECISIONS = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def cuda_engine(
    population: Population, workspaces: Mapping[str, Workspace], reserve: int, precision: str
) -> StackedEngine:
    """Return the engine on the first GPU. The plain path, for what cannot be fused, runs there as well."""
    backend = cuda_backend(PRECISIONS[precision])
    for workspace in workspaces.values():
        workspace.to(backend.device)
    memory = torch.cuda.get_device_properties(backend.device).total_memory
    limits = Limits(*(int(share * memory) for share in (ACTIVATIONS_SHARE, RESIDENT_SHARE, PLANS_SHARE)))
    return StackedEngine(population, workspaces, reserve, backend, limits)


def cuda_backend(compute: torch.dtype) -> Backend:
    """Return the backend of the first GPU; ConfigError where there is none, or no Triton."""
    if not torch.cuda.is_available():
        raise ConfigError('engine = "cuda" needs an NVIDIA GPU, and torch finds none. Use "auto" or "plain"')
    try:
        from fedprophet.fast.gpu import TritonKernels
    except ImportError as error:
        raise ConfigError(f'engine = "cuda" needs Triton, which comes with torch for CUDA: {error}') from error
    return Backend(torch.device("cuda", torch.cuda.current_device()), TritonKernels(), compute, Captured)


@cache
def _pool() -> torch.cuda.CUDAGraph:
    """Return a graph whose pool of memory all others use. It stays: a pool without a graph is given back."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.zeros((), device="cuda")
    return graph


class Captured:
    """Work on fixed memory. It is done as it is the first times, which compiles and loads its kernels. Where the device
    waits for the host then, it is captured as a graph: all its kernels are launched at once from then on. Where the
    host is ahead anyway, capturing would only take time.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._uses = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._host, self._ahead = 0.0, False
        self._began, self._ended = _event(), _event()

    def __call__(self) -> None:
        self._uses += 1
        if self._graph is None and self._uses > USES_BEFORE and self._waits():
            self._graph = _capture(self._work)
        if self._graph is not None:
            self._graph.replay()
        elif self._uses == USES_BEFORE:
            self._measure()
        else:
            self._work()

    def _measure(self) -> None:
        """Do the work, and note how long the host takes to ask for it and the device to do it."""
        self._began.record()
        start = time.perf_counter()
        self._work()
        self._host = time.perf_counter() - start
        # Where the device has not even begun, a full queue may have kept the host waiting.
        self._ahead = not self._began.query()
        self._ended.record()

    def _waits(self) -> bool:
        """Whether the device had to wait for the host; it is not asked to finish for this."""
        if self._ahead or not self._ended.query():
            return False
        return float(self._began.elapsed_time(self._ended)) / 1e3 < AHEAD * self._host


def _capture(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    graph, stream = torch.cuda.CUDAGraph(), _stream()
    stream.wait_stream(torch.cuda.current_stream())
    collecting = gc.isenabled()
    gc.disable()  # a graph that is collected now would be destroyed in the middle of the capture
    try:
        with torch.cuda.stream(stream):
            # All graphs use one pool of memory: they run one after the other, and nothing that is made inside lasts.
            graph.capture_begin(pool=_pool().pool(), capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
    finally:
        if collecting:
            gc.enable()
    torch.cuda.current_stream().wait_stream(stream)
    return graph


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


@cache
def _stream() -> Any:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]
