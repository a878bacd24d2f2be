"""Real processes of the command line, which can be killed.

A server process imports the program once and forks for each command (multiprocessing's forkserver), so that a test does
not wait for torch to be imported. What runs is `fedprophet.cli.main` in a process of its own.
"""

import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

LAUNCH = str(Path(__file__).with_name("launch.py"))
PATIENCE = 900
"""Seconds after which a process is stuck, on a machine with very much else to do."""


class Command:
    """A command that runs."""

    def __init__(self, context: Any, arguments: list[str], folder: Path, log: Path, **options: Any) -> None:
        self.out, self.err = log.with_suffix(".out"), log.with_suffix(".err")
        job = {"arguments": arguments, "folder": str(folder), "out": str(self.out), "err": str(self.err), **options}
        # runpy is importable in any process, unlike a module of the tests.
        self.process = context.Process(target=runpy.run_path, args=(LAUNCH, {"JOB": job}, "__main__"), daemon=True)
        self.process.start()

    def wait(self) -> "Command":
        self.process.join(PATIENCE)
        assert self.process.exitcode is not None, f"stuck: {self.stdout}{self.stderr}"
        return self

    def signal(self, number: int) -> "Command":
        os.kill(self.process.pid, number)
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


@pytest.fixture(scope="session")
def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fedprophet.cli", "sklearn.datasets", "torch._dynamo"])
    return context


@pytest.fixture
def launch(_context: Any, tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """Start `fedprophet ARGUMENTS`; options: folder (where), limit (largest file in bytes), terminal (a device)."""
    commands: list[Command] = []
    logs = tmp_path / "logs"
    logs.mkdir()

    def start(*arguments: object, folder: Path = tmp_path, **options: Any) -> Command:
        commands.append(Command(_context, list(map(str, arguments)), folder, logs / str(len(commands)), **options))
        return commands[-1]

    yield start
    for command in commands:
        command.kill()


@pytest.fixture(scope="session")
def program() -> list[str]:
    """The command that is installed, as a stranger starts it."""
    return [str(Path(sys.executable).with_name("fedprophet"))]


@pytest.fixture(scope="session")
def run_program(program: list[str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the installed command to its end."""

    def run(*arguments: object, folder: Path) -> subprocess.CompletedProcess[str]:
        words = [*program, *map(str, arguments)]
        return subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=PATIENCE, check=False)

    return run
