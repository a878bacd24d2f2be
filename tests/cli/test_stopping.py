"""Ctrl-C and SIGTERM: one stop in order; a second one soon after, and any after the command, change nothing."""

import signal
import time
from collections.abc import Iterator

import pytest

from fedprophet.cli import stopping
from fedprophet.cli.stopping import SECONDS_TO_STOP, SIGNALS, stopped_once


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = {number: signal.signal(number, signal.default_int_handler) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_second_signal_does_not_disturb_what_the_first_began(number: signal.Signals) -> None:
    saved = []

    def work() -> None:
        try:
            signal.raise_signal(number)
        finally:
            for again in SIGNALS:
                signal.raise_signal(again)
            saved.append("all")

    with pytest.raises(KeyboardInterrupt), stopped_once():
        work()
    assert saved == ["all"]


def test_a_signal_much_later_stops_again_for_something_may_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(stopping, "time", type("Clock", (), {"monotonic": staticmethod(lambda: now)}))
    with stopped_once():
        for stops in (True, False, True):
            try:
                signal.raise_signal(signal.SIGINT)
                assert not stops
            except KeyboardInterrupt:
                assert stops
            now += SECONDS_TO_STOP / 1.9


def test_the_end_of_the_process_is_not_interrupted() -> None:
    with stopped_once():
        time.monotonic()
    for number in SIGNALS:
        signal.raise_signal(number)


def test_a_command_in_the_background_ignores_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with stopped_once():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


class Finalised:
    """An object during whose end a signal comes."""

    def __init__(self, number: signal.Signals) -> None:
        self.number = number

    def __del__(self) -> None:
        signal.raise_signal(self.number)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_that_python_drops_stops_all_the_same(number: signal.Signals) -> None:
    """It is that signal which comes again: the other may be ignored."""
    other = next(other for other in SIGNALS if other != number)
    signal.signal(other, signal.SIG_IGN)
    reached = []

    def work() -> None:
        Finalised(number)
        reached.append("dropped")
        time.sleep(60)

    with pytest.raises(KeyboardInterrupt), stopped_once():
        work()
    assert reached == ["dropped"]
