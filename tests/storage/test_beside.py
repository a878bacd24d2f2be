import threading

import pytest

from fedprophet.storage.beside import Beside


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


def test_a_ctrl_c_while_waiting_does_not_lose_the_work(monkeypatch):
    beside, go_on, done = Beside("test"), threading.Event(), []
    beside.begin(after(go_on, done, 1))
    with monkeypatch.context() as patch:
        patch.setattr("fedprophet.storage.beside.wait", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            beside.wait()
    go_on.set()
    beside.wait()
    assert done == [1]
    beside.close()
