"""CUDA's allocator under a limit. It bounds workspaces, too, which are what takes a GPU past its predictions.

cuDNN's heuristics choose the quickest algorithm, whatever workspace it takes: a convolution of 64 channels may take ten
times the memory of its result. Where the allocator refuses it, torch takes the next algorithm that cuDNN names, and
remembers it. So a limit of the allocator is all it needs. cuBLAS's workspaces are of a fixed size, which torch reads
from the environment before its first product.
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

CUBLAS = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "128"}
"""Eight workspaces of 16 KiB, and one of 128 KiB."""
ALLOCATOR = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
"""Where people set the allocator themselves."""
IN_ONE_PIECE = "expandable_segments:True"
NO_ALGORITHM = "unable to find an engine"
"""What torch says where no algorithm of a convolution has a workspace that the allocator grants."""


def spare_memory() -> None:
    """Let CUDA spare memory in this process; call it before the first product. Settings found are kept.

    cuBLAS uses small workspaces; and the allocator keeps what is freed in one piece, of which any part can be used
    again. It is too late for the first where torch has multiplied on a GPU already, which it does not tell: a warning
    says that it may be.
    """
    missing = {name: value for name, value in CUBLAS.items() if name not in os.environ}
    if missing and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        warnings.warn(
            "CUDA is in use already: cuBLAS may have workspaces of its own size, which count. Set "
            f"{' and '.join(f'{name}={value}' for name, value in missing.items())} in the environment",
            RuntimeWarning,
            stacklevel=2,
        )
    os.environ.update(missing)
    if torch.cuda.is_available() and not any(name in os.environ for name in ALLOCATOR):
        torch._C._accelerator_setAllocatorSettings(IN_ONE_PIECE)


@contextmanager
def allocator_limit(device: torch.device, bytes_: int) -> Iterator[None]:
    """Let a `with` block hold at most `bytes_` of a GPU's memory, beside what the allocator holds now.

    It runs on a stream of its own. What was freed on one stream serves that one alone, so the block has no use of gaps
    that lie beside other tensors and cannot be given back: it begins with nothing, and what it finds does not depend
    on what else is there. What it holds are its tensors, and what it freed and keeps for later, in steps of 20 MiB.
    torch.OutOfMemoryError is raised where this does not do, but for workspaces of convolutions, which become smaller.
    """
    _first_graph(device)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    before = torch.cuda.get_per_process_memory_fraction(device)
    allowed = torch.cuda.memory_reserved(device) + bytes_
    # torch multiplies the share again, and cuts off what is behind the point. A limit that is there already holds on.
    torch.cuda.set_per_process_memory_fraction(min((max(allowed, 0) + 0.5) / total, before), device)
    try:
        with on_own_stream(device):
            yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)


@contextmanager
def on_own_stream(device: torch.device) -> Iterator[None]:
    """Run a `with` block on `own_stream`: after what was asked for before it, and before what comes after it."""
    stream, outside = own_stream(device), torch.cuda.current_stream(device)
    stream.wait_stream(outside)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        outside.wait_stream(stream)


@cache
def own_stream(device: torch.device) -> Any:
    """Return the stream of all that is limited and captured on a device: cuBLAS has workspaces for every stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@cache
def _first_graph(device: torch.device) -> torch.cuda.CUDAGraph:
    """Return a graph that stays. torch allocates for the first one that there is; refused that, it ends the process."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(device), torch.cuda.graph(graph):
        torch.zeros((), device=device)
    return graph


def ran_out(error: BaseException | None) -> bool:
    """Whether an error, or one that it covers up, says that the allocator refused memory."""
    if error is None:
        return False
    return isinstance(error, torch.OutOfMemoryError) or NO_ALGORITHM in str(error) or ran_out(error.__context__)
