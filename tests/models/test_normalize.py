"""Input normalisation by hand."""

import pytest
import torch

from fedprophet.errors import ModelError
from fedprophet.models.normalize import Normalize


def test_each_channel_by_its_own_numbers():
    x = torch.tensor([[[[1.0]], [[0.5]]]])
    assert Normalize([0.5, 0.25], [0.25, 2.0])(x).flatten().tolist() == [2.0, 0.125]


def test_it_saves_and_learns_nothing_and_follows_its_input():
    normalize = Normalize([0.5], [0.25])
    assert normalize.state_dict() == {}
    assert list(normalize.parameters()) == []
    assert normalize(torch.ones(1, 1, 1, 1, dtype=torch.float64)).dtype == torch.float64
    assert normalize(torch.ones(1, 1, 1, 1, device="meta")).device.type == "meta"
    assert normalize.mean.device.type == "cpu"


@pytest.mark.parametrize(
    ("mean", "std"), [([0.5], [0.1, 0.2]), ([], []), ([0.0], [0.0]), ([0.0], [-1.0]), ([float("nan")], [1.0])]
)
def test_numbers_that_do_not_fit(mean, std):
    with pytest.raises(ModelError, match="Normalize needs"):
        Normalize(mean, std)
