"""Real processes of the command line, which can be killed.

A server process imports the program once and forks for each command (multiprocessing's forkserver), so that nobody
waits for torch to be imported. What runs is `fedprophet.cli.main` in a process of its own.
"""

import json
import multiprocessing
import os
import random
import runpy
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

LAUNCH = str(Path(__file__).with_name("launch.py"))
PATIENCE = 900
"""Seconds after which a process is stuck, on a machine with very much else to do."""


class Command:
    """A command that runs."""

    def __init__(
        self, context: Any, arguments: list[str], folder: Path, log: Path, group: bool = False, **options: Any
    ) -> None:
        self.group = group
        self.out, self.err = log.with_suffix(".out"), log.with_suffix(".err")
        job = {"arguments": arguments, "folder": str(folder), "out": str(self.out), "err": str(self.err)}
        job |= {"group": group, **options}
        # runpy is importable in any process, unlike a module of the tests.
        self.process = context.Process(target=runpy.run_path, args=(LAUNCH, {"JOB": job}, "__main__"))
        self.process.daemon = not group  # a daemon may have no processes of its own, so it trains without workers
        self.process.start()

    def wait(self) -> "Command":
        self.process.join(PATIENCE)
        assert self.process.exitcode is not None, f"stuck: {self.stdout}{self.stderr}"
        return self

    def send(self, number: int) -> None:
        """Send a signal, if it still runs: to its group if it has one."""
        with suppress(ProcessLookupError):
            (os.killpg if self.group else os.kill)(self.process.pid, number)

    def signal(self, number: int) -> "Command":
        self.send(number)
        return self.wait()

    def when(self, true: Callable[[], bool]) -> "Command":
        """Wait for a moment in the process's life; it may be over before."""
        end = time.monotonic() + PATIENCE
        while not true() and self.process.is_alive():
            assert time.monotonic() < end, f"never happened: {self.stdout}{self.stderr}"
            time.sleep(0.002)
        return self

    def when_lines(self, journal: Path, count: int) -> "Command":
        return self.when(lambda: journal.exists() and journal.read_bytes().count(b"\n") >= count)

    def kill(self) -> None:
        """`kill -9`."""
        if self.process.is_alive():
            os.kill(self.process.pid, signal.SIGKILL)
        self.wait()

    def left_behind(self) -> bool:
        """Whether processes of its group outlive it for long."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            try:
                os.killpg(self.process.pid, 0)
            except ProcessLookupError:
                return False
            time.sleep(0.05)
        return True

    @property
    def code(self) -> int:
        return self.wait().process.exitcode

    @property
    def stdout(self) -> str:
        return self.out.read_text() if self.out.exists() else ""

    @property
    def stderr(self) -> str:
        return self.err.read_text() if self.err.exists() else ""

    @property
    def json(self) -> Any:
        assert self.code == 0, self.stderr
        return json.loads(self.stdout)


_KEPT: list[socket.socket] = []


def free_ports(count: int) -> list[int]:
    """Return ports on loopback for servers, which no process beside this one is given here.

    They are below those that a system gives to connections. The same port for datagrams, which nobody uses, is kept
    until this process ends, so that none is found twice.
    """
    ports = (port for port in random.SystemRandom().sample(range(20_000, 32_000), 12_000) if _take(port))
    return [next(ports) for _ in range(count)]


def _take(port: int) -> bool:
    mark = socket.socket(type=socket.SOCK_DGRAM)
    try:
        mark.bind(("127.0.0.1", port))
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        mark.close()
        return False
    _KEPT.append(mark)
    return True


@contextmanager
def forking() -> Iterator[Any]:
    """Yield what commands are forked from; their environment has one thread."""
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    before = {name: os.environ.get(name) for name in threads}
    os.environ.update(threads)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fedprophet.cli", "sklearn.datasets", "torch._dynamo"])
    yield context
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)
