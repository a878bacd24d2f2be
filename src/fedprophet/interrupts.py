"""Ctrl-C and SIGTERM where no exception must come, and where one would be lost.

While torch carries out operations with the help of Python code, it calls such code also from functions that no
exception may leave, and ends the process where one does. There signals wait for a point between two operations.

An exception in what Python runs when an object is freed is dropped, wherever that happens. A signal that was to stop
something with it is sent again.

A signal that comes just before the main thread begins to wait, or that the system gives to another thread, does not
wake it: Python heeds it when the waiting is over. Where that may be long, the main thread waits a little at a time.
"""

import _thread
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SECONDS_BETWEEN_LOOKS = 0.5
"""For so long the main thread waits at a time."""
SECONDS_UNTIL_AGAIN = 0.05
"""What frees an object is usually over by then. If it is not, the signal is dropped and sent once more."""
Handler = Callable[[int, FrameType | None], Any]


class _Waiting:
    """How many blocks hold signals back, and those that have come: a signal that comes twice comes once."""

    def __init__(self) -> None:
        self.blocks = 0
        self.signals: dict[int, Handler] = {}


_waiting = _Waiting()


class _Patient:
    """A handler that lets its signal wait. Where no block holds it back, it is the handler that it stands for."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if _waiting.blocks:
            _waiting.signals[number] = self.handler
        else:
            self.handler(number, frame)


@contextmanager
def signals_wait() -> Iterator[None]:
    """Let signals wait within a `with` block, until its end or the next `let_signals_through`."""
    if threading.current_thread() is not threading.main_thread():  # only that one is interrupted
        yield
        return
    replaced = [] if _waiting.blocks else list(_made_patient())
    _waiting.blocks += 1
    try:
        yield
    finally:
        _waiting.blocks -= 1
        for number, patient in replaced:
            signal.signal(number, patient.handler)
        if not _waiting.blocks:
            let_signals_through()


def _made_patient() -> Iterator[tuple[int, _Patient]]:
    """Replace the handlers of the process; yield what has to be put back."""
    for number in SIGNALS:
        handler = signal.getsignal(number)
        if isinstance(handler, _Patient):  # left by a signal that came as it was to be put back
            yield number, handler
        elif callable(handler):  # what is ignored, or ends the process at once, needs no patience
            patient = _Patient(handler)
            signal.signal(number, patient)
            yield number, patient


def let_signals_through() -> None:
    """Heed the signals that are waiting, if any: to be called between operations, where an exception may come.

    The first that came is the first to be heard. Where its handler ends what is going on, the others are over with it.
    """
    if _waiting.signals and threading.current_thread() is threading.main_thread():
        came, _waiting.signals = _waiting.signals, {}
        for number, handler in came.items():
            handler(number, None)


_returning = False
"""Whether a block is watched for signals that are dropped."""


@contextmanager
def dropped_signals_return(dropped: Callable[[], int] = lambda: signal.SIGINT) -> Iterator[None]:
    """Send a signal again if Python drops its KeyboardInterrupt within a `with` block; `dropped` returns its number.

    Python does so in finalisers, callbacks of weak references and of the garbage collector, and tells `unraisablehook`
    alone. They run at any moment: one of them follows every import. A block within another leaves it to that one. A
    signal that is dropped at the very end comes just after the block: it is not lost either.
    """
    global _returning
    if _returning or threading.current_thread() is not threading.main_thread():  # only that one is interrupted
        yield
        return
    before = sys.unraisablehook

    def look(lost: "sys.UnraisableHookArgs") -> None:
        if isinstance(lost.exc_value, KeyboardInterrupt):
            # By a thread, since here it would be dropped again; not one of `threading`, whose locks may be held now.
            _thread.start_new_thread(_send_again, (dropped,))
        else:
            before(lost)

    sys.unraisablehook, _returning = look, True
    try:
        yield
    finally:
        _returning = False
        if sys.unraisablehook is look:  # else somebody has set another one meanwhile
            sys.unraisablehook = before


def _send_again(dropped: Callable[[], int]) -> None:
    time.sleep(SECONDS_UNTIL_AGAIN)
    number, main = dropped(), threading.main_thread().ident
    if main is not None and callable(signal.getsignal(number)):  # else it would end the process at once
        signal.pthread_kill(main, number)
