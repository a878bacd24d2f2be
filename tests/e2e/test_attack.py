"""A few trials of each row of `benchmarks/attack.py`: disturbed runs end with the bytes of one left in peace."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
PROGRAM = Path(__file__).parents[2] / "benchmarks" / "attack.py"


@pytest.mark.parametrize(("kind", "trials"), [("plain", 3), ("workers", 3), ("points", 6), ("full", 4), ("signals", 8)])
def test_disturbed_runs_end_as_they_must(tmp_path, kind, trials):
    words = [sys.executable, PROGRAM, "--only", kind, "--trials", str(trials), "--out", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    _, row = (tmp_path / "attack.md").read_text().split("| --- |\n")
    assert row.split(" | ")[1:4:2] == [str(trials), "0"]
