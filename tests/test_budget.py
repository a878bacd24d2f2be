"""What holds for all tests: one thread for each process, and a budget that a busy machine does not use up."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CONFTEST = Path(__file__).parents[1] / "conftest.py"
TESTS = """
import subprocess, sys, time

def compute(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass

def test_waits():
    compute(0.3)
    time.sleep(0.3)

def test_computes():
    compute(1.2)

def test_lets_another_compute():
    subprocess.run([sys.executable, "-c", "import time\\nwhile time.process_time() < 1.2: pass"])

def test_computes_a_little_longer():
    compute(0.6)
"""


def test_a_process_has_one_thread():
    assert (torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]) == (1, "1")


@pytest.mark.slow
def test_a_budget_is_of_processor_time(tmp_path):
    text, count = re.subn("(?m)^SECONDS = .*$", "SECONDS = 0.5", CONFTEST.read_text())
    text, margins = re.subn("(?m)^MARGIN = .*$", "MARGIN = 2.0", text)
    assert (count, margins) == (1, 1)
    (tmp_path / "conftest.py").write_text(text)
    (tmp_path / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", ".", "-rA", "--budget"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False).stdout
    found = {name: outcome for outcome, name in re.findall(r"(?m)^(PASSED|FAILED) test_it\.py::(\w+)", said)}
    failed = {"test_computes", "test_lets_another_compute"}
    assert {name for name, outcome in found.items() if outcome == "FAILED"} == failed
    assert {name for name, outcome in found.items() if outcome == "PASSED"} == {
        "test_waits",
        "test_computes_a_little_longer",
    }
    assert re.findall(r"PytestWarning: it took [0-9.]+ s", said), "more than the limit, within its margin: it is said"
