"""Ends a client's process in the middle of a task, when a simulation is stopped at once.

Flower waits for every task that its clients are working on, and a Ctrl-C must not take minutes. The process has to end
by a SystemExit in its main thread: Ray takes any other end for a crash and says so on the user's terminal. The main
thread is busy with the task, so the exception is raised there from a thread that watches for a file. CPython's
PyThreadState_SetAsyncExc is the only way to do that; nothing else in FedProphet uses it.
"""

import ctypes
import os
import threading
import time
from functools import cache
from pathlib import Path

SECONDS_BETWEEN_LOOKS = 0.2
SECONDS_TO_LEAVE = 10.0
"""A process that is still busy after this time is ended by force."""


class _Leave(SystemExit):
    def __init__(self) -> None:
        super().__init__(0)


@cache
def leave_when(file: str) -> None:
    """End this process as soon as the file exists."""

    def watch() -> None:
        while not Path(file).exists():
            time.sleep(SECONDS_BETWEEN_LOOKS)
        main = threading.main_thread().ident
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main or 0), ctypes.py_object(_Leave))
        time.sleep(SECONDS_TO_LEAVE)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
