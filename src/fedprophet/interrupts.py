"""Ctrl-C and SIGTERM where no exception must come: while torch carries out operations with the help of Python code.

torch calls such code also from functions that no exception may leave, and ends the process where one does; and an
exception in what Python runs when an object is freed is dropped, so that the signal would be lost. So signals wait
there for a point between two operations.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
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
