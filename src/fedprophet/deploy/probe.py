"""This machine's available resources: memory, a measured FLOP rate, and the speed of its storage.

Available memory is the least of the machine's and, for each control group of this process, the limit minus what is used
and cannot be reclaimed. It is read each time. The two rates are measured once and kept in the node's home with facts
about the machine; on another machine they are measured again.
"""

import math
import os
import platform
import statistics
import time
from collections.abc import Iterator
from contextlib import suppress
from io import FileIO
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.nn import functional as F

from fedprophet import machine
from fedprophet.messages.values import Resources
from fedprophet.randomness import generator
from fedprophet.storage.files import make_folder, parse_json, write_error, write_json
from fedprophet.threads import torch_threads

RECORD = "machine.json"
VERSION = 1
"""Of the measurement: rates of another version are measured again."""
WARM_UP, REPEATS, SECONDS = 2, 9, 1.0
"""Convolutions that are not timed, most that are, and most seconds."""
CHANNELS, SIDE, BATCH = 64, 16, 4
CHUNK, CHUNKS, STORAGE_SECONDS = 4 << 20, 8, 0.7
ADVICE = "Free some space there or give the node another home"


def machine_resources(home: Path, *, refresh: bool = False, threads: int = 1) -> Resources:
    """Return the available resources; `home` keeps the measured rates, `refresh` measures them again."""
    facts = _facts(threads)
    rates = None if refresh else _recall(home / RECORD, facts)
    if rates is None:
        rates = {"performance": flop_rate(threads), "bandwidth": storage_rate(home)}
        write_json(home / RECORD, {"facts": facts, "rates": rates}, ADVICE)
    return Resources(available_memory(), **rates)


def _facts(threads: int) -> dict[str, Any]:
    return {
        "probe": VERSION,
        "machine": platform.machine(),
        "processor": machine.processor(),
        "cores": os.cpu_count(),
        "threads": threads,
        "torch": torch.__version__,
    }


def _recall(record: Path, facts: dict[str, Any]) -> dict[str, float] | None:
    """Return the rates measured on this machine; None if there are none or the file is damaged."""
    try:
        table = parse_json(record.read_bytes())
        rates = {name: table["rates"][name] for name in ("performance", "bandwidth")}
        sound = table["facts"] == facts and all(type(rate) is float and 0 < rate < math.inf for rate in rates.values())
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return rates if sound else None


# Rates ---------------------------------------------------------------------------------------------------------------


def flop_rate(threads: int = 1, seconds: float = SECONDS) -> float:
    """Return the median FLOP/s of a convolution, forward and backward."""
    draw = generator(0, "flop rate")
    x = torch.randn(BATCH, CHANNELS, SIDE, SIDE, generator=draw).requires_grad_()
    weight = torch.randn(CHANNELS, CHANNELS, 3, 3, generator=draw).requires_grad_()
    # Two operations per product; the backward pass takes as many for the input and for the weight.
    flops = 3 * 2 * BATCH * CHANNELS * CHANNELS * 9 * SIDE * SIDE
    rates: list[float] = []
    with torch_threads(threads):
        end = time.perf_counter() + seconds
        for repeat in range(WARM_UP + REPEATS):
            began = time.perf_counter()
            F.conv2d(x, weight, padding=1).sum().backward()  # type: ignore[no-untyped-call]
            now = time.perf_counter()
            rates.append(flops / (now - began))
            if repeat >= WARM_UP and now >= end:
                break
    return statistics.median(rates[WARM_UP:])


def storage_rate(folder: Path, seconds: float = STORAGE_SECONDS) -> float:
    """Return bytes/s of writing a file to the disk and reading it back; the file is removed."""
    path = folder / f".storage-rate-{os.getpid()}.tmp"
    try:
        make_folder(folder)
        with path.open("w+b", buffering=0) as file:
            began = time.perf_counter()
            size = _fill(file, began + seconds)
            if hasattr(os, "posix_fadvise"):  # otherwise it would be read from the page cache
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            while file.read(CHUNK):
                pass
            return 2 * size / (time.perf_counter() - began)
    except OSError as error:
        raise write_error(path, error, ADVICE) from error
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _fill(file: FileIO, end: float) -> int:
    """Write chunks to the disk, at least one, until the file is large enough or the time is up."""
    data = os.urandom(CHUNK)  # a file system could compress zeros
    size = 0
    while size == 0 or (size < CHUNKS * CHUNK and time.perf_counter() < end):
        size += file.write(data)
        os.fsync(file.fileno())
    return size


# Memory --------------------------------------------------------------------------------------------------------------


CONTROL_GROUPS = {
    "cgroup2": ("memory.max", "memory.current", "inactive_file"),
    "cgroup": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""By file system (version 2 and version 1): the files of limit and usage, and the field of memory.stat that can be
reclaimed, which is page cache that was not used recently."""


def available_memory(root: Path = Path("/")) -> int:
    """Return the bytes that this process may still use; `root` is where /proc and /sys are."""
    return max(0, min([_machine_memory(root), *_group_memory(root)]))


def _machine_memory(root: Path) -> int:
    """Return the machine's available memory; its total memory if the system does not tell."""
    for line in _lines(root / "proc/meminfo"):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return 1024 * int(value.split()[0])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _group_memory(root: Path) -> Iterator[int]:
    """Yield what is left in each control group of this process, from the innermost to the outermost that is visible."""
    paths = dict(_memberships(root))
    for kind, top, mount in _mounts(root):
        inside = paths.get(kind, "/")
        # In a container the mount may start below the root of the path: what is above is not visible.
        below = PurePosixPath(inside).relative_to(top) if PurePosixPath(inside).is_relative_to(top) else "."
        group = root / mount.lstrip("/") / below
        for folder in (group, *group.parents):
            yield from _left(folder, *CONTROL_GROUPS[kind])
            if folder == root / mount.lstrip("/"):
                break


def _memberships(root: Path) -> Iterator[tuple[str, str]]:
    """Yield the file system and this process's path of control groups for memory."""
    for line in _lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            yield "cgroup2", path
        elif "memory" in controllers.split(","):
            yield "cgroup", path


def _mounts(root: Path) -> Iterator[tuple[str, str, str]]:
    """Yield file system, root and mount point of control groups for memory."""
    for line in _lines(root / "proc/self/mountinfo"):
        before, separator, after = line.partition(" - ")
        place, kind = before.split(" "), after.split(" ")
        if separator and (kind[0] == "cgroup2" or (kind[0] == "cgroup" and "memory" in kind[-1].split(","))):
            yield kind[0], place[3], place[4]


def _left(folder: Path, limit_file: str, usage_file: str, reclaimable: str) -> Iterator[int]:
    """Yield a group's limit minus what is used and cannot be reclaimed; nothing if it has no limit."""
    limit = "".join(_lines(folder / limit_file)).strip()
    if not limit.isdigit():
        return
    usage = "".join(_lines(folder / usage_file)).strip()
    statistic = dict(line.partition(" ")[::2] for line in _lines(folder / "memory.stat"))
    used = int(usage) if usage.isdigit() else 0
    yield int(limit) - max(0, used - int(statistic.get(reclaimable, "0")))


def _lines(path: Path) -> list[str]:
    """Return a file's lines; none if the system has no such file."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
