"""Whether numbers are finite: each tensor counts, and a device is asked once."""

import math

import pytest
import torch

from fedprophet.finite import all_finite, all_true


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_number_that_is_not_finite_is_found_wherever_it_is(place: int, wrong: float) -> None:
    tensors = [torch.ones(2, 3), torch.tensor([1, 2]), torch.ones(3, dtype=torch.float16), torch.empty(0)]
    assert all_finite(tensors)
    tensors[place] = torch.tensor([1.0, wrong])
    assert not all_finite(iter(tensors))


def test_nothing_is_finite() -> None:
    assert all_finite([])
    assert all_true([])


def test_a_device_answers_once(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = []
    to_bool = torch.Tensor.__bool__
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda tensor: answers.append(tensor) or to_bool(tensor))
    assert all_true([torch.ones(3) > 0] * 5)
    assert len(answers) == 1
