"""One NVIDIA GPU as the fast engine's device: bf16 or float32, Triton kernels, captured graphs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from fedprophet.client.workspace import Workspace
from fedprophet.engines.stacked import Limits, StackedEngine
from fedprophet.errors import ConfigError
from fedprophet.fast.rounds import Backend
from fedprophet.fleet.population import Population

WARM_UP = 2
"""A kernel is compiled and loaded when it first runs, which a graph cannot capture."""
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
    return Backend(torch.device("cuda", torch.cuda.current_device()), TritonKernels(), compute, captured)


@cache
def _pool() -> Any:
    return torch.cuda.graph_pool_handle()


@dataclass(frozen=True)
class _Graph:
    """A captured graph. It reads what the work holds on to, so both live as long."""

    work: Callable[[], None]
    graph: torch.cuda.CUDAGraph

    def __call__(self) -> None:
        self.graph.replay()


def captured(work: Callable[[], None]) -> Callable[[], None]:
    """Capture work on fixed memory as a graph: all its kernels are launched at once from then on."""
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # All graphs use one pool of memory: they run one after the other, and nothing that is made inside lasts.
    with torch.cuda.graph(graph, pool=_pool()):
        work()
    return _Graph(work, graph)
