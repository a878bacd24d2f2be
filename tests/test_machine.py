"""The clock, the memory and the matrix products of the machine."""

import gc
import os
import subprocess
import sys

import pytest
import torch

from fedprophet import machine


def test_it_says_what_a_reader_needs():
    found = machine.describe()
    assert found["cores"] >= 1
    assert found["memory_bytes"] > 10**8
    assert found["torch"] == torch.__version__
    assert found["date"].endswith(" UTC")
    if not torch.cuda.is_available():
        assert (found["gpu"], found["cuda"], found["triton"]) == (None, None, None)


def test_a_product_is_timed_on_all_cores_and_the_threads_are_put_back():
    before = torch.get_num_threads()
    rate = machine.product_rate("cpu", seconds=0.05, side=256)
    assert 0 < rate < 1e14
    assert torch.get_num_threads() == before


def test_the_rate_is_twice_the_cube_of_the_side_a_second(monkeypatch):
    ticks = iter(range(1, 100))
    monkeypatch.setattr(machine, "now", lambda: float(next(ticks)))
    # The clock is a second further each time that it is read, so a product takes one.
    assert machine.product_rate("cpu", seconds=3, side=100) == 2 * 100**3


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's own peaks")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU's memory counts there")
def test_a_peak_is_forgotten():
    gc.collect()  # what earlier tests have left must not go in the middle
    machine.forget_peak()
    before = machine.peak_bytes()
    block = torch.ones(300 * 2**18)
    assert machine.peak_bytes() > before + 200 * 2**20
    assert machine.resident_bytes() > before + 200 * 2**20
    del block
    assert machine.peak_bytes() > before + 200 * 2**20
    machine.forget_peak()
    assert machine.peak_bytes() < before + 100 * 2**20


def test_without_the_systems_own_account_the_peak_is_that_of_the_processs_life(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "PROC", tmp_path / "none")
    monkeypatch.setattr(machine, "has_gpu", lambda: False)
    machine.forget_peak()
    assert machine.peak_bytes() > 10**7
    assert machine.processor().endswith(" processor")


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's own peaks")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU's memory counts there")
def test_a_workers_peak_counts_beside_ours():
    with subprocess.Popen([sys.executable, "-c", "print(); input()"], stdin=-1, stdout=-1) as other:
        other.stdout.readline()
        machine.forget_peak([other.pid])
        both, own = machine.peak_bytes([other.pid]), machine.peak_bytes()
        other.stdin.close()
    assert 10**6 < both - own < 10**8
