"""Signals wait where no exception must come, come where one may, and come again where it is dropped."""

import gc
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import nn

from fedprophet.cascade.measure import LiveBytes, without_allocating
from fedprophet.interrupts import (
    SECONDS_UNTIL_AGAIN,
    _send_again,
    dropped_signals_return,
    let_signals_through,
    signals_wait,
)

PATIENCE = 60
"""Seconds after which a signal is lost, on a machine with very much else to do."""


@pytest.fixture(autouse=True)
def handlers() -> Iterator[list[int]]:
    """Have SIGINT raise KeyboardInterrupt and SIGTERM be noted; handlers must be there again after each test."""
    noted: list[int] = []

    def note(number: int, frame: object) -> None:
        noted.append(number)

    before = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, note)
    yield noted
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is note
    for number, handler in before:
        signal.signal(number, handler)


def _interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_a_signal_waits_for_the_end_of_the_outer_block() -> None:
    reached = []

    def work() -> None:
        with signals_wait():
            with signals_wait():
                _interrupt()
                reached.append("inner")
            reached.append("outer")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert reached == ["inner", "outer"]
    let_signals_through()  # nothing is left


def test_of_two_signals_the_first_is_heard_first_and_none_is_left_for_later(handlers: list[int]) -> None:
    def work(*numbers: int) -> None:
        with signals_wait():
            for number in numbers:
                os.kill(os.getpid(), number)

    with pytest.raises(KeyboardInterrupt):
        work(signal.SIGINT, signal.SIGTERM)
    let_signals_through()
    assert handlers == [], "the interrupt ended what the other one was for"
    with pytest.raises(KeyboardInterrupt):
        work(signal.SIGTERM, signal.SIGINT)
    assert handlers == [signal.SIGTERM]


def test_a_signal_comes_where_it_is_let_through() -> None:
    reached = []

    def work() -> None:
        with signals_wait():
            let_signals_through()
            _interrupt()
            reached.append("waits")
            let_signals_through()
            reached.append("too late")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert reached == ["waits"]


def test_every_signal_goes_to_its_own_handler_once(handlers: list[int]) -> None:
    with signals_wait():
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
        assert handlers == []
    assert handlers == [signal.SIGTERM]


def test_what_is_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with signals_wait():
        _interrupt()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_another_thread_holds_nothing_back() -> None:
    found: list[object] = []

    def work() -> None:
        with signals_wait():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]


class _Interrupted(torch.autograd.Function):
    """An operation during which Ctrl-C is pressed."""

    @staticmethod
    def forward(context: object, x: torch.Tensor) -> torch.Tensor:
        _interrupt()
        return x + 1


@pytest.mark.parametrize("block", [lambda: without_allocating([nn.Linear(2, 2)]), nullcontext], ids=["fake", "real"])
def test_an_operation_that_is_followed_is_not_interrupted(block: Callable[[], AbstractContextManager[None]]) -> None:
    """The sum is computed, too: four numbers and four that are one more, of four bytes each."""
    peaks = []

    def work() -> None:
        with block(), LiveBytes() as live:
            _Interrupted.apply(torch.ones(4)).sum()
            peaks.append(live.peak)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert peaks == [2 * 4 * 4]


class _Freed:
    """An object that is freed at once."""


class _Finalised:
    """An object during whose end something happens."""

    def __init__(self, happens: Callable[[], object]) -> None:
        self.happens = happens

    def __del__(self) -> None:
        self.happens()


def _in_a_finaliser(happens: Callable[[], object]) -> None:
    _Finalised(happens)


def _in_a_callback_of_a_weak_reference(happens: Callable[[], object]) -> None:
    freed = _Freed()
    reference = weakref.ref(freed, lambda _: happens())
    del freed
    assert reference() is None


def _in_a_callback_of_the_collector(happens: Callable[[], object]) -> None:
    def once(phase: str, info: object) -> None:
        gc.callbacks.remove(once)
        happens()

    gc.callbacks.append(once)
    gc.collect()


def _long_and_interrupted() -> None:
    """Drop the signal that is sent again as well: it comes before this is over, and ends the sleep."""
    _in_a_finaliser(_interrupt)
    time.sleep(PATIENCE)


@pytest.mark.parametrize("happens", [_interrupt, _long_and_interrupted])
@pytest.mark.parametrize(
    "where", [_in_a_finaliser, _in_a_callback_of_a_weak_reference, _in_a_callback_of_the_collector]
)
def test_an_interrupt_that_python_drops_comes_again(
    where: Callable[[Callable[[], object]], None],
    happens: Callable[[], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    reached = []

    def work() -> None:
        with dropped_signals_return():
            where(happens)
            reached.append("dropped")
            time.sleep(PATIENCE)
            reached.append("lost")

    before = sys.unraisablehook
    with pytest.raises(KeyboardInterrupt):
        work()
    assert "lost" not in reached  # where much is collected, it comes again before that is over
    assert sys.unraisablehook is before
    assert capsys.readouterr().err == ""


def test_a_signal_that_was_seen_comes_once() -> None:
    with pytest.raises(KeyboardInterrupt), dropped_signals_return():
        _interrupt()
    time.sleep(4 * SECONDS_UNTIL_AGAIN)


def test_what_else_is_dropped_is_told_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda lost: told.append(lost.exc_type))
    with dropped_signals_return():
        _in_a_finaliser(lambda: 1 / 0)
    assert told == [ZeroDivisionError]


def test_a_dropped_interrupt_does_not_end_the_process_where_ctrl_c_would() -> None:
    """A program may have given the signal back to the system meanwhile."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _send_again(lambda: signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_another_thread_leaves_what_tells_of_dropped_exceptions_alone() -> None:
    found: list[object] = []

    @dropped_signals_return()
    def work() -> None:
        found.append(sys.unraisablehook)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [sys.unraisablehook]
