"""Refusing random draws while a model is traced: cut, it would draw them only once.

The draws of this thread alone are seen, and before they happen. Others, such as the thread that keeps a Flower node
connected, draw from the same generators at any time.
"""

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

DRAWING = ("random", "getrandbits")
"""What all methods of `random.Random` that draw come down to."""
_HERE = str(Path(__file__).parent)
_IMPORT = "<frozen importlib._bootstrap>"


class RandomDrawError(Exception):
    """Something draws random numbers where none may be drawn."""

    def __init__(self) -> None:
        super().__init__("it draws random numbers that do not depend on its input: cut, it would draw them only once")


@contextmanager
def draws_refused() -> Iterator[None]:
    """Let this thread's draws from torch's and Python's generators raise RandomDrawError. NumPy's are not seen."""
    drawn = False

    def refuse(frame: FrameType, event: str, called: Any) -> None:
        nonlocal drawn
        if _draws(frame, event, called):
            drawn = True
            raise RandomDrawError

    with _NoTorchDraws(), _profiler(refuse):  # type: ignore[no-untyped-call]
        yield
    if drawn:  # the model has caught the error, and Python no longer calls a profiler that raised one
        raise RandomDrawError


class _NoTorchDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise RandomDrawError
        return func(*args, **(kwargs or {}))


def _draws(frame: FrameType, event: str, called: Any) -> bool:
    drawing = event == "c_call" and called.__name__ in DRAWING and isinstance(called.__self__, random.Random)
    return drawing and not _importing(frame)


def _importing(frame: FrameType | None) -> bool:
    """Whether a library is being imported there, on the way to the model's code: that happens once anyhow."""
    while frame is not None and not frame.f_code.co_filename.startswith(_HERE):
        if frame.f_code.co_filename == _IMPORT:
            return True
        frame = frame.f_back
    return False


@contextmanager
def _profiler(look: Callable[[FrameType, str, Any], None]) -> Iterator[None]:
    """Show `look` the calls of this thread; the profiler that is active pauses meanwhile."""
    active: Any = sys.getprofile()
    in_c = active is not None and not callable(active)
    if in_c and not hasattr(active, "disable"):
        yield  # torch's profiler could not be started again, so it stays
        return
    if in_c:  # cProfile, before Python 3.12
        active.disable()
    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(None if in_c else active)
        if in_c:
            active.enable()
