"""The coordinate-wise median against hand-computed numbers."""

import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedprophet.server.rules.median import median


def t(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


@pytest.mark.parametrize(("values", "expected"), [((5, 1, 100), 5), ((5, 1, 100, 7), 6), ((3,), 3), ((3, -3, 4), 3)])
def test_median_by_hand(values: tuple[float, ...], expected: float) -> None:
    updates = [(10.0**k, {"w": t(value)}) for k, value in enumerate(values)]
    assert median({"w": t(0.0)}, updates)["w"].item() == expected


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=3, max_size=9))
def test_median_is_that_of_the_library(values: list[float]) -> None:
    found = median({"w": t(0.0)}, [(1.0, {"w": t(value)}) for value in values])["w"].item()
    assert found == pytest.approx(statistics.median(values), rel=1e-6)
