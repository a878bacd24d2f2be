"""The coordinate-wise trimmed mean against hand-computed numbers."""

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedprophet.server.rules.trimmed_mean import TrimmedMeanSettings, trimmed_mean

NAN = math.nan


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def test_trimmed_mean_by_hand() -> None:
    """Of five values the smallest and the largest are left out, coordinate by coordinate; weights do not count."""
    sent = [t(1, -50), t(2, 1), t(3, 2), t(100, 3), t(4, 4)]
    new = trimmed_mean({"w": t(0, 0)}, [(10.0**k, {"w": value}) for k, value in enumerate(sent)], TrimmedMeanSettings())
    assert new["w"].tolist() == [3, 2]


def test_trimmed_mean_is_over_those_who_sent_a_parameter() -> None:
    """Of nine who sent w two are left out at each end, of four who sent v one."""
    updates = [(1.0, {"w": t(k)} | ({"v": t(10.0 * k)} if k < 4 else {})) for k in range(9)]
    new = trimmed_mean({"w": t(0.0), "v": t(0.0), "u": t(5.0)}, updates, TrimmedMeanSettings())
    assert new["w"].item() == 4
    assert new["v"].item() == 15
    assert new["u"].item() == 5


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=3, max_size=12), st.sampled_from([0.0, 0.1, 0.25, 0.4, 0.49]))
def test_trimmed_mean_is_a_mean_of_what_is_left(values: list[float], trim: float) -> None:
    settings = TrimmedMeanSettings(trim=trim)
    found = trimmed_mean({"w": t(0.0)}, [(1.0, {"w": t(value)}) for value in values], settings)["w"].item()
    cut = min(-(-round(trim * 100) * len(values) // 100), (len(values) - 1) // 2)
    left = sorted(values)[cut : len(values) - cut]
    assert found == pytest.approx(statistics.fmean(left), rel=1e-5, abs=1e-6)


def test_holes_are_counted_coordinate_by_coordinate() -> None:
    """Five have the first channel and three the second: one is left out at each end of both."""
    sent = [t(1, 20), t(2, NAN), t(3, NAN), t(4, 25), t(500, 30)]
    new = trimmed_mean({"w": t(0, 0)}, [(1.0, {"w": value}) for value in sent], TrimmedMeanSettings())
    assert new["w"].tolist() == [3, 25]
