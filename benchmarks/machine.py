"""What a reader must know of a measurement: the command, the day, the hardware and the versions."""

import os
import platform
from datetime import UTC, datetime
from pathlib import Path

import torch

import fedprophet


def measured(command: str) -> str:
    """Return one sentence for the head of a table of results; the runs behind it use one thread each."""
    return (
        f"`{command}` on {datetime.now(UTC):%Y-%m-%d}: {processor()}, {os.cpu_count()} cores, one thread a run; "
        f"Python {platform.python_version()}, torch {torch.__version__}, fedprophet {fedprophet.__version__}."
    )


def processor() -> str:
    """Return the name of the processor where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} processor"
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else f"{platform.machine()} processor"
