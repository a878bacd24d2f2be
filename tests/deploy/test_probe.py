"""What a machine can spare, read from made-up /proc and /sys trees, and measured on this one."""

import json

import pytest
import torch

from fedprophet.deploy import probe
from fedprophet.deploy.probe import available_memory, flop_rate, machine_resources, storage_rate
from fedprophet.errors import CheckpointError
from fedprophet.messages.values import Resources

MB = 10**6
V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n"
    "34 31 0:31 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
)


@pytest.fixture
def machine(tmp_path):
    """Return a function that writes files of a machine with 8 GB, 4 GB of it available, and reads its memory."""

    def make(**files):
        texts = {"proc/meminfo": "MemTotal:  7812500 kB\nMemFree: 10 kB\nMemAvailable:   3906250 kB\n", **files}
        for name, text in texts.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(str(text))
        return available_memory(tmp_path)

    return make


def group(folder, limit, usage, inactive=0):
    """A group of version 2."""
    at = f"sys/fs/cgroup/{folder}".rstrip("/")
    stat = f"anon 5\nfile 9\ninactive_file {inactive}\n"
    return {f"{at}/memory.max": limit, f"{at}/memory.current": usage, f"{at}/memory.stat": stat}


def old_group(folder, limit, usage, inactive=0):
    """A group of version 1."""
    at = f"sys/fs/cgroup/memory/{folder}".rstrip("/")
    files = {
        "limit_in_bytes": limit,
        "usage_in_bytes": usage,
        "stat": f"inactive_file 1\ntotal_inactive_file {inactive}\n",
    }
    return {f"{at}/memory.{name}": text for name, text in files.items()}


def test_without_control_groups_it_is_what_the_machine_has_available(machine):
    assert machine() == 4000 * MB


def test_a_limit_counts_less_what_is_used_and_cannot_be_given_back(machine):
    files = {"proc/self/cgroup": "0::/user/job\n", "proc/self/mountinfo": V2}
    # 1000 MB of which 300 are used, 100 of these page cache that can go: 1000 − (300 − 100) = 800.
    assert machine(**files, **group("user/job", 1000 * MB, 300 * MB, 100 * MB)) == 800 * MB


def test_the_tightest_of_all_groups_above_counts(machine):
    files = {"proc/self/cgroup": "0::/user/job\n", "proc/self/mountinfo": V2}
    files |= group("user/job", "max", 300 * MB) | group("user", 2000 * MB, 1500 * MB) | group("", 9000 * MB, 0)
    assert machine(**files) == 500 * MB


def test_a_limit_above_the_machine_changes_nothing(machine):
    files = {"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": V2}
    assert machine(**files, **group("", 64_000 * MB, 10 * MB)) == 4000 * MB


def test_an_exceeded_group_has_nothing_left(machine):
    files = {"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": V2}
    assert machine(**files, **group("", 100 * MB, 150 * MB)) == 0


def test_version_1_and_its_unlimited_root(machine):
    files = {"proc/self/cgroup": "5:cpu,cpuacct:/\n4:memory:/job\n0::/elsewhere\n", "proc/self/mountinfo": V1}
    files |= old_group("", 9223372036854771712, 9000 * MB) | old_group("job", 700 * MB, 300 * MB, 50 * MB)
    assert machine(**files) == 450 * MB


def test_in_a_container_whose_mount_begins_at_its_own_group(machine):
    mount = V2.replace("0:26 / /sys", "0:26 /docker/abc /sys")
    files = {"proc/self/cgroup": "0::/docker/abc/inner\n", "proc/self/mountinfo": mount}
    files |= group("inner", 600 * MB, 100 * MB) | group("", 900 * MB, 200 * MB)
    assert machine(**files) == 500 * MB


def test_a_path_that_cannot_be_seen_from_here_leaves_the_mount(machine):
    mount = V2.replace("0:26 / /sys", "0:26 /docker/ab /sys")
    files = {"proc/self/cgroup": "0::/docker/abc\n", "proc/self/mountinfo": mount}
    assert machine(**files, **group("", 900 * MB, 200 * MB)) == 700 * MB


def test_the_real_machine_has_some_memory():
    assert 0 < available_memory() < 2**60


def test_the_flop_rate_counts_forward_and_backward(monkeypatch):
    # A clock that ticks a second at every look: each repeat takes one, so the rate is the FLOPs of one repeat.
    ticks = iter(range(10_000))
    monkeypatch.setattr(probe.time, "perf_counter", lambda: float(next(ticks)))
    # 4 images of 16 x 16, 64 channels in and out, 3 x 3: 2 · 4 · 64 · 64 · 9 · 256 = 75.5 MFLOP, three times.
    assert flop_rate(seconds=100) == 3 * 75_497_472


def test_a_real_flop_rate_leaves_the_threads_alone():
    before = torch.get_num_threads()
    assert 0 < flop_rate(1) < 1e13
    assert torch.get_num_threads() == before


def test_storage_is_measured_both_ways_and_nothing_is_left(tmp_path, monkeypatch):
    ticks = iter(range(100))
    monkeypatch.setattr(probe.time, "perf_counter", lambda: float(next(ticks)))
    # Looks: the start (0), after each chunk (1, 2, 3: the end), and once more (4): 3 chunks, both ways, in 4 s.
    assert storage_rate(tmp_path / "home", seconds=3) == 2 * 3 * probe.CHUNK / 4
    assert list((tmp_path / "home").iterdir()) == []


def test_storage_that_cannot_be_written_is_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot write .*another home"):
        storage_rate(tmp_path / "file")


@pytest.fixture
def measured(monkeypatch):
    """Count measurements: the n-th gives n GFLOP/s and n MB/s."""
    calls = []

    def rate(*_):
        calls.append(1)
        return 1e9 * len(calls)

    monkeypatch.setattr(probe, "flop_rate", rate)
    monkeypatch.setattr(probe, "storage_rate", lambda _: 1e6 * len(calls))
    monkeypatch.setattr(probe, "available_memory", lambda: 123)
    return calls


def test_rates_are_measured_once_and_kept(tmp_path, measured):
    first = machine_resources(tmp_path / "home")
    assert first == Resources(123, 1e9, 1e6)
    assert machine_resources(tmp_path / "home") == first
    assert len(measured) == 1
    assert machine_resources(tmp_path / "home", refresh=True) == Resources(123, 2e9, 2e6)
    assert machine_resources(tmp_path / "home") == Resources(123, 2e9, 2e6)


def test_another_machine_or_another_use_of_it_is_measured_again(tmp_path, measured, monkeypatch):
    machine_resources(tmp_path)
    assert machine_resources(tmp_path, threads=2).performance == 2e9
    monkeypatch.setattr("fedprophet.machine.processor", lambda: "another one")
    assert machine_resources(tmp_path, threads=2).performance == 3e9


def test_memory_is_read_anew(tmp_path, measured, monkeypatch):
    machine_resources(tmp_path)
    monkeypatch.setattr(probe, "available_memory", lambda: 77)
    assert machine_resources(tmp_path) == Resources(77, 1e9, 1e6)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:20],
        lambda text: "[]",
        lambda text: text.replace('"performance": 1000000000.0', '"performance": "fast"'),
        lambda text: text.replace('"performance": 1000000000.0', '"performance": -1.0'),
        lambda text: text.replace('"performance": 1000000000.0', '"performance": NaN'),
        lambda text: text.replace('"bandwidth"', '"speed"'),
    ],
)
def test_a_damaged_record_is_measured_again(tmp_path, measured, damage):
    machine_resources(tmp_path)
    record = tmp_path / probe.RECORD
    changed = damage(record.read_text())
    assert changed != record.read_text()
    record.write_text(changed)
    assert machine_resources(tmp_path).performance == 2e9
    assert json.loads(record.read_text())["rates"] == {"performance": 2e9, "bandwidth": 2e6}
