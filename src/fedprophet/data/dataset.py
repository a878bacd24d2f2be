"""Datasets: labelled images in [0, 1] that are fetched by index, and ways to bring your own."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedprophet.data.augmented import MirroredExamples
from fedprophet.data.examples import Examples, Labels, MapExamples, MapStyle, TensorExamples, spread
from fedprophet.errors import DataError

STATISTICS_SAMPLE = 10_000
"""At most this many training images are read for the mean and standard deviation of the channels."""
DIGEST_SAMPLE = 64
"""This many training and test images count in the fingerprint, besides all labels."""
_CHUNK = 64


@dataclass(frozen=True)
class ClientData:
    """What one client sees: its own examples to train on, as they are or with their mirror images, and held-out ones.

    Mirror images are for training alone: how much a client counts, and which labels it has, its own examples say.
    In training, images may also be moved by up to `shift` pixels, by others in each round.
    """

    own: Examples
    validation: Examples
    mirrored: bool = False
    shift: int = 0

    @cached_property
    def train(self) -> Examples:
        """The examples that batches are drawn from."""
        return MirroredExamples(self.own) if self.mirrored else self.own

    @property
    def size(self) -> int:
        """The size of the client's shard."""
        return len(self.own) + len(self.validation)


@dataclass(frozen=True)
class Dataset:
    """A training set for the clients and a held-out test set for the server.

    `shape` is that of one image; `mean` and `std` are per channel over the training images. A channel that never
    changes has a standard deviation of 1 here, so that dividing by it is harmless. `names` are those of the classes,
    where labels stand for something that has a name.
    """

    name: str
    train: Examples
    test: Examples
    classes: int
    shape: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    names: tuple[str, ...] = ()

    def digest(self) -> str:
        """Return a fingerprint of sizes, labels and a sample of images, the same in every process."""
        fingerprint = hashlib.blake2b(repr((self.classes, self.shape)).encode(), digest_size=16)
        for examples in (self.train, self.test):
            images = examples.fetch(spread(len(examples), DIGEST_SAMPLE)).numpy()
            fingerprint.update(len(examples).to_bytes(8, "little"))
            fingerprint.update(examples.labels.numpy().astype("<i8").tobytes())
            fingerprint.update(images.astype("<f4").tobytes())
        return fingerprint.hexdigest()


def from_tensors(
    train_images: Tensor | npt.NDArray[Any],
    train_labels: Labels,
    test_images: Tensor | npt.NDArray[Any],
    test_labels: Labels,
    name: str = "tensors",
) -> Dataset:
    """Return a dataset of tensors or arrays, batch and then channels first: uint8, or floats in [0, 1]."""
    train = _part(name, "training", TensorExamples, train_images, train_labels)
    return from_examples(train, _part(name, "test", TensorExamples, test_images, test_labels), name)


def from_datasets(train: MapStyle, test: MapStyle, name: str = "dataset") -> Dataset:
    """Return a dataset made of two map-style ones, as torch, torchvision and others have them."""
    examples = _part(name, "training", MapExamples, train)
    return from_examples(examples, _part(name, "test", MapExamples, test), name)


def _part(name: str, part: str, kind: Callable[..., Examples], *source: Any) -> Examples:
    try:
        return kind(*source)
    except DataError as error:
        raise DataError(f"dataset {name!r}, {part} set: {error}") from error


def from_examples(train: Examples, test: Examples, name: str) -> Dataset:
    """Return a dataset of two sets of examples, after checking that they belong together."""
    for part, examples in {"training": train, "test": test}.items():
        if len(examples) == 0:
            raise DataError(f"dataset {name!r}: the {part} set is empty")
    if bool((train.labels == train.labels[0]).all()):
        raise DataError(f"dataset {name!r}: the training set has only class {int(train.labels[0])}; two are needed")
    classes = int(train.labels.max()) + 1
    if classes > len(train):
        raise DataError(
            f"dataset {name!r}: label {classes - 1} means {classes} classes, more than the {len(train)} training "
            "images: number the classes 0, 1, 2, …"
        )
    if int(test.labels.max()) >= classes:
        raise DataError(
            f"dataset {name!r}: the test set has label {int(test.labels.max())}, "
            f"the training set only labels up to {classes - 1}"
        )
    first = torch.zeros(1, dtype=torch.int64)
    shape, other = (tuple(examples.fetch(first).shape[1:]) for examples in (train, test))
    if 0 in shape:
        raise DataError(f"dataset {name!r}: images of shape {shape} have no pixels")
    if shape != other:
        raise DataError(f"dataset {name!r}: training images have shape {shape}, test images {other}")
    return Dataset(name, train, test, classes, shape, *_statistics(train))


def _statistics(examples: Examples) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return each channel's mean and standard deviation, over all images or an evenly spread sample of them."""
    count, total, squares = 0, 0.0, 0.0
    positions = spread(len(examples), STATISTICS_SAMPLE)
    for start in range(0, len(positions), _CHUNK):
        # NumPy sums in one thread, so the statistics do not depend on the number of threads.
        images = examples.fetch(positions[start : start + _CHUNK]).numpy().astype(np.float64)
        values = np.moveaxis(images, 1, 0).reshape(images.shape[1], -1)
        count += values.shape[1]
        total = total + values.sum(axis=1)
        squares = squares + np.square(values).sum(axis=1)
    return mean_and_std(np.asarray(total) / count, np.asarray(squares) / count)


def mean_and_std(mean: npt.NDArray[Any], squares: npt.NDArray[Any]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return each channel's mean and standard deviation from its mean and its mean square."""
    std = np.sqrt(np.maximum(squares - np.square(mean), 0.0))
    return tuple(mean.tolist()), tuple(np.where(std < 1e-6, 1.0, std).tolist())
