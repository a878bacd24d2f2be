"""How many threads torch uses. Only this module sets their number.

Floating-point sums differ between numbers of threads, so the number belongs to a run and is set for it as a whole.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


def set_threads(count: int) -> None:
    """Let torch use this many threads from now on, whoever still holds it to one."""
    torch.set_num_threads(count)
    ONE_THREAD.before = count


@contextmanager
def torch_threads(count: int | None = None) -> Iterator[None]:
    """Let torch use `count` threads (None: as many as now) in a `with` block, and as many as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def one_thread(device: torch.device) -> AbstractContextManager[None]:
    """Let torch use one thread in a `with` block whose memory counts: on a CPU every thread has buffers of its own."""
    return nullcontext() if device.type == "cuda" else torch_threads(1)


class OneThread:
    """Lets torch use one thread until every holder has left; then it has as many as before."""

    def __init__(self) -> None:
        self._holders = 0
        self.before = 1

    def __enter__(self) -> None:
        if not self._holders:
            self.before = torch.get_num_threads()
        self._holders += 1
        torch.set_num_threads(1)

    def __exit__(self, *_: object) -> None:
        self._holders -= 1
        if not self._holders:
            torch.set_num_threads(self.before)


ONE_THREAD = OneThread()
