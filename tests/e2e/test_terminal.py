"""What a person sees: a live display in a terminal, plain lines elsewhere, and only JSON where JSON was asked for."""

import errno
import fcntl
import json
import os
import pty
import re
import signal
import struct
import termios
import threading

import pytest

from fedprophet.display.progress import WORK_NAMES

pytestmark = pytest.mark.slow

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A pseudo-terminal of a given width; what is written to it is read all the time."""

    def __init__(self, columns):
        self.ours, self.theirs = pty.openpty()
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        self.name = os.ttyname(self.theirs)
        self._parts = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        try:
            while part := os.read(self.ours, 4096):
                self._parts.append(part)
        except OSError as error:
            if error.errno not in (errno.EIO, errno.EBADF):
                raise

    @property
    def text(self):
        """What was written so far."""
        return b"".join(self._parts).decode(errors="replace")

    def close(self):
        """Return all that was written."""
        os.close(self.theirs)
        self._reader.join(600)
        os.close(self.ours)
        return self.text


@pytest.mark.parametrize("columns", [100, 45])
def test_a_terminal_shows_progress_and_ends_with_the_table(launch, tiny_flags, columns):
    terminal = Terminal(columns)
    command = launch("train", *tiny_flags(), "--out", "run", terminal=terminal.name)
    code = command.code
    raw = terminal.close()
    assert code == 0, raw
    assert "\x1b[" in raw, "nothing is redrawn in place"
    text = ESCAPES.sub("", raw)
    for word in ("round", "module", "eps", "alpha", "loss", "clean", "PGD", "left", "evaluating the trained model"):
        assert word in text
    assert any(f"{work} " in text for work in WORK_NAMES.values()), "which of them is a matter of time"
    assert max(map(len, text.split("\r\n")[-8:])) > 60 or columns < 60, "it uses the width there is"
    assert "Traceback" not in text
    end = text[text.rindex("Modules") :]
    assert "Accuracy of the trained model" in end
    assert end.rstrip().endswith("Files: run\r\nReport: run/report.html")
    assert "at most" not in end, "the display is gone when the table is there"


def test_ctrl_c_in_a_terminal(launch, tiny_flags, tmp_path):
    terminal = Terminal(100)
    command = launch("train", *tiny_flags(), "--out", "run", terminal=terminal.name)
    command.when_lines(tmp_path / "run" / "journal.jsonl", 2).signal(signal.SIGINT)
    code = command.code
    text = ESCAPES.sub("", terminal.close())
    assert code == 130
    assert re.search(
        r"stopped after round \d+; nothing is lost\. Resume it with: fedprophet train --resume run\s*$", text
    )


def test_without_a_terminal_there_is_a_line_for_each_round(launch, tiny_flags):
    command = launch("train", *tiny_flags(), "--out", "run")
    assert command.code == 0
    assert command.stderr == ""
    assert "\x1b" not in command.stdout
    rounds = [line for line in command.stdout.splitlines() if re.match(r"round \d+  module ", line)]
    assert len(rounds) == 9
    assert re.fullmatch(
        r"round 1  module 1/3  of stage 1/3  eps warm-up  loss \d\.\d+  clean \d+\.\d %  PGD \d+\.\d %"
        r"  \(\d+\.\d+ s\)",
        rounds[0],
    )
    assert all(re.search(r"  \(\d+\.\d+ s, at most about \d+:\d\d left\)$", line) for line in rounds[1:])
    assert re.search(r"^- Engine: \w+(, \w+)?\.$", command.stdout, re.MULTILINE)
    assert re.search(r"  eps 0\.\d+  alpha 0\.30  ", rounds[4])
    assert "module 1 fixed at its best round" in command.stdout


def test_json_is_all_there_is_on_standard_output(launch, tiny_flags, tmp_path):
    command = launch("train", *tiny_flags({"rounds": 1, "train.warmup": 0}), "--out", "run", "--json")
    assert command.json == json.loads((tmp_path / "run" / "results.json").read_text())
    assert "round 1  module 1/3" in command.stderr
