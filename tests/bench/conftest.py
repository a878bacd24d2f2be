"""A benchmark of seconds: the tiny run on random images of digits' shape."""

import pytest

from fedprophet.bench.rounds import RoundsSettings, dataset_of


@pytest.fixture
def settings(tiny_flags):
    overrides = tuple(text for text in tiny_flags() if text != "--set")
    return RoundsSettings("digits", overrides, repeat=2, limit=60.0)


@pytest.fixture
def dataset(settings):
    return dataset_of(settings)
