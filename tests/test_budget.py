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
    compute(0.7)

def test_lets_another_compute():
    subprocess.run([sys.executable, "-c", "import time\\nwhile time.process_time() < 0.7: pass"])
"""


def test_a_process_has_one_thread():
    assert (torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]) == (1, "1")


@pytest.mark.slow
def test_a_budget_is_of_processor_time(tmp_path):
    text, count = re.subn("(?m)^SECONDS = .*$", "SECONDS = 0.5", CONFTEST.read_text())
    assert count == 1
    (tmp_path / "conftest.py").write_text(text)
    (tmp_path / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", ".", "-rA", "--budget"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False).stdout
    found = {name: outcome for outcome, name in re.findall(r"(?m)^(PASSED|FAILED) test_it\.py::(\w+)", said)}
    assert found == {"test_waits": "PASSED", "test_computes": "FAILED", "test_lets_another_compute": "FAILED"}
