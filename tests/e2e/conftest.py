"""Fixtures that start real processes; see processes.py."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import PATIENCE, Command, forking


@pytest.fixture(scope="session")
def _context() -> Iterator[Any]:
    with forking() as context:
        yield context


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
