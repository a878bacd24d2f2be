"""What a reader must know of a measurement: the command, the day, the hardware and the versions."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

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


def measured(command: str) -> str:
    """Return one sentence for the head of a table of results; the runs behind it use one thread each."""
    return (
        f"`{command}` on {datetime.now(UTC):%Y-%m-%d}: {processor()}, {os.cpu_count()} cores, one thread per run; "
        f"Python {platform.python_version()}, torch {torch.__version__}, fedprophet {fedprophet.__version__}."
    )


def commit() -> str:
    """Return the commit of these programs' repository; nothing outside of one."""
    words = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
