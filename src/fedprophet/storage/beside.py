"""Work that goes on beside the caller's own, one piece at a time."""

from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Event, Thread

from fedprophet.interrupts import SECONDS_BETWEEN_LOOKS


@dataclass
class _Piece:
    """Work that is done once, however often it is asked for."""

    work: Callable[[], None]
    done: Event = field(default_factory=Event)
    error: BaseException | None = None

    def __call__(self) -> None:
        if not self.done.is_set():
            try:
                self.work()
            except BaseException as error:
                self.error = error
            finally:
                self.done.set()


class Beside:
    """A thread for work such as writing files. What goes wrong there is raised by the next `wait`.

    A Ctrl-C may come at any moment, also inside `begin`: no two pieces ever run at a time, and none is lost. (An
    executor of concurrent.futures that is interrupted while it starts its thread starts a second one.)
    """

    def __init__(self, name: str) -> None:
        self._pieces: SimpleQueue[_Piece | None] = SimpleQueue()
        self._last: _Piece | None = None
        self._thread = Thread(target=_work_off, args=(self._pieces,), name=name, daemon=True)
        self._thread.start()

    def begin(self, work: Callable[[], None]) -> None:
        """Begin a piece of work, after the last one."""
        self.wait()
        self._last = _Piece(work)
        self._pieces.put(self._last)

    def wait(self) -> None:
        """Wait until the last piece of work is done. A Ctrl-C meanwhile ends the waiting alone."""
        piece = self._last
        if piece is None:
            return
        self._pieces.put(piece)  # a Ctrl-C may have come before `begin` did that
        while not piece.done.wait(SECONDS_BETWEEN_LOOKS):
            pass
        self._last = None
        if piece.error is not None:
            raise piece.error

    def close(self) -> None:
        """Wait for the last piece of work, and until the thread has ended.

        It frees tensors last. If the interpreter ended meanwhile, that would end the process with an error.
        """
        try:
            self.wait()
        finally:
            self._pieces.put(None)
            if self._last is None:  # else a Ctrl-C has ended the waiting
                self._thread.join()


def _work_off(pieces: "SimpleQueue[_Piece | None]") -> None:
    while (piece := pieces.get()) is not None:
        piece()
