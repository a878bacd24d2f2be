"""Datasets, and how a training set is dealt out to clients.

A dataset that ships is a file here and a line in `DATASETS`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fedprophet.data.dataset import ClientData, Dataset, Examples, LocalExamples, from_datasets, from_tensors
from fedprophet.data.digits import digits
from fedprophet.data.shards import KINDS, Shards, ShardSettings, make_shards, split
from fedprophet.errors import DataError, unknown


@dataclass(frozen=True)
class DataOptions:
    """What a loader may use: the folder that holds its files, and a seed."""

    root: Path | None = None
    seed: int = 0


DATASETS: Mapping[str, Callable[[DataOptions], Dataset]] = {
    "digits": lambda options: digits(),
}


def load(name: str, root: str | Path | None = None, seed: int = 0) -> Dataset:
    """Return a dataset that ships, by its name."""
    if name not in DATASETS:
        raise DataError(unknown("dataset", name, DATASETS))
    return DATASETS[name](DataOptions(None if root is None else Path(root), seed))


__all__ = [
    "DATASETS",
    "KINDS",
    "ClientData",
    "DataOptions",
    "Dataset",
    "Examples",
    "LocalExamples",
    "ShardSettings",
    "Shards",
    "from_datasets",
    "from_tensors",
    "load",
    "make_shards",
    "split",
]
