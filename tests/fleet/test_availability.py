import numpy as np
import pytest

from fedprophet.errors import ConfigError
from fedprophet.fleet.availability import FleetSettings, device_probabilities, draw_device
from fedprophet.fleet.device import Device, Pool

DEVICE = Device("a", 1e9, 1_000_000, 5e6)
POOL = Pool("p", "", (Device("weak", 1.0, 10, 1.0), Device("middle", 2.0, 20, 1.0), Device("strong", 10.0, 100, 1.0)))
DRAWS = 3000


def many(how: FleetSettings, minimum: int = 0):
    return [how.resources(DEVICE, 3, draw // 50, draw % 50, minimum) for draw in range(DRAWS)]


def test_memory_is_uniform_up_to_a_fifth():
    memory = np.array([free.memory for free in many(FleetSettings())])
    assert memory.min() >= 0
    assert memory.max() <= 200_000
    # U[0, 0.2]: quartiles at 5, 10 and 15 %, each met within five standard errors (at most 0.5 / √3000 · 5 ≈ 4.6 %).
    assert np.quantile(memory, [0.25, 0.5, 0.75]) == pytest.approx([50_000, 100_000, 150_000], abs=9_200)


def test_memory_is_never_below_the_minimum():
    memory = np.array([free.memory for free in many(FleetSettings(), 120_000)])
    assert memory.min() == 120_000
    assert np.mean(memory == 120_000) == pytest.approx(0.6, abs=0.05)
    assert memory.max() > 190_000
    assert FleetSettings().resources(DEVICE, 0, 0, 0, 5_000_000).memory == 5_000_000


@pytest.mark.parametrize("floor", [0.05, 0.5])
def test_uniform_performance(floor):
    shares = np.array([free.performance for free in many(FleetSettings(performance_floor=floor))]) / 1e9
    assert shares.min() >= floor
    assert shares.max() <= 1
    assert shares.min() < floor + 0.01
    assert shares.mean() == pytest.approx((1 + floor) / 2, abs=0.03)


def test_co_running_apps():
    shares = np.array([free.performance for free in many(FleetSettings(performance="apps"))]) / 1e9
    values, counts = np.unique(shares.round(6), return_counts=True)
    assert values.tolist() == [0.167, 0.231, 0.459, 0.524, 0.735, 1.0]
    # 500 of 3000 each, within five standard deviations.
    assert np.all(np.abs(counts - 500) < 5 * np.sqrt(3000 * 5 / 36))


def test_memory_and_performance_are_independent():
    free = many(FleetSettings())
    assert abs(np.corrcoef([s.memory for s in free], [s.performance for s in free])[0, 1]) < 0.1


def test_bandwidth_and_types():
    free = FleetSettings(performance="apps").resources(DEVICE, 0, 0, 0, 0)
    assert free.bandwidth == 5e6
    assert type(free.memory) is int
    assert type(free.performance) is float


def test_a_draw_is_named_by_seed_round_and_client():
    how = FleetSettings()
    base = how.resources(DEVICE, 1, 2, 3, 0)
    assert how.resources(DEVICE, 1, 2, 3, 0) == base
    others = [how.resources(DEVICE, *where, 0) for where in ((2, 2, 3), (1, 3, 3), (1, 2, 4), (1, 3, 2))]
    assert len({free.memory for free in (base, *others)}) == 5
    # The minimum changes nothing but itself.
    assert how.resources(DEVICE, 1, 2, 3, 10**6).performance == base.performance


def test_device_probabilities_by_hand():
    # performance · memory is 10, 40 and 1000.
    assert device_probabilities(POOL) == pytest.approx([1 / 3] * 3)
    assert device_probabilities(POOL, -1.0) == pytest.approx(np.array([100, 25, 1]) / 126)
    assert device_probabilities(POOL, 1.0) == pytest.approx(np.array([10, 40, 1000]) / 1050)
    assert device_probabilities(POOL, -1e6) == pytest.approx([1, 0, 0])
    with pytest.raises(ConfigError, match=r"exponent .* finite number, not nan"):
        device_probabilities(POOL, float("nan"))


# 10^-1/2, 40^-1/2 and 1000^-1/2 are 0.3162, 0.1581 and 0.0316: as 10 to 5 to 1.
@pytest.mark.parametrize(("exponent", "expected"), [(0.0, [1 / 3] * 3), (-0.5, [0.625, 0.3125, 0.0625])])
def test_devices_are_drawn_by_their_probability(exponent, expected):
    names = [draw_device(POOL, 0, client, exponent).name for client in range(DRAWS)]
    found = [names.count(device.name) / DRAWS for device in POOL.devices]
    assert found == pytest.approx(expected, abs=0.045)


def test_a_client_keeps_its_device():
    assert [draw_device(POOL, 5, k) for k in range(30)] == [draw_device(POOL, 5, k) for k in reversed(range(30))][::-1]
    assert [draw_device(POOL, 5, k) for k in range(30)] != [draw_device(POOL, 6, k) for k in range(30)]
