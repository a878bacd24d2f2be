"""The steps of an attack on some samples; on a GPU, micro-batches replay them as one CUDA graph.

A step of PGD is some dozens of small kernels, and launching one takes longer than running it: half the samples at a
time would take twice as long. A graph launches all kernels of all steps at once. It is captured once for a training,
since parameters and norm statistics change in place, and its results are those of the eager attack bit for bit.

A graph keeps its memory. The rest of the iteration is computed in it as well, so that an iteration takes what the
larger half of it takes, as without a graph. What is allocated there lies where the graph writes: it must not be needed
when the graph runs again. What lasts longer, such as momenta, has to be there before the graph is captured. So the
first iteration runs eagerly; and when the graph is to run again after a step, it is checked once that nothing was left.
"""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fedprophet.attacks.pgd import climb
from fedprophet.cascade.allocator import on_own_stream, own_stream
from fedprophet.cascade.measure import predicting
from fedprophet.client.aims import Labels
from fedprophet.client.boundary import Counted
from fedprophet.client.descent import Descent, Loss
from fedprophet.client.part import ModelPart
from fedprophet.client.sliced import by_slices
from fedprophet.threat import ThreatModel


class Ascent:
    """Climbs a part's loss from perturbed samples, one operation after the other."""

    def __init__(
        self, part: ModelPart, threat: ThreatModel | None, strong_convexity: float, sliced: bool = False
    ) -> None:
        self._part, self._threat, self._strong_convexity, self._sliced = part, threat, strong_convexity, sliced

    def __call__(self, clean: Tensor, perturbed: Tensor, labels: Tensor, withstood: Tensor | None = None) -> Tensor:
        """Return where it ends; it must be used up before the next call. Steps withstood are counted, if asked for."""
        part, aim = self._part, Labels(labels) if withstood is None else Counted(labels, withstood)

        def objective(z: Tensor) -> Tensor:
            with by_slices(self._sliced):
                return part.exit_losses(part.features(z), aim, self._strong_convexity).sum()

        return perturbed if self._threat is None else climb(objective, clean, perturbed, self._threat)

    def before(self, compute: Callable[[], None]) -> None:
        """Compute something that precedes the attack, and of which nothing is kept."""
        compute()

    def step(self, compute: Callable[[], Loss]) -> Loss:
        """Return the loss that follows the attack, and whose way back ends before the next one."""
        return compute()


def ascent_of(
    part: ModelPart, threat: ThreatModel | None, strong_convexity: float, size: int, sliced: bool = False
) -> Ascent:
    """Return how `size` samples at a time are attacked throughout a training (0: the whole batch).

    On a CPU it may be by slices of weights.
    """
    device = part.chain.device
    if threat is not None and not threat.harmless and size and device.type == "cuda" and not predicting():
        return CapturedAscent(part, threat, strong_convexity, size, device)
    return Ascent(part, threat, strong_convexity, sliced)


class CapturedAscent(Ascent):
    """Replays a graph of all steps on micro-batches of one size; others run eagerly, in the graph's memory."""

    def __init__(
        self, part: ModelPart, threat: ThreatModel, strong_convexity: float, size: int, device: torch.device
    ) -> None:
        super().__init__(part, threat, strong_convexity)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._size, self._device = size, device
        self._pool = _Pool(device)
        self._batch: tuple[Tensor, ...] = ()
        self._losses = self._captured_at = 0
        self._known: set[int] | None = None

    def __call__(self, clean: Tensor, perturbed: Tensor, labels: Tensor, withstood: Tensor | None = None) -> Tensor:
        with on_own_stream(self._device):
            if len(clean) != self._size or not self._losses:
                with self._pool.used():
                    return super().__call__(clean, perturbed, labels, withstood)
            batch = (clean, perturbed, labels, *(() if withstood is None else (withstood,)))
            if self._graph is None:
                self._capture(*batch)
            assert self._graph is not None
            self._check_leftovers()
            for static, value in zip(self._batch, batch, strict=True):
                static.copy_(value)
            self._graph.replay()
            if withstood is not None:
                withstood.copy_(self._batch[-1])
            return self._batch[1]

    def before(self, compute: Callable[[], None]) -> None:
        with on_own_stream(self._device), self._pool.used():
            compute()

    def step(self, compute: Callable[[], Loss]) -> Loss:
        with on_own_stream(self._device), self._pool.used():
            loss = compute()
        self._losses += 1

        def backward(descent: Descent) -> None:
            with on_own_stream(self._device), self._pool.used():
                loss.backward(descent)

        return Loss(loss.value, backward)

    def _capture(self, *batch: Tensor) -> None:
        torch.cuda.empty_cache()  # what the allocator keeps elsewhere would count against a limit
        with self._pool.used():
            self._batch = tuple(value.clone() for value in batch)
        eagerly = super().__call__

        def work() -> None:
            self._batch[1].copy_(eagerly(*self._batch))

        torch.cuda.synchronize(self._device)
        self._graph = record(work, own_stream(self._device), self._pool.id)
        self._known, self._captured_at = self._allocated(), self._losses

    def _check_leftovers(self) -> None:
        """Look once, at the first replay after a step, whether that left something where the graph writes."""
        if self._known is None or self._losses == self._captured_at:
            return
        if left := self._allocated() - self._known:
            raise RuntimeError(
                f"{len(left)} tensors of a step are still there, in memory that the next attack of a captured graph "
                "overwrites. Keep nothing of a step but copies"
            )
        self._known = None

    def _allocated(self) -> set[int]:
        """Return the addresses of the pool's memory that is in use."""
        segments = torch.cuda.memory_snapshot(self._pool.id)  # type: ignore[no-untyped-call]
        return {block["address"] for part in segments for block in part["blocks"] if block["state"] != "inactive"}


class _Pool:
    """Memory of its own for what is allocated on the stream of graphs; graphs may be captured into it.

    It lasts as long as this object or one of its graphs, whichever goes last. (A `torch.cuda.MemPool` must be the last
    to go, and ends the process otherwise: after an error the order is anybody's guess.)
    """

    def __init__(self, device: torch.device) -> None:
        self._where = device.index or 0
        self.id = torch.cuda.graph_pool_handle()
        with torch.cuda.stream(own_stream(device)):
            self._begin()
            self._end()
        gone = weakref.finalize(self, torch._C._cuda_releasePool, self._where, self.id)
        gone.atexit = False  # the device's memory goes with the process

    @contextmanager
    def used(self) -> Iterator[None]:
        """Allocate here what is allocated on the current stream, in autograd's threads as well."""
        self._begin()
        try:
            yield
        finally:
            self._end()
            torch._C._cuda_releasePool(self._where, self.id)

    def _begin(self) -> None:
        torch._C._cuda_beginAllocateCurrentStreamToPool(self._where, self.id)

    def _end(self) -> None:
        torch._C._cuda_endAllocateToPool(self._where, self.id)


def record(work: Callable[[], None], stream: torch.cuda.Stream, pool: Any) -> torch.cuda.CUDAGraph:
    """Capture work on a stream as a graph whose memory is in a pool; what it needs must have been set up before."""
    graph = torch.cuda.CUDAGraph()
    collecting = gc.isenabled()
    gc.disable()  # a graph that is collected now would be destroyed in the middle of the capture
    try:
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
    finally:
        if collecting:
            gc.enable()
    return graph
