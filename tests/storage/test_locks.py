"""A folder's lock between processes, for which other descriptors of the same file stand."""

import errno
import fcntl
import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest

from fedprophet.storage import locks
from fedprophet.storage.locks import folder_lock, is_locked

HOLD = """
import runpy, signal, sys
from pathlib import Path
with runpy.run_path(sys.argv[1])["folder_lock"](Path(sys.argv[2])):
    print("held", flush=True)
    signal.pause()
"""
"""The module is run from its file: importing the package would import torch, which takes seconds."""


class RefusedError(Exception):
    pass


def refuse():
    raise RefusedError


def held(folder):
    """Whether somebody else would find the folder locked."""
    file = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False


def test_it_is_held_in_the_block_alone_and_its_file_is_hidden(tmp_path):
    with folder_lock(tmp_path):
        assert held(tmp_path)
    assert not held(tmp_path)
    with pytest.raises(KeyError), folder_lock(tmp_path):
        raise KeyError
    assert not held(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == [".lock"]


def test_a_second_one_waits_or_is_refused(tmp_path):
    order, waiting = [], threading.Event()
    with folder_lock(tmp_path):
        with pytest.raises(RefusedError), folder_lock(tmp_path, refuse):
            order.append("never")
        assert held(tmp_path), "the first one still has it"

        def second():
            with folder_lock(tmp_path, waiting.set):
                order.append("second")

        thread = threading.Thread(target=second)
        thread.start()
        waiting.wait()
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_a_file_system_without_locks_is_no_obstacle_and_said_once(tmp_path, monkeypatch, caplog):
    def none(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    done = []
    for _ in range(2):
        with folder_lock(tmp_path, refuse):
            done.append(True)
    assert len(done) == 2
    assert caplog.messages == [f"{tmp_path} is used without a lock: No locks available"]


def test_the_lock_of_a_killed_process_is_gone(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLD, locks.__file__, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"held\n"
    with pytest.raises(RefusedError), folder_lock(tmp_path, refuse):
        pass
    process.kill()
    process.wait()
    with folder_lock(tmp_path, refuse):
        pass


def test_looking_takes_nothing(tmp_path):
    """Neither file nor lock is left, and one who looks is not seen by another."""
    assert is_locked(tmp_path) is False
    assert not list(tmp_path.iterdir())
    with folder_lock(tmp_path):
        assert is_locked(tmp_path) is True
        assert held(tmp_path), "it still has it"
    assert is_locked(tmp_path) is False
    with looking(tmp_path):
        assert is_locked(tmp_path) is False


@contextmanager
def looking(folder):
    """What a look does, for longer."""
    file = os.open(folder / ".lock", os.O_RDONLY)
    fcntl.flock(file, fcntl.LOCK_SH)
    try:
        yield
    finally:
        os.close(file)


def test_a_look_in_the_same_moment_refuses_nobody(tmp_path, monkeypatch):
    """The first try meets a look, which is over before the second."""
    with folder_lock(tmp_path):
        pass
    look = looking(tmp_path)
    look.__enter__()
    pause = time.sleep

    def sleep(seconds):
        look.__exit__(None, None, None)
        pause(0)

    monkeypatch.setattr(time, "sleep", sleep)
    with folder_lock(tmp_path, refuse):
        assert held(tmp_path)


def test_looks_beside_a_process_that_takes_the_lock_again_and_again(tmp_path):
    """Two look a hundred times a second; nobody is refused."""
    looks, over = [], threading.Event()

    def look():
        while not over.wait(0.01):
            looks.append(is_locked(tmp_path))

    others = [threading.Thread(target=look) for _ in range(2)]
    for other in others:
        other.start()
    try:
        while len(looks) < 50:
            with folder_lock(tmp_path, refuse):
                pass
    finally:
        over.set()
    for other in others:
        other.join()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_tells_nothing(tmp_path, monkeypatch, number):
    (tmp_path / ".lock").touch()

    def flock(file, how):
        raise OSError(number, "no locks")

    monkeypatch.setattr(fcntl, "flock", flock)
    assert is_locked(tmp_path) is None
