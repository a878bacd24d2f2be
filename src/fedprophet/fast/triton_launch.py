"""Where kernels are launched: Triton takes the current GPU, wherever their tensors are."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor


def on_its_device(kernel: Any) -> "_Launched":
    """Let a kernel be launched on the GPU that its first tensor is on."""
    return _Launched(kernel)


class _Launched:
    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], first: Any, *others: Any, **options: Any) -> None:
        tensor = first if isinstance(first, Tensor) else first.base  # blocks of a tensor that the copy engine fetches
        with torch.cuda.device_of(tensor):  # type: ignore[no-untyped-call]
            self._kernel[grid](first, *others, **options)
