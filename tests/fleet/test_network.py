"""Networks: the table, the clipped draws, and the time of an exchange."""

import numpy as np
import pytest
import torch

from fedprophet.fleet import network
from fedprophet.fleet.network import NETWORKS, Link, Network, communication_time, draw_link, payload_bytes

DRAWS = 7000


@pytest.fixture(scope="module")
def links():
    return [draw_link(4, draw // 100, draw % 100) for draw in range(DRAWS)]


def test_the_seven_networks():
    # upload, download (Mbit/s), latency (ms)
    assert {name: (*n.upload, *n.download, *n.latency) for name, n in NETWORKS.items()} == {
        "DSL": (1, 20, 3, 145, 11, 40),
        "cable": (1, 50, 25, 1000, 13, 27),
        "4G": (1, 30, 9, 60, 30, 50),
        "5G": (24, 58, 501, 635, 4, 10),
        "wifi": (1, 50, 25, 300, 10, 50),
        "fibre": (250, 1000, 30, 5000, 10, 12),
        "satellite": (3, 5, 12, 350, 594, 624),
    }


def test_each_network_is_as_likely(links):
    names = [link.network for link in links]
    # 1000 of 7000 each, within five standard deviations.
    assert all(abs(names.count(name) - 1000) < 5 * np.sqrt(DRAWS * 6 / 49) for name in NETWORKS)


def test_values_stay_in_range_and_pile_up_at_its_ends(links):
    dsl = [link for link in links if link.network == "DSL"]
    upload = np.array([link.upload for link in dsl]) / 1e6
    assert (upload.min(), upload.max()) == (1, 20)
    # Around 10.5 with deviation 4: 20 is 2.375 deviations away, beyond which a normal has 0.88 %.
    assert np.mean(upload == 20) == pytest.approx(0.0088, abs=0.015)
    assert np.median(upload) == pytest.approx(10.5, abs=0.9)
    assert np.mean(np.abs(upload - 10.5) < 4) == pytest.approx(0.683, abs=0.07)
    satellite = np.array([link.latency for link in links if link.network == "satellite"]) * 1e3
    # Around 609 with deviation 124.8 and a range of ±15: the middle 9.6 % are inside, the rest is moved to the ends.
    assert (satellite.min(), satellite.max()) == pytest.approx((594, 624))
    assert np.mean((satellite > 594.001) & (satellite < 623.999)) == pytest.approx(0.096, abs=0.05)
    assert np.mean(satellite <= 594.001) == pytest.approx(0.452, abs=0.08)


def test_units_and_order(monkeypatch):
    monkeypatch.setattr(network, "NETWORKS", {"fixed": Network((2, 2), (30, 30), (400, 400))})
    assert draw_link(0, 0, 0) == Link("fixed", upload=2e6, download=30e6, latency=0.4)


def test_a_draw_is_named_by_seed_round_and_client():
    assert draw_link(1, 2, 3) == draw_link(1, 2, 3)
    assert len({draw_link(*where) for where in ((1, 2, 3), (2, 2, 3), (1, 3, 3), (1, 2, 4), (1, 3, 2))}) == 5


def test_the_time_of_an_exchange():
    # 1 MB down at 8 Mbit/s is 1 s, 2 MB up at 4 Mbit/s are 4 s, and the latency counts twice.
    link = Link("x", upload=4e6, download=8e6, latency=0.25)
    assert communication_time(1_000_000, 2_000_000, link) == pytest.approx(5.5)
    assert communication_time(0, 0, link) == 0.5


def test_payload():
    assert payload_bytes({}) == 0
    assert payload_bytes({"a": torch.zeros(3, 5), "b": torch.zeros(2, dtype=torch.float16)}) == 64
