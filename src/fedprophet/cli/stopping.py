"""What Ctrl-C and SIGTERM do to a command: one stop, in order, that a second Ctrl-C does not disturb."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from fedprophet.interrupts import SIGNALS, dropped_signals_return

SECONDS_TO_STOP = 10.0
"""For so long after a signal others count as the same one: a checkpoint is written, processes end."""


class _Stop:
    """Raises KeyboardInterrupt for the first signal, and for one that comes much later: something may hang."""

    def __init__(self) -> None:
        self._last, self._number = -SECONDS_TO_STOP, int(signal.SIGINT)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - self._last >= SECONDS_TO_STOP:
            self._last, self._number = now, number
            raise KeyboardInterrupt

    def dropped(self) -> int:
        """Count the last signal as one that never came, since nobody saw its KeyboardInterrupt; return its number."""
        self._last = -SECONDS_TO_STOP
        return self._number


@contextmanager
def stopped_once() -> Iterator[None]:
    """Stop a block at the first Ctrl-C or SIGTERM. After the block only the process's end is left: both are ignored."""
    # What runs in the background is started with Ctrl-C ignored, and that stays so.
    heeded = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    stop = _Stop()
    for number in heeded:
        signal.signal(number, stop)
    try:
        with dropped_signals_return(stop.dropped):
            yield
    finally:
        for number in heeded:
            signal.signal(number, _nothing)  # not SIG_IGN, which programs that are started later would inherit


def _nothing(number: int, frame: FrameType | None) -> None:
    pass
