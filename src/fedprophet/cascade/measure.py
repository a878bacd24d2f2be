"""The memory that a computation takes: predicted without allocating anything, or measured while it runs.

A prediction runs the computation on fake tensors, which have shapes and no data, and follows what operations return
until it is freed; what an operation takes for itself on the way is added from a table. On a GPU that is a workspace
whose size cuDNN chooses by what the allocator grants (`cascade.allocator`): none is predicted there. A measurement
reads the allocator, so it sees everything that goes through it, the workspaces of convolutions included: its events on
a CPU, its statistics on a GPU.

Both are peaks of what a computation allocates. What is there before it begins is named by the caller (`held`).
"""

import math
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from itertools import islice
from typing import Any, NamedTuple, Self, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedprophet.cascade.swap import swapped
from fedprophet.interrupts import signals_wait

T = TypeVar("T")
Transient = Callable[[tuple[Any, ...], Any], int]
"""Returns the bytes that an operation has allocated at its peak, given its arguments and result."""
BLOCK, SMALL_BLOCK = 16, 8
"""oneDNN's own order of a tensor has channels in blocks of this many; the last one is filled up."""
FEW = 3
"""Images of this many channels or fewer are read as they are, but by convolutions of single positions."""


def _convolution(arguments: tuple[Any, ...], result: Tensor) -> int:
    """Count a convolution as oneDNN computes it: on copies in an order of its own, with the result copied back."""
    x, weight, bias = arguments[:3]
    copied = x.nbytes if _read_as_it_is(x, weight) else _blocked(x)
    return _blocked(result) + max(copied + _blocked_weight(weight), int(result.nbytes)) + _bias(bias)


def _convolution_backward(arguments: tuple[Any, ...], result: tuple[Tensor | None, ...]) -> int:
    gradient, x, weight, _, stride = arguments[:5]
    at_input, at_weight = (_bytes([part]) for part in result[:2])
    first = _at_input(gradient, x, weight, max(stride)) if at_input else 0
    second = _at_weight(gradient, x, weight) + 2 * _bytes(result[2:]) + _bias(result[2]) if at_weight else 0
    return max(first, at_input + second)


def _at_input(gradient: Tensor, x: Tensor, weight: Tensor, stride: int) -> int:
    if stride > 1 and x.shape[1] <= FEW:
        rows = weight.shape[0] * math.prod(x.shape[1:-1]) * weight.shape[-1] * weight.element_size()
        return gradient.nbytes + x.nbytes + gradient.nbytes // len(gradient) + rows
    filled = _blocked_weight(weight, 0 if x.shape[1] == weight.shape[1] else FEW)
    return _blocked(x) + max(_blocked(gradient) + filled, (1 if stride == 1 else 2) * x.nbytes)


def _at_weight(gradient: Tensor, x: Tensor, weight: Tensor) -> int:
    small = x.shape[1] <= SMALL_BLOCK and not _of_single_positions(weight)
    copied = 0 if _read_as_it_is(x, weight) else _blocked(x, SMALL_BLOCK if small else BLOCK)
    return _blocked_weight(weight) + max(copied + _blocked(gradient), weight.nbytes)


def _bias(bias: Tensor | None) -> int:
    """Count the copies of a bias that fills no block."""
    filled = 0 if bias is None else _filled(len(bias), BLOCK)
    return 0 if bias is None or filled == len(bias) else 2 * filled * bias.element_size()


def _read_as_it_is(x: Tensor, weight: Tensor) -> bool:
    return x.shape[1] <= FEW and not _of_single_positions(weight)


def _of_single_positions(weight: Tensor) -> bool:
    return math.prod(weight.shape[2:]) == 1


def _blocked(x: Tensor, block: int = BLOCK) -> int:
    return x.nbytes // x.shape[1] * _filled(x.shape[1], block)


def _blocked_weight(weight: Tensor, few: int = FEW) -> int:
    """Count a copy of a weight: its channels are in blocks on both sides, but for `few` of them at the input."""
    outputs, inputs = weight.shape[:2]
    filled = _filled(outputs, BLOCK) * (inputs if inputs <= few else _filled(inputs, BLOCK))
    return weight.nbytes // (outputs * inputs) * filled


def _filled(channels: int, block: int) -> int:
    return -(-channels // block) * block


def _batch_norm(arguments: tuple[Any, ...], result: tuple[Tensor | None, ...]) -> int:
    """Count a factor and a summand for each channel beside what is returned."""
    x = arguments[0]
    return _bytes(result) + 2 * int(x.shape[1]) * int(x.element_size())


def _batch_norm_backward(arguments: tuple[Any, ...], result: tuple[Tensor | None, ...]) -> int:
    """Count the gradient at the input twice: one more tensor of its size is allocated, and not used."""
    return _bytes(result) + _bytes(result[:1])


def _bytes(results: Iterable[Tensor | None]) -> int:
    return sum(tensor.nbytes for tensor in results if tensor is not None)


CPU_TRANSIENTS: Mapping[Any, Transient] = {
    torch.ops.aten.convolution.default: _convolution,
    torch.ops.aten.convolution_backward.default: _convolution_backward,
    torch.ops.aten.native_batch_norm.default: _batch_norm,
    torch.ops.aten.native_batch_norm_backward.default: _batch_norm_backward,
}
"""Operations that take more than they return, as it was measured on one thread: oneDNN has buffers for each.

Others take nothing worth counting. Convolutions with a stride over maps of a few positions take up to 125 kB more.
"""


class Account(NamedTuple):
    """How a device's memory is counted: what operations take for themselves, and what sizes are rounded up to."""

    transients: Mapping[Any, Transient]
    unit: int = 1

    def size(self, bytes_: int) -> int:
        """Return the bytes that an allocation takes."""
        return -(-bytes_ // self.unit) * self.unit


CPU, CUDA = Account(CPU_TRANSIENTS), Account({}, unit=512)


def account_of(device: torch.device) -> Account:
    """Return how memory is counted on a device; where there is none yet, as on a CPU."""
    return CUDA if device.type == "cuda" else CPU


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the memory behind some tensors, each piece of memory once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that are alive while it is active: `now` and at their `peak`.

    What is `held` counts wherever it lies; of other tensors those whose memory is a file do not, since the system may
    take it back. Meanwhile signals wait: it runs inside torch's operations, and when tensors are freed.
    """

    def __init__(self, held: Iterable[Tensor] = (), account: Account = CPU) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._alive: dict[int, int] = {}
        self._followed: dict[int, Any] = {}
        self._block = ExitStack()
        self._account = account
        for tensor in held:
            self._see(tensor)

    def __enter__(self) -> Self:
        self._block.enter_context(signals_wait())
        return super().__enter__()  # type: ignore[no-untyped-call, no-any-return]

    def __exit__(self, *raised: Any) -> None:
        with self._block:
            super().__exit__(*raised)  # type: ignore[no-untyped-call]
            for end in list(self._followed.values()):  # of tensors that stay: a model's would follow it for ever
                end.detach()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        before = self.now
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage().filename is None:
                self._see(leaf)
        transients = self._account.transients
        if func in transients:
            self.peak = max(self.peak, before + transients[func](args, result))
        return result

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        name = storage._cdata
        if name in self._alive:
            return
        self._alive[name] = self._account.size(storage.nbytes())
        self.now += self._alive[name]
        self.peak = max(self.peak, self.now)
        self._followed[name] = weakref.finalize(storage, self._forget, name)

    def _forget(self, name: int) -> None:
        del self._followed[name]
        self.now -= self._alive.pop(name)


_predicting = ContextVar("_predicting", default=False)


def predicting() -> bool:
    """Whether tensors have no values, since only their memory matters."""
    return _predicting.get()


def repeated(pieces: Iterator[T]) -> Iterator[T]:
    """Yield what a computation goes through; a prediction of it ends with the second, as all others take the same."""
    return islice(pieces, 2) if predicting() else pieces


@contextmanager
def without_allocating(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Give modules fake parameters and buffers within a `with` block in which every new tensor is a fake one.

    Signals wait for its end.
    """

    def fake(tensor: Tensor) -> Tensor:
        empty = torch.empty(tensor.shape, dtype=tensor.dtype)
        return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty

    token = _predicting.set(True)
    try:
        with signals_wait(), FakeTensorMode(), swapped(modules, fake):
            yield
    finally:
        _predicting.reset(token)


def measured_peak(compute: Callable[[], object], device: torch.device) -> int:
    """Run something, perhaps twice; return the largest number of bytes that it had allocated at a time."""
    return _peak_on_cuda(compute, device) if device.type == "cuda" else _peak_on_cpu(compute)


def _peak_on_cpu(compute: Callable[[], object]) -> int:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it writes a line when it starts and one when it stops
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        compute()
    assert profiler.profiler is not None
    results: Any = profiler.profiler.kineto_results
    events = sorted((event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]")
    now = peak = 0
    for _, change in events:
        now += change
        peak = max(peak, now)
    return peak


def _peak_on_cuda(compute: Callable[[], object], device: torch.device) -> int:
    """Run something twice. What is set up once counts too: workspaces in the first run, graphs in the second one.

    A graph allocates when it is captured, and nothing when it is replayed.
    """
    before = cuda_base(device)
    torch.cuda.reset_peak_memory_stats(device)
    compute()
    compute()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def cuda_base(device: torch.device) -> int:
    """Return the bytes that are allocated before a computation, without the workspaces of earlier ones."""
    torch.cuda.synchronize(device)
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated(device)
