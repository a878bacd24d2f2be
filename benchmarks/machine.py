"""What programs that measure share: what a reader must know of a measurement, and how runs are played and written."""

import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import fedprophet
from fedprophet.machine import processor

PAPER = [
    "norm.layers=local",
    "norm.refresh=none",
    "train.calibration=none",
    "train.iterations=12",
    "perturbation.start=0.5",
]
"""The digits preset with norm layers and labels as in the paper, and all else that the preset had otherwise when the
first results were measured: these stay what their commands give."""


def measured(program: str) -> str:
    """Return one sentence for the head of a program's results: how it was started, when, and on what.

    The runs behind them use one thread each.
    """
    command = shlex.join(["python", f"benchmarks/{program}.py", *sys.argv[1:]])
    return (
        f"`{command}` on {datetime.now(UTC):%Y-%m-%d}: {processor()}, {os.cpu_count()} cores, one thread per run; "
        f"Python {platform.python_version()}, torch {torch.__version__}, fedprophet {fedprophet.__version__}."
    )


def played(run: Callable[..., dict[str, Any]], jobs: Iterable[Sequence[Any]], workers: int) -> list[dict[str, Any]]:
    """Run jobs side by side; print each one's row when it is there, and return all of them."""
    rows = []
    with ProcessPoolExecutor(workers) as pool:
        for row in pool.map(run, *zip(*jobs, strict=True)):
            print(json.dumps(row), flush=True)
            rows.append(row)
    return rows


def written(program: str, text: str, rows: Sequence[dict[str, Any]], out: Path | None) -> None:
    """Print a page of results; with a folder also write it there, and the rows that it is made of."""
    print(text)
    if out:
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{program}.md").write_text(text)
        (out / f"{program}.json").write_text(json.dumps(rows, indent=2) + "\n")


def spread(values: Sequence[float]) -> str:
    """Return the mean with one decimal, ± the standard deviation where there are several values."""
    deviation = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{deviation}"


def commit() -> str:
    """Return the commit of these programs' repository; nothing outside of one."""
    words = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
