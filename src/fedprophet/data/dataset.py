"""Datasets: labelled images in [0, 1] that are fetched by index, and ways to bring your own."""

import hashlib
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedprophet.errors import DataError

STATISTICS_SAMPLE = 10_000
"""At most this many training images are read for the mean and standard deviation of the channels."""
DIGEST_SAMPLE = 64
"""This many training and test images count in the fingerprint, besides all labels."""
_CHUNK = 64
_CHANNELS = (1, 2, 3, 4)

Labels = Tensor | npt.NDArray[Any] | Sequence[int]


class Examples(Protocol):
    """Labelled images. `fetch` returns float32 images in [0, 1], batch first, in a tensor of their own."""

    @property
    def labels(self) -> Tensor: ...
    def __len__(self) -> int: ...
    def fetch(self, indices: Tensor) -> Tensor: ...


class MapStyle(Protocol):
    """What a dataset from elsewhere needs: a length, and the same `(image, label)` each time it is indexed."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


class _Labelled:
    """Examples whose labels are in memory."""

    _labels: Tensor

    @property
    def labels(self) -> Tensor:
        return self._labels

    def __len__(self) -> int:
        return len(self._labels)


class TensorExamples(_Labelled):
    """Images in memory; uint8 stays uint8 there and becomes value / 255 when it is fetched."""

    def __init__(self, images: Tensor | npt.NDArray[Any], labels: Labels) -> None:
        stored = _as_tensor(images, "images must be a tensor or an array of numbers")
        if stored.ndim < 2:
            raise DataError(f"images must come batch first, one image for each row; got shape {tuple(stored.shape)}")
        if stored.ndim == 3:
            stored = stored.unsqueeze(1)
        self._images = stored if stored.dtype == torch.uint8 else _unit_range(stored, "images")
        self._labels = _label_tensor(labels)
        if len(self._images) != len(self._labels):
            raise DataError(f"{len(self._images)} images but {len(self._labels)} labels: give one label for each image")

    def fetch(self, indices: Tensor) -> Tensor:
        chosen = self._images.index_select(0, indices)
        return _unit_range(chosen, "images") if chosen.dtype == torch.uint8 else chosen


class MapExamples(_Labelled):
    """Any map-style dataset of `(image, label)`: labels are read once, images on demand.

    A tensor is taken channels first, a picture height × width (× channels); both without channels get one. An array of
    three axes counts as channels first only if its first axis, and not its last, has one to four entries.
    """

    def __init__(self, dataset: MapStyle) -> None:
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise DataError(
                f"{type(dataset).__name__} is no map-style dataset: it needs __len__ and __getitem__ -> (image, label)"
            )
        if len(dataset) == 0:
            raise DataError(f"the dataset {type(dataset).__name__} is empty")
        self._dataset = dataset
        self._shape = tuple(_image(_pair(dataset, 0)[0], 0).shape)
        declared = _declared_labels(dataset)
        values = [_label(dataset, index) for index in range(len(dataset))] if declared is None else declared
        self._labels = _label_tensor(values)

    def fetch(self, indices: Tensor) -> Tensor:
        images = torch.empty((len(indices), *self._shape))
        for row, index in enumerate(indices.tolist()):
            image = _image(_pair(self._dataset, index)[0], index)
            if tuple(image.shape) != self._shape:
                raise DataError(
                    f"image {index} has shape {tuple(image.shape)}, image 0 has {self._shape}: "
                    "resize or crop them to one shape"
                )
            images[row] = image
        return images


class LocalExamples(_Labelled):
    """The part of some examples that one client owns, addressed by position 0 … len − 1."""

    def __init__(self, examples: Examples, indices: npt.NDArray[np.int64]) -> None:
        self._examples = examples
        self._indices = torch.from_numpy(np.array(indices, dtype=np.int64))
        self._labels = examples.labels[self._indices]

    def fetch(self, indices: Tensor) -> Tensor:
        return self._examples.fetch(self._indices[indices])


class MirroredExamples(_Labelled):
    """Some examples and, behind them, their mirror images: of n, position n + k shows example k flipped left to right.

    Nothing is held twice: images are flipped when they are fetched.
    """

    def __init__(self, examples: Examples) -> None:
        self._examples = examples
        self._labels = torch.cat([examples.labels, examples.labels])

    def fetch(self, indices: Tensor) -> Tensor:
        mirrored = indices >= len(self._examples)
        images = self._examples.fetch(torch.where(mirrored, indices - len(self._examples), indices))
        images[mirrored] = images[mirrored].flip(-1)
        return images


class ShiftedExamples(_Labelled):
    """Some examples, each moved by an offset of its own: a row of `offsets` says how far down and how far right."""

    def __init__(self, examples: Examples, offsets: Tensor) -> None:
        self._examples, self._offsets = examples, offsets
        self._labels = examples.labels

    def fetch(self, indices: Tensor) -> Tensor:
        return shifted(self._examples.fetch(indices), self._offsets[indices])


def shifted(images: Tensor, offsets: Tensor) -> Tensor:
    """Return images (n × … × height × width), each moved down and right by its row of `offsets`, on black."""
    for dim, moved in zip((-2, -1), offsets.to(images.device).unbind(dim=1), strict=True):
        size = images.shape[dim]
        shape = [len(images), *[1] * (images.ndim - 1)]
        shape[dim] = size
        source = (torch.arange(size, device=images.device) - moved[:, None]).view(shape)
        inside = (source >= 0) & (source < size)
        images = images.take_along_dim(source.clamp(0, size - 1), dim).mul_(inside)
    return images


class JoinedExamples(_Labelled):
    """Two sets of examples as one, the second after the first."""

    def __init__(self, first: Examples, second: Examples) -> None:
        self._first, self._second = first, second
        self._labels = torch.cat([first.labels, second.labels])

    def fetch(self, indices: Tensor) -> Tensor:
        behind = indices >= len(self._first)
        first, second = self._first.fetch(indices[~behind]), self._second.fetch(indices[behind] - len(self._first))
        images = torch.empty((len(indices), *first.shape[1:]), dtype=first.dtype)
        images[~behind], images[behind] = first, second
        return images


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
            images = examples.fetch(_spread(len(examples), DIGEST_SAMPLE)).numpy()
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
    positions = _spread(len(examples), STATISTICS_SAMPLE)
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


def _spread(length: int, most: int) -> Tensor:
    """Return at most `most` positions, evenly spread over 0 … length − 1."""
    count = min(length, most)
    return torch.arange(count) * length // max(count, 1)


def _unit_range(images: Tensor, what: str) -> Tensor:
    """Return images as float32 in [0, 1]; only bytes are scaled, since a float's range is its maker's to say."""
    if images.dtype == torch.uint8:
        return images.to(torch.float32).div_(255)
    if images.dtype == torch.bool:
        return images.to(torch.float32)
    if not images.is_floating_point():
        raise DataError(f"{what} must be uint8 or floating point, not {str(images.dtype).removeprefix('torch.')}")
    if images.numel():
        low, high = (float(value) for value in images.aminmax())
        # A NaN anywhere makes both comparisons false.
        if not (low >= 0 and high <= 1):
            raise DataError(f"{what} must lie in [0, 1], not in [{low:g}, {high:g}]: normalisation is the model's part")
    return images.to(torch.float32)


def _as_tensor(values: Any, wanted: str) -> Tensor:
    try:
        return torch.as_tensor(values).detach().cpu()
    except (TypeError, ValueError, RuntimeError, OverflowError, RecursionError) as error:
        raise DataError(f"{wanted}: {error}") from error


def _label_tensor(labels: Labels) -> Tensor:
    """Return labels as a one-dimensional int64 tensor of their own."""
    values = _as_tensor(labels, "labels must be integers")
    if values.ndim != 1:
        raise DataError(f"labels must be one integer for each image; got shape {tuple(values.shape)}")
    if len(values) and (values.is_floating_point() or values.is_complex() or values.dtype == torch.bool):
        raise DataError(f"labels must be integers, not {str(values.dtype).removeprefix('torch.')}")
    values = values.to(torch.int64, copy=True)
    if len(values) and int(values.min()) < 0:
        raise DataError(f"labels must be 0, 1, 2, …; got {int(values.min())}")
    return values


def _pair(dataset: MapStyle, index: int) -> tuple[Any, Any]:
    item = dataset[index]
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise DataError(f"item {index} of {type(dataset).__name__} is not a pair (image, label)")
    return item[0], item[1]


def _label(dataset: MapStyle, index: int) -> int:
    value = _pair(dataset, index)[1]
    try:
        return operator.index(value)
    except TypeError as error:
        raise DataError(f"label {index} is {value!r}, not an integer") from error


def _declared_labels(dataset: MapStyle) -> npt.NDArray[Any] | None:
    """Return the labels that a dataset keeps in a list, which spares reading every image; None if it has none.

    A list that a transform of the targets contradicts is no use: some positions are compared with what is returned.
    """
    if getattr(dataset, "target_transform", None) is not None:
        return None
    for attribute in ("targets", "labels"):
        try:
            values = np.asarray(getattr(dataset, attribute, None))
        except (TypeError, ValueError, RuntimeError):
            continue
        fits = values.shape == (len(dataset),) and values.dtype.kind in "iu"
        if fits and all(int(values[i]) == _label(dataset, i) for i in _spread(len(dataset), 8).tolist()):
            return values
    return None


def _image(value: Any, index: int) -> Tensor:
    """Return one image as float32 in [0, 1], channels first."""
    if isinstance(value, Tensor):
        image = value.detach().cpu()
    else:
        array = np.asarray(value)
        if array.dtype.kind not in "buif":
            raise DataError(f"image {index} is a {type(value).__name__}, neither a tensor nor an array of numbers")
        if array.ndim == 3:
            channels_lead = array.shape[0] in _CHANNELS and array.shape[-1] not in _CHANNELS
            array = array if isinstance(value, np.ndarray) and channels_lead else np.moveaxis(array, 2, 0)
        image = torch.from_numpy(np.array(array))
    if image.ndim == 0:
        raise DataError(f"image {index} is a single number")
    return _unit_range(image.unsqueeze(0) if image.ndim == 2 else image, f"image {index}")
