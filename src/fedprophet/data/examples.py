"""Labelled images that are fetched by index: in memory, read from another library's dataset, a part, or two joined."""

import operator
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedprophet.errors import DataError

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


class LabelledExamples:
    """Examples whose labels are in memory."""

    _labels: Tensor

    @property
    def labels(self) -> Tensor:
        return self._labels

    def __len__(self) -> int:
        return len(self._labels)


class TensorExamples(LabelledExamples):
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


class MapExamples(LabelledExamples):
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


class LocalExamples(LabelledExamples):
    """The part of some examples that one client owns, addressed by position 0 … len − 1."""

    def __init__(self, examples: Examples, indices: npt.NDArray[np.int64]) -> None:
        self._examples = examples
        self._indices = torch.from_numpy(np.array(indices, dtype=np.int64))
        self._labels = examples.labels[self._indices]

    def fetch(self, indices: Tensor) -> Tensor:
        return self._examples.fetch(self._indices[indices])


class JoinedExamples(LabelledExamples):
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


def spread(length: int, most: int) -> Tensor:
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
            _check_finite(images, what)
            raise DataError(f"{what} must lie in [0, 1], not in [{low:g}, {high:g}]: normalisation is the model's part")
    return images.to(torch.float32)


def _check_finite(images: Tensor, what: str) -> None:
    """Raise DataError where a value is infinite or not a number; what is not one image ("images") are several."""
    broken = ~images.isfinite()
    if not bool(broken.any()):
        return
    if what == "images":
        rows = broken.flatten(1).any(1).nonzero().flatten().tolist()
        what, several = f"image {rows[0]}", f" ({len(rows)} of {len(images)} images)"
    else:
        several = ""
    raise DataError(f"{what} has values that are not numbers, or infinite{several}")


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
        if fits and all(int(values[i]) == _label(dataset, i) for i in spread(len(dataset), 8).tolist()):
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
