"""Kernels are launched on the GPU that their tensors are on; without one, they tell where they would be."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from fedprophet.fast.triton_launch import on_its_device


@dataclass(frozen=True)
class _Blocks:
    """A tensor as the copy engine fetches it."""

    base: Tensor


class _Kernel:
    """A kernel that notes how it is launched."""

    def __init__(self, told: list[object]) -> None:
        self._told = told

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, **options: self._told.append((grid, arguments, options))


@pytest.mark.parametrize("given", [lambda x: x, _Blocks], ids=["tensor", "blocks"])
def test_a_kernel_is_launched_where_its_first_tensor_is(
    given: Callable[[Tensor], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[object] = []

    @contextmanager
    def device_of(tensor: Tensor) -> Iterator[None]:
        told.append(tensor)
        yield
        told.append("back")

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    tensor, other = torch.zeros(2), torch.ones(3)
    first = given(tensor)
    on_its_device(_Kernel(told))[4, 2](first, other, 7, num_warps=8)
    assert told[0] is tensor
    assert told[1] == ((4, 2), (first, other, 7), {"num_warps": 8})
    assert told[2:] == ["back"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
def test_on_a_gpu_that_is_not_the_current_one() -> None:
    from fedprophet.fast.gpu import TritonKernels

    x = torch.arange(2.0 * 4 * 4 * 16).view(1, 2, 4, 4, 16)
    assert torch.cuda.current_device() == 0
    ours, theirs = (TritonKernels().average(x.to(f"cuda:{number}"), 1) for number in (0, 1))
    assert theirs.get_device() == 1
    assert torch.equal(ours.cpu(), theirs.cpu())
