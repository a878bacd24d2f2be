import numpy as np
import pytest
import torch
from small_examples import Pairs, pictures

from fedprophet.data import DATASETS, dataset, load
from fedprophet.data.dataset import ClientData, from_datasets, from_tensors
from fedprophet.data.examples import LocalExamples
from fedprophet.errors import DataError


def test_statistics_by_hand():
    # Channel 0 holds 0, 1, 0, 1: mean 1/2, standard deviation 1/2. Channel 1 never changes.
    images = torch.tensor([[[0.0, 1.0], [0.25, 0.25]], [[0.0, 1.0], [0.25, 0.25]]]).reshape(2, 2, 1, 2)
    made = from_tensors(images, [0, 1], images, [0, 1])
    assert made.mean == pytest.approx((0.5, 0.25))
    assert made.std == pytest.approx((0.5, 1.0))
    assert (made.name, made.classes, made.shape) == ("tensors", 2, (2, 1, 2))


def test_statistics_over_several_chunks():
    images = torch.rand(150, 3, 4, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    made = from_tensors(images, [k % 2 for k in range(150)], images[:2], [0, 1])
    assert made.mean == pytest.approx(images.mean((0, 2, 3)).tolist(), abs=1e-6)
    assert made.std == pytest.approx(images.std((0, 2, 3), correction=0).tolist(), abs=1e-6)


def test_statistics_read_a_bounded_sample(monkeypatch):
    monkeypatch.setattr(dataset, "STATISTICS_SAMPLE", 4)
    source = Pairs(torch.linspace(0, 1, 9).reshape(9, 1, 1, 1), [0, 1] * 4 + [0])
    source.targets = source.answers
    made = from_datasets(source, source)
    # Positions 0, 2, 4, 6 of 9: values 0, 1/4, 1/2, 3/4.
    assert made.mean == pytest.approx((0.375,))


def test_from_datasets_equals_from_tensors():
    images, labels = torch.rand(6, 1, 2, 2), [0, 1, 2, 0, 1, 2]
    a = from_tensors(images, labels, images[:3], labels[:3])
    b = from_datasets(Pairs(images, labels), Pairs(images[:3], labels[:3]))
    assert (a.mean, a.std, a.classes, a.shape, a.digest()) == (b.mean, b.std, b.classes, b.shape, b.digest())


def test_torch_datasets_fit():
    tensors = torch.utils.data.TensorDataset(torch.rand(6, 1, 2, 2), torch.tensor([0, 1, 2, 0, 1, 2]))
    made = from_datasets(tensors, torch.utils.data.Subset(tensors, [5, 0]))
    assert made.train.labels.tolist() == [0, 1, 2, 0, 1, 2]
    assert made.test.labels.tolist() == [2, 0]


GOOD = (torch.zeros(4, 1, 2, 2), [0, 1, 1, 0])


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        ((torch.zeros(0, 1, 2, 2), []), GOOD, "'tensors': the training set is empty"),
        (GOOD, (torch.zeros(0, 1, 2, 2), []), "'tensors': the test set is empty"),
        ((torch.zeros(2, 1, 2, 2), [3, 3]), GOOD, "the training set has only class 3; two are needed"),
        (GOOD, (torch.zeros(1, 1, 2, 2), [2]), "test set has label 2, the training set only labels up to 1"),
        (GOOD, (torch.zeros(1, 1, 3, 2), [0]), r"training images have shape \(1, 2, 2\), test images \(1, 3, 2\)"),
        ((torch.zeros(2, 1, 2, 2), [0, 10**9]), GOOD, "label 1000000000 means .* more than the 2 training images"),
        ((torch.zeros(2, 1, 2, 2), [0, -1]), GOOD, "'tensors', training set: .*got -1"),
        (GOOD, (torch.zeros(2, 1, 2, 2), [0.5, 1]), "'tensors', test set: labels must be integers"),
    ],
)
def test_parts_that_do_not_fit(train, test, message):
    with pytest.raises(DataError, match=message):
        from_tensors(*train, *test)


def test_bad_map_dataset_names_its_part():
    good = Pairs(*GOOD)
    with pytest.raises(DataError, match="'mine', test set: the dataset Pairs is empty"):
        from_datasets(good, Pairs([], []), name="mine")


def build(images, labels, test_images=None, test_labels=None):
    return from_tensors(
        images,
        labels,
        images if test_images is None else test_images,
        labels if test_labels is None else test_labels,
        name="x",
    )


def test_digest_notices_other_data():
    images, labels = torch.zeros(6, 1, 2, 2), [0, 1, 2, 0, 1, 2]
    other = images.clone()
    other[3, 0, 1, 1] = 0.5
    digests = [
        made.digest()
        for made in (
            build(images, labels),
            build(images, [0, 1, 2, 0, 2, 1]),
            build(other, labels),
            build(images, labels, other),
            build(images, labels, None, [0, 1, 2, 0, 1, 1]),
            build(images.reshape(6, 1, 4, 1), labels),
            build(images[:5], labels[:5]),
        )
    ]
    assert len(set(digests)) == len(digests)
    assert build(images.clone(), list(labels)).digest() == digests[0]


def test_only_training_is_mirrored():
    own, held_out = (LocalExamples(pictures(), np.array([k])) for k in (0, 1))
    plain, mirrored = (ClientData(own, held_out, mirrored=value) for value in (False, True))
    assert plain.train is own
    assert (len(mirrored.train), len(mirrored.own), len(mirrored.validation)) == (2, 1, 1)
    assert (plain.size, mirrored.size) == (2, 2)
    assert mirrored.validation is held_out


def test_unknown_dataset_names_the_nearest():
    with pytest.raises(DataError, match=r"unknown dataset 'digit'. Did you mean 'digits'\?"):
        load("digit")
    assert "digits" in DATASETS


def test_images_without_pixels_are_refused():
    with pytest.raises(DataError, match=r"images of shape \(1, 0, 8\) have no pixels"):
        from_tensors(torch.zeros(2, 1, 0, 8), [0, 1], torch.zeros(2, 1, 0, 8), [0, 1])
