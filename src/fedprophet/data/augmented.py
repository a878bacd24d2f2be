"""Examples that training sees in other ways: as mirror images, or moved (`data.mirror`, `data.shift`)."""

import torch
from torch import Tensor

from fedprophet.data.examples import Examples, LabelledExamples


class MirroredExamples(LabelledExamples):
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


class ShiftedExamples(LabelledExamples):
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
