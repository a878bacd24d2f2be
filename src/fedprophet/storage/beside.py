"""Work that goes on beside the caller's own, one piece at a time."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait


class Beside:
    """A thread for work such as writing files. What goes wrong there is raised by the next `wait`."""

    def __init__(self, name: str) -> None:
        self._threads = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._work: Future[None] | None = None

    def begin(self, work: Callable[[], None]) -> None:
        """Begin a piece of work, after the last one."""
        self.wait()
        self._work = self._threads.submit(work)

    def wait(self) -> None:
        """Wait until the last piece of work is done. A Ctrl-C meanwhile ends the waiting alone."""
        if self._work is not None:
            wait([self._work])
            work, self._work = self._work, None
            work.result()

    def close(self) -> None:
        """Wait for the last piece of work, and end the thread."""
        try:
            self.wait()
        finally:
            self._threads.shutdown(wait=False)
