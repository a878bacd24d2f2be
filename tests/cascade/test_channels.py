"""Which channels a sub-network keeps."""

from functools import partial

import pytest
import torch

from fedprophet.cascade.channels import (
    Channels,
    first_channels,
    kept_channels,
    kept_count,
    random_channels,
    rolling_channels,
)
from fedprophet.errors import ConfigError


@pytest.mark.parametrize(
    ("r", "width", "count"),
    [(1.0, 7, 7), (0.5, 7, 3), (0.5, 8, 4), (0.999, 8, 7), (0.25, 3, 1), (1e-9, 512, 1), (0.5, 1, 1), (1, 4, 4)],
)
def test_count(r, width, count):
    assert kept_count(r, width) == count


@pytest.mark.parametrize("r", [0.0, -0.5, 1.01, float("nan"), float("inf")])
def test_bad_width_fraction(r):
    with pytest.raises(ConfigError, match="above 0 and at most 1"):
        kept_count(r, 4)


def test_first_and_rolling_channels():
    assert first_channels(5, 2).tolist() == [0, 1]
    assert rolling_channels(5, 3, 1).tolist() == [1, 2, 3]
    assert rolling_channels(5, 3, 3).tolist() == [0, 3, 4]
    assert rolling_channels(5, 3, 14).tolist() == [0, 1, 4]  # starts at 14 mod 5 = 4
    assert rolling_channels(5, 5, 2).tolist() == [0, 1, 2, 3, 4]
    # Over `width` rounds each channel has its turn equally often.
    turns = torch.cat([rolling_channels(5, 3, start) for start in range(100, 105)])
    assert turns.bincount(minlength=5).tolist() == [3] * 5


def test_random_channels():
    draw = partial(random_channels, 10, 4)
    one, other = draw(torch.Generator().manual_seed(1)), draw(torch.Generator().manual_seed(2))
    assert torch.equal(one, draw(torch.Generator().manual_seed(1)))
    assert not torch.equal(one, other)
    generator = torch.Generator().manual_seed(0)
    draws = [draw(generator) for _ in range(500)]
    assert all(torch.equal(kept, kept.unique()) and len(kept) == 4 for kept in draws)  # sorted, each once
    counts = torch.cat(draws).bincount(minlength=10)
    assert counts.min() > 150  # 200 expected, standard deviation 11
    assert counts.max() < 250


def test_kept_channels_of_each_group():
    channels = Channels({"a": 4, "b": 3, "c": 1}, {})
    kept = kept_channels(channels, 0.5, partial(rolling_channels, start=2))
    assert {group: indices.tolist() for group, indices in kept.items()} == {"a": [2, 3], "b": [2], "c": [0]}
    assert all(indices.dtype == torch.int64 for indices in kept.values())
    whole = kept_channels(channels, 1.0, partial(random_channels, generator=torch.Generator()))
    assert {group: indices.tolist() for group, indices in whole.items()} == {
        "a": [0, 1, 2, 3],
        "b": [0, 1, 2],
        "c": [0],
    }
    tiny = kept_channels(channels, 1e-6, first_channels)
    assert {len(indices) for indices in tiny.values()} == {1}
