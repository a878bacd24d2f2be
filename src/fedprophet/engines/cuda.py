"""One NVIDIA GPU as the fast engine's device: bf16 or float32, Triton kernels, captured graphs."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from fedprophet.cascade.allocator import spare_memory
from fedprophet.client.captured import record
from fedprophet.engines.plain import make_plain
from fedprophet.engines.registry import EngineParts, engine
from fedprophet.engines.stacked import Limits, StackedEngine
from fedprophet.errors import ConfigError
from fedprophet.fast.rounds import Backend

ACTIVATIONS_SHARE, RESIDENT_SHARE, PLANS_SHARE = 0.25, 0.25, 0.25
"""Shares of the device's memory for the activations of one group, and for inputs and plans that stay between rounds."""
PRECISIONS = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def expect_gpu() -> None:
    """Raise ConfigError where torch finds no GPU."""
    if not torch.cuda.is_available():
        raise ConfigError('engine = "cuda" needs an NVIDIA GPU, and torch finds none. Use "auto" or "plain"')


@engine("cuda", "groups of clients at once on an NVIDIA GPU", settings=("precision",), place="cuda", expect=expect_gpu)
def make_cuda(parts: EngineParts) -> StackedEngine:
    """Make the engine on the first GPU. The plain path, for what cannot be fused, runs there as well."""
    if parts.config.memory.enforce:
        spare_memory()
    backend = cuda_backend(PRECISIONS[parts.config.precision])
    for workspace in parts.workspaces.values():
        workspace.chain.model.to(backend.device)  # what tasks bring is copied there when it is loaded
    memory = torch.cuda.get_device_properties(backend.device).total_memory
    limits = Limits(*(int(share * memory) for share in (ACTIVATIONS_SHARE, RESIDENT_SHARE, PLANS_SHARE)))
    return StackedEngine(make_plain(parts), backend, limits)


def cuda_backend(compute: torch.dtype) -> Backend:
    """Return the backend of the first GPU; ConfigError where there is none, or no Triton."""
    expect_gpu()
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
    """Work on fixed memory. The first call runs it directly, which compiles its kernels. The second captures it as a
    graph. From then on all its kernels are launched at once.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._done = False
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        if not self._done:
            self._work()
            self._done = True
            return
        if self.graph is None:
            self.graph = _capture(self._work)
        self.graph.replay()


def _capture(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    stream = _stream()
    stream.wait_stream(torch.cuda.current_stream())
    # All graphs use one pool of memory: they run one after the other, and nothing that is made inside lasts.
    graph = record(work, stream, _pool().pool())
    torch.cuda.current_stream().wait_stream(stream)
    return graph


@cache
def _stream() -> Any:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]
