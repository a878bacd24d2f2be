"""Which console is a terminal."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fedprophet
from fedprophet.console import console_on


@pytest.mark.parametrize("err", [False, True])
@pytest.mark.parametrize("is_terminal", [False, True])
def test_forced_colours_say_nothing_of_terminals(err, is_terminal, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(sys.stderr if err else sys.stdout, "isatty", lambda: is_terminal)
    console = console_on(err)
    assert console.is_terminal is is_terminal
    assert console.stderr is err
    monkeypatch.delenv("FORCE_COLOR")
    assert console_on(err).is_terminal is is_terminal


PRINTS = """
import sys
from fedprophet.console import console_on
sys.stdin.readline()
for _ in range(3):
    console_on(lasting={lasting}).print("nobody reads this")
console_on().print("nor this")
sys.exit(7)
"""


@pytest.mark.parametrize("lasting", [True, False])
def test_work_that_lasts_goes_on_where_nobody_reads(lasting):
    """Standard error is the same pipe, as in `fedprophet train 2>&1 | head`."""
    program = [sys.executable, "-c", PRINTS.format(lasting=lasting)]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        process.stdout.close()
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert process.wait(60) == (7 if lasting else 1)


def test_a_stream_that_was_closed_before_is_no_reason_to_end():
    program = [sys.executable, "-c", PRINTS.replace("console_on().print", "").format(lasting=True)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(program, **pipes, preexec_fn=lambda: os.close(2)) as process:
        process.stdout.close()
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert process.wait(60) == 7


def test_everything_is_printed_on_such_a_console():
    package = Path(fedprophet.__file__).parent
    own = {str(file.relative_to(package)) for file in package.rglob("*.py") if "Console(" in file.read_text("utf-8")}
    assert own == {"console.py"}
