import sys

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from fedprophet.data import load


@pytest.fixture(scope="module")
def digits():
    return load("digits")


def everything(examples):
    return examples.fetch(torch.arange(len(examples)))


def test_sizes(digits):
    assert (digits.name, digits.classes, digits.shape) == ("digits", 10, (1, 8, 8))
    assert (len(digits.train), len(digits.test)) == (1437, 360)


def test_each_class_gives_a_fifth_to_the_test_set(digits):
    train, test = (np.bincount(part.labels.numpy(), minlength=10) for part in (digits.train, digits.test))
    assert np.all(np.abs(test - 0.2 * (train + test)) <= 1)


def test_it_is_the_bundled_data_every_image_once(digits):
    source = load_digits()
    whole = np.concatenate([everything(digits.train).numpy(), everything(digits.test).numpy()]).reshape(-1, 64) * 16
    labels = np.concatenate([digits.train.labels.numpy(), digits.test.labels.numpy()])

    def rows(images, answers):
        return sorted((*image.astype(int).tolist(), int(answer)) for image, answer in zip(images, answers, strict=True))

    assert rows(whole, labels) == rows(source.data, source.target)
    assert whole.max() == 16


def test_statistics(digits):
    images = everything(digits.train).double()
    assert digits.mean == pytest.approx((images.mean().item(),), abs=1e-9)
    assert digits.std == pytest.approx((images.std(correction=0).item(),), abs=1e-9)


def test_it_is_the_same_without_the_file(digits, monkeypatch):
    """Another release of scikit-learn may keep it elsewhere."""
    monkeypatch.setattr("fedprophet.data.digits.find_spec", lambda name: None)
    assert load("digits").digest() == digits.digest()


def test_scikit_learn_is_not_imported(digits, monkeypatch):
    """It would take longer than to load everything else that a node needs for its answer."""
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert load("digits").digest() == digits.digest()
