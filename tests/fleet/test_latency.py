"""The clock against numbers computed by hand."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedprophet.cascade.atoms import chain_of
from fedprophet.cascade.cost import AtomCost, ChainCost, cost_of
from fedprophet.errors import ConfigError
from fedprophet.fleet.latency import Workload, client_seconds, local_time, workload_of
from fedprophet.fleet.network import Link
from fedprophet.messages.values import Resources
from fedprophet.models import build

# 1000 parameters, 4000 activation elements (so 28,000 bytes to train, 20,000 to attack), 8 samples of 50 elements.
SMALL = Workload(parameters=1000, activations=4000, flops=10_000, input_elements=400, batch=8)
PERFORMANCE, BANDWIDTH = 1e6, 1e5


def device(memory):
    return Resources(memory, PERFORMANCE, BANDWIDTH)


@pytest.fixture(scope="module")
def vgg16():
    with torch.device("meta"):
        return cost_of(chain_of(build("vgg16", (3, 32, 32), 10)), (3, 32, 32), 64, 10)


def test_the_papers_check_value(vgg16):
    time = local_time(workload_of(vgg16), Resources(60_000_000, 1.3e12, 1.5e9), [64] * 30, 10)
    assert time.computation == pytest.approx(10.24, abs=0.01)
    assert time.access == pytest.approx(460.23, abs=0.01)
    assert time.total == pytest.approx(470.47, abs=0.01)
    assert not time.fits


def test_the_check_value_by_hand(vgg16):
    # VGG16: 15,253,578 parameters; the inputs of its weighted layers have 301,663,096 / 4 − 3 · 15,253,578 = 29,655,040
    # elements for a batch of 64, its output 640.
    workload = workload_of(vgg16)
    assert workload == Workload(15_253_578, 29_655_680, 20_166_967_296, 196_608, 64, 3)
    # 33 passes of 2 W each for three batches, 330 for thirty.
    computation = 330 * 2 * 20.166967296e9 / 1.3e12
    # Training holds 4 · (29,655,680 + 3 · 15,253,578) = 301,665,656 bytes: six pieces of 60 MB; its forward pass and an
    # attack step hold 179,637,032: three pieces.
    step = 4 * (2 * 29_655_680 + 4 * 15_253_578 + 2 * 15_253_578) / 1.5e9 + 0.17 * (3 + 6)
    attack = 4 * (2 * 29_655_680 + 4 * 15_253_578) / 1.5e9 + 0.17 * (3 + 3)
    time = local_time(workload, Resources(60_000_000, 1.3e12, 1.5e9), [64] * 30, 10)
    assert time.computation == pytest.approx(computation, rel=1e-12)
    assert time.access == pytest.approx(30 * (step + 10 * attack), rel=1e-12)


def test_what_fits_reads_its_batches_and_once_its_parameters():
    # A batch has 1600 bytes (0.016 s), the parameters 4000 (0.04 s); a pass takes 2 · 10,000 / 10^6 = 0.02 s.
    time = local_time(SMALL, device(28_000), [8, 8, 8], 5)
    assert time.computation == pytest.approx(3 * 6 * 0.02)
    assert time.access == pytest.approx(3 * (0.016 + 0.17) + 0.04)
    assert time.fits


def test_one_byte_less_and_the_training_step_is_swapped_but_not_the_attack():
    # 4 · (2 · 4000 + 4 · 1000 + 2 · 1000) = 56,000 bytes are moved; ⌈20,000 / 27,999⌉ + ⌈28,000 / 27,999⌉ = 3 accesses.
    time = local_time(SMALL, device(27_999), [8, 8], 5)
    assert time.access == pytest.approx(2 * (0.56 + 0.17 * 3))
    assert not time.fits
    assert local_time(SMALL, device(20_000), [8, 8], 5).access == pytest.approx(2 * (0.56 + 0.17 * (1 + 2)))


def test_attack_steps_that_do_not_fit_are_swapped_too():
    # An attack step moves 4 · (2 · 4000 + 4 · 1000) = 48,000 bytes in two pieces, twice.
    time = local_time(SMALL, device(19_999), [8, 8], 5)
    assert time.access == pytest.approx(2 * (0.56 + 0.17 * (2 + 2)) + 2 * 5 * (0.48 + 0.17 * 4))
    assert local_time(SMALL, device(19_999), [8, 8], 0).access == pytest.approx(2 * (0.56 + 0.17 * (2 + 2)))


def test_exact_multiples_are_not_rounded_up():
    # 20,000 bytes are five pieces of 4000, and 28,000 seven.
    time = local_time(SMALL, device(4000), [8], 1)
    assert time.access == pytest.approx(0.56 + 0.17 * (5 + 7) + 0.48 + 0.17 * 10)


@pytest.mark.parametrize(("copies", "moved", "pieces"), [(2, 48_000, 3), (3, 56_000, 3), (4, 64_000, 4)])
def test_the_optimisers_copies(copies, moved, pieces):
    # 4 · (4000 + k · 1000) is 24,000, 28,000 and 32,000 bytes: three or four pieces of 10,000; the forward pass is two.
    workload = dataclasses.replace(SMALL, copies=copies)
    time = local_time(workload, device(10_000), [8], 0)
    assert time.access == pytest.approx(moved / 1e5 + 0.17 * (2 + pieces))


def test_a_smaller_last_batch_scales_what_depends_on_it():
    # Two of eight samples: 1000 activations, 400 bytes of input, 2500 FLOPs; parameters stay.
    time = local_time(SMALL, device(28_000), [8, 8, 2], 1)
    assert time.computation == pytest.approx(2 * (0.02 + 0.02 + 0.005))
    assert time.access == pytest.approx(0.016 + 0.016 + 0.004 + 3 * 0.17 + 0.04)
    # Swapped: 4 · (1000 + 1000) = 8000 and 4 · (1000 + 3000) = 16,000 bytes in pieces of 7000; 4 · (2000 + 6000) moved.
    small = local_time(SMALL, device(7000), [2], 0)
    assert small.access == pytest.approx(0.32 + 0.17 * (2 + 3))


def test_where_only_the_smaller_batch_fits():
    # 16,000 bytes hold the batch of two, which reads itself and the parameters, but not that of eight.
    full, small = local_time(SMALL, device(16_000), [8], 0), local_time(SMALL, device(16_000), [2], 0)
    both = local_time(SMALL, device(16_000), [8, 2, 8, 2], 0)
    assert (full.fits, small.fits, both.fits) == (False, True, False)
    assert small.access == pytest.approx(0.004 + 0.17 + 0.04)
    assert both.access == pytest.approx(2 * full.access + 2 * (0.004 + 0.17) + 0.04)


def test_no_batches_cost_nothing():
    assert dataclasses.astuple(local_time(SMALL, device(1), [], 10)) == (0.0, 0.0, True)


@given(
    memory=st.integers(1, 10**8),
    sizes=st.lists(st.integers(1, 64), min_size=1, max_size=6),
    steps=st.integers(0, 20),
    parameters=st.integers(1, 10**6),
    per_sample=st.integers(1, 10**4),
    copies=st.sampled_from([2, 3, 4]),
)
def test_the_formula_of_the_paper_batch_by_batch(memory, sizes, steps, parameters, per_sample, copies):
    workload = Workload(parameters, 64 * per_sample, 64 * 7, 64 * 3, 64, copies)
    p, b, access, fitted = 1e3, 1e4, 0.0, False
    for size in sizes:
        f, k = per_sample * size, copies
        if 4 * (f + k * parameters) <= memory:
            access += 4 * 3 * size / b + 0.17
            fitted = True
        else:
            first, second = math.ceil(4 * (f + parameters) / memory), math.ceil(4 * (f + k * parameters) / memory)
            access += 4 * (2 * f + 4 * parameters + 2 * (k - 2) * parameters) / b + 0.17 * (first + second)
        if 4 * (f + parameters) > memory:
            access += steps * (4 * (2 * f + 4 * parameters) / b + 0.17 * 2 * math.ceil(4 * (f + parameters) / memory))
    access += 4 * parameters / b if fitted else 0.0
    time = local_time(workload, Resources(memory, p, b), sizes, steps)
    assert time.access == pytest.approx(access, rel=1e-9)
    assert time.computation == pytest.approx(sum((1 + steps) * 2 * 7 * size / p for size in sizes), rel=1e-9)


def test_workloads_are_those_of_the_atoms_without_a_head():
    atoms = (
        AtomCost("a", (), parameters=10, activations=200, flops=1000, output=(2, 3, 4, 4)),
        AtomCost("b", (), parameters=20, activations=300, flops=2000, output=(2, 5)),
        AtomCost("c", (), parameters=40, activations=400, flops=4000, output=(2, 7)),
    )
    cost = ChainCost(atoms, (2, 1, 8, 8), batch=2, classes=7, copies=4)
    assert workload_of(cost) == Workload(70, 900 + 14, 7000, 128, 2, 4)
    assert workload_of(cost, 0, 1) == Workload(10, 200 + 96, 1000, 128, 2, 4)
    assert workload_of(cost, 1, 2) == Workload(20, 300 + 10, 2000, 96, 2, 4)
    assert workload_of(cost, 1) == Workload(60, 700 + 14, 6000, 96, 2, 4)
    for first, last in ((1, 1), (2, 1), (-1, 2), (0, 4)):
        with pytest.raises(ValueError, match="no part of a chain of 3"):
            workload_of(cost, first, last)


def test_a_module_that_fits_its_budget_never_swaps(vgg16):
    # Conv 1 and 2: 4 · (3 · 38,976 + 12,779,520 + the output's 1,048,576) bytes.
    workload = workload_of(vgg16, 0, 2)
    assert workload.training_bytes(64) == 55_780_096
    assert local_time(workload, Resources(60_000_000, 1e12, 1e9), [64] * 30, 10).fits


def test_what_the_journal_keeps():
    link = Link("x", upload=1e6, download=4e6, latency=0.05)
    seconds = client_seconds(SMALL, device(27_999), [8, 8], 5, link, download_bytes=8000, upload_bytes=4000)
    assert seconds == pytest.approx(
        {"computation_s": 2 * 6 * 0.02, "access_s": 2 * (0.56 + 0.51), "communication_s": 0.016 + 0.032 + 0.1}
    )


@pytest.mark.parametrize(
    ("resources", "message"),
    [
        (Resources(0, 1.0, 1.0), "available memory of a device must be positive, not 0"),
        (Resources(-5, 1.0, 1.0), "memory .* not -5"),
        (Resources(1, 0.0, 1.0), "performance .* not 0.0"),
        (Resources(1, math.nan, 1.0), "performance .* not nan"),
        (Resources(1, 1.0, -1.0), "bandwidth .* not -1.0"),
        (Resources(1, 1.0, math.inf), "bandwidth .* not inf"),
    ],
)
def test_impossible_devices(resources, message):
    with pytest.raises(ConfigError, match=message):
        local_time(SMALL, resources, [8], 1)


def test_impossible_training():
    with pytest.raises(ConfigError, match="at least one sample, not 0"):
        local_time(SMALL, device(1), [8, 0], 1)
    with pytest.raises(ConfigError, match="attack steps must be at least 0, not -1"):
        local_time(SMALL, device(1), [8], -1)
