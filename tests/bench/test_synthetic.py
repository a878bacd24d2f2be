"""Random images that stand for a dataset."""

import pytest
import torch

from fedprophet.bench.synthetic import SIZES, Sizes, sizes_of, synthetic
from fedprophet.data import digits
from fedprophet.data.registry import DataSettings
from fedprophet.errors import ConfigError


def test_they_have_the_shape_and_number_of_the_dataset():
    real, ours = digits.digits(), synthetic(SIZES["digits"], seed=0)
    assert (ours.shape, ours.classes) == (real.shape, real.classes)
    assert (len(ours.train), len(ours.test)) == (len(real.train), len(real.test))


def test_images_are_drawn_from_the_seed_and_lie_in_range():
    sizes = Sizes((3, 4, 4), 5, 40, 10)
    a, b, other = (synthetic(sizes, seed).train.fetch(torch.arange(40)) for seed in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, other)
    assert a.dtype == torch.float32
    assert 0 <= float(a.min()) < 0.1
    assert 0.9 < float(a.max()) <= 1
    assert len({image.numpy().tobytes() for image in a}) == 40


def test_a_large_set_takes_no_more_memory_than_its_pool(monkeypatch):
    monkeypatch.setattr("fedprophet.bench.synthetic.POOL_BYTES", 3 * 4 * 4 * 7)
    found = synthetic(Sizes((3, 4, 4), 5, 1000, 10), seed=0)
    images = found.train.fetch(torch.tensor([3, 10, 4]))
    assert torch.equal(images[0], images[1])
    assert not torch.equal(images[0], images[2])
    assert found.train.labels[:7].tolist() == [0, 1, 2, 3, 4, 0, 1]


def test_the_side_of_photographs_is_the_configurations():
    assert sizes_of(DataSettings(name="caltech256", options={"size": 64})).shape == (3, 64, 64)
    assert sizes_of(DataSettings(name="cifar10")).shape == (3, 32, 32)


def test_a_folder_of_ones_own_has_no_known_sizes():
    with pytest.raises(ConfigError, match=r"data.name = 'folder'.*--real-data"):
        sizes_of(DataSettings(name="folder"))
