"""The budget is real: a process keeps within what it has when it is idle and the budget, by the system's own count."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA counts mappings on Linux alone"),
]
BUDGET = 60 * 10**6
PREDICTED = 53.4e6
"""The first of VGG16's modules for this budget, by its plan; plainly it takes 104 MB (docs/how-to/memory.md)."""
# Every tensor is a mapping of its own that goes back to the system when it is freed: the C library keeps nothing of it.
# One thread and one arena: others would have stacks and arenas of their own.
ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "0",
    "MALLOC_ARENA_MAX": "1",
    "OMP_NUM_THREADS": "1",
}


def _run(way: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(Path(__file__).with_name("limited.py")), way, str(BUDGET)]
    return subprocess.run(command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, check=False)


def test_a_module_is_trained_within_a_real_limit() -> None:
    done = _run("planned")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["plan"] == "attack 32 at a time, step atom by atom in pieces of 16"
    assert told["peak"] == pytest.approx(PREDICTED, rel=0.01)


def test_the_same_training_without_a_plan_dies_of_it() -> None:
    done = _run("plain")
    assert done.returncode != 0
    assert "can't allocate memory" in done.stderr
