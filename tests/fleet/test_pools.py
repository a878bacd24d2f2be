"""The pools that ship: the paper's tables, number by number, and files that can be copied."""

import pytest

from fedprophet.fleet.device import POOLS, load_pool, pool_text

# Device: TFLOPS, GB, GB/s.
PAPER = {
    "cifar10": {
        "GTX 1650m": (3.1, 4, 16),
        "TX2": (1.3, 4, 1.5),
        "KCU1500": (0.2, 2, 2),
        "VC709": (0.1, 2, 1.5),
        "Radeon HD 6870": (2.7, 1, 16),
        "Quadro M2200": (2.1, 4, 1.5),
        "A12 GPU": (0.5, 4, 1.5),
        "Geforce 750": (1.1, 1, 16),
        "Grid K240q": (2.3, 1, 16),
        "Radeon RX 6300m": (3.7, 2, 16),
    },
    "caltech256": {
        "Radeon RX 7600": (21.8, 8, 16),
        "Radeon RX 6800": (16.2, 16, 16),
        "Arc A770": (19.7, 16, 16),
        "Quadro P5000": (5.3, 16, 1.5),
        "RTX 3080m": (19.0, 8, 16),
        "RTX 4090m": (33.0, 16, 16),
        "A17 GPU": (2.1, 8, 1.5),
        "GTX 1650m": (3.1, 4, 16),
        "TX2": (1.3, 4, 1.5),
        "P104 101": (8.6, 4, 16),
    },
}


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_devices(name):
    pool = load_pool(name)
    assert pool.name == name
    assert [device.name for device in pool.devices] == list(PAPER[name])
    for device in pool.devices:
        performance, memory, bandwidth = PAPER[name][device.name]
        assert device.performance == pytest.approx(performance * 1e12)
        assert device.memory == memory * 10**9
        assert device.bandwidth == pytest.approx(bandwidth * 1e9)


@pytest.mark.parametrize("name", PAPER)
def test_the_header_says_how_to_copy_it(name):
    comments = [line for line in pool_text(name).splitlines() if line.startswith("#")]
    assert "Copy this file" in comments[0]
    assert all(any(word in line for line in comments) for word in ("performance", "memory", "bandwidth", "fleet.pool"))


@pytest.mark.parametrize("name", POOLS)
def test_a_copy_is_the_same_pool(name, tmp_path):
    copy = tmp_path / f"{name}.toml"
    copy.write_text(pool_text(name), encoding="utf-8")
    assert load_pool(copy) == load_pool(name)
    assert pool_text(copy) == pool_text(name)
