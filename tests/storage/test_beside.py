import signal
import threading
from contextlib import suppress

import pytest

from fedprophet.storage.beside import Beside

PATIENCE = 60
"""Seconds after which something is stuck, on a machine with very much else to do."""


def after(event, done, what):
    """Return a piece of work that waits for an event and is then noted."""

    def work():
        event.wait()
        done.append(what)

    return work


def test_work_goes_on_beside_the_callers_own_one_piece_at_a_time():
    beside, go_on, done = Beside("test"), threading.Event(), []
    beside.begin(after(go_on, done, "first"))
    assert done == [], "the caller is not held up"
    go_on.set()
    beside.begin(lambda: done.append(threading.current_thread().name))
    assert done[0] == "first", "the second piece waits for the first"
    beside.close()
    assert len(done) == 2
    assert done[1].startswith("test")


@pytest.mark.parametrize("work", [None, lambda: None, lambda: 1 / 0])
def test_when_it_is_closed_its_thread_has_ended(work):
    beside = Beside("ended")
    if work:
        beside.begin(work)
    with suppress(ZeroDivisionError):
        beside.close()
    assert "ended" not in {thread.name for thread in threading.enumerate()}


def fail():
    raise OSError("full")


def test_an_error_is_raised_once_by_the_next_wait():
    beside, done = Beside("test"), []
    beside.begin(fail)
    with pytest.raises(OSError, match="full"):
        beside.begin(lambda: done.append(1))
    assert done == []
    beside.begin(lambda: done.append(2))
    beside.wait()
    beside.wait()
    assert done == [2]
    beside.begin(fail)
    with pytest.raises(OSError, match="full"):
        beside.close()


@pytest.fixture
def ctrl_c():
    """A process that was started in the background ignores Ctrl-C: let this one be interrupted."""
    found = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, found)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("to", [threading.main_thread, threading.current_thread], ids=["main", "other"])
def test_a_ctrl_c_while_waiting_does_not_lose_the_work(to):
    """To the main thread it may come just before the waiting begins; in another one it never ends a wait of that."""
    beside, go_on, done = Beside("test"), threading.Event(), []

    def work():
        signal.pthread_kill(to().ident, signal.SIGINT)
        go_on.wait(PATIENCE)
        done.append(1)

    def interrupted():
        beside.begin(work)
        beside.wait()

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert done == []
    go_on.set()
    beside.wait()
    assert done == [1]
    beside.close()


class Interrupted:
    """A queue whose first `put` a Ctrl-C comes before, or right after."""

    def __init__(self, queue, late):
        self.queue, self.late, self.first = queue, late, True

    def put(self, piece):
        first, self.first = self.first, False
        if not first or self.late:
            self.queue.put(piece)
        if first:
            raise KeyboardInterrupt


@pytest.mark.parametrize("late", [False, True])
def test_a_ctrl_c_while_work_begins_leaves_it_to_be_done_once_and_alone(late):
    beside, running, done = Beside("test"), threading.Lock(), []

    def work(what):
        assert running.acquire(blocking=False), "two pieces at a time"
        done.append(what)
        running.release()

    beside._pieces = Interrupted(beside._pieces, late)
    with pytest.raises(KeyboardInterrupt):
        beside.begin(lambda: work(1))
    beside.begin(lambda: work(2))
    beside.close()
    assert done == [1, 2]
