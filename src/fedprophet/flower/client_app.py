"""The ClientApp: what Flower starts on a node. One handler answers every message; nothing it is sent can end it."""

import ctypes
import os
import threading
import time
from functools import cache
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedprophet.flower.node import answer

SECONDS_BETWEEN_LOOKS = 0.2
SECONDS_TO_LEAVE = 10.0
"""Who has not left by then, in one very long operation, is ended."""


def make_app(leave: str | None = None) -> ClientApp:
    """Return the app; as soon as there is a file `leave`, its process ends, even in the middle of a task."""
    app = ClientApp()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        if leave is not None:
            _watch(leave)
        return Message(answer(message.content, context.node_config), reply_to=message)

    return app


class _Leave(SystemExit):
    """An orderly end: Ray takes another one for a failure, and says so on the user's terminal."""

    def __init__(self) -> None:
        super().__init__(0)


@cache
def _watch(leave: str) -> None:
    def look() -> None:
        while not Path(leave).exists():
            time.sleep(SECONDS_BETWEEN_LOOKS)
        main = threading.main_thread().ident
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main or 0), ctypes.py_object(_Leave))
        time.sleep(SECONDS_TO_LEAVE)
        os._exit(0)

    threading.Thread(target=look, daemon=True).start()


app = make_app()
