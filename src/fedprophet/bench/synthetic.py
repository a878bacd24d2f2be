"""Random images of a dataset's shape: the time of training does not depend on what they show."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedprophet.data.dataset import Dataset, from_examples
from fedprophet.data.folder import MOST_PIXELS, check_number
from fedprophet.data.registry import DataSettings
from fedprophet.errors import ConfigError
from fedprophet.randomness import generator

POOL_BYTES = 16 * 2**20
"""Only this many bytes of images are drawn; a dataset repeats them, which no engine notices."""


@dataclass(frozen=True)
class Sizes:
    """The shape of the images, and how many there are."""

    shape: tuple[int, ...]
    classes: int
    train: int
    test: int


SIZES: Mapping[str, Sizes] = {
    "digits": Sizes((1, 8, 8), 10, 1_437, 360),
    "cifar10": Sizes((3, 32, 32), 10, 50_000, 10_000),
    "caltech256": Sizes((3, 224, 224), 256, 23_380, 6_400),
}


class SyntheticExamples:
    """Labelled images out of a pool of random ones, the classes in turn."""

    def __init__(self, sizes: Sizes, length: int, pool: Tensor) -> None:
        self.labels = torch.arange(length) % sizes.classes
        self._pool = pool

    def __len__(self) -> int:
        return len(self.labels)

    def fetch(self, indices: Tensor) -> Tensor:
        return self._pool[indices % len(self._pool)].to(torch.float32).div_(255)


def sizes_of(data: DataSettings) -> Sizes:
    if data.name not in SIZES:
        raise ConfigError(
            f"data.name = {data.name!r}: random images can only replace {', '.join(SIZES)}. "
            "Measure with the dataset itself: --real-data"
        )
    sizes = SIZES[data.name]
    if "size" not in data.options:
        return sizes
    size = data.options["size"]
    check_number("size", size, MOST_PIXELS)
    return replace(sizes, shape=(*sizes.shape[:1], size, size))


def synthetic(sizes: Sizes, seed: int) -> Dataset:
    count = max(2, min(sizes.train, POOL_BYTES // torch.Size(sizes.shape).numel()))
    draw = generator(seed, "synthetic images")
    pool = torch.randint(0, 256, (count, *sizes.shape), dtype=torch.uint8, generator=draw)
    train, test = (SyntheticExamples(sizes, length, pool) for length in (sizes.train, sizes.test))
    return from_examples(train, test, "random images")
