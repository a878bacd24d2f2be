"""Datasets, and how a training set is dealt out to clients.

A dataset that ships is a file here and a line in `DATASETS`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fedprophet.data import cifar10, digits, folder
from fedprophet.data.dataset import ClientData, Dataset, Examples, LocalExamples, from_datasets, from_tensors
from fedprophet.data.options import DataOptions, Findings
from fedprophet.data.shards import KINDS, Shards, ShardSettings, make_shards, split
from fedprophet.errors import DataError, unknown


@dataclass(frozen=True)
class DatasetEntry:
    """A dataset that ships: how to load it, how to look at its files, and how to fetch them into a folder.

    `options` are the fields of `DataOptions` that it takes besides root and seed.
    """

    load: Callable[[DataOptions], Dataset]
    check: Callable[[DataOptions], Findings]
    get: Callable[[Path], str]
    description: str
    options: tuple[str, ...] = ()


def _check_digits(options: DataOptions) -> Findings:
    loaded = digits.digits()
    counts = (loaded.train.labels.bincount() + loaded.test.labels.bincount()).tolist()
    images = {str(label): count for label, count in enumerate(counts)}
    return Findings(None, (), len(loaded.train), len(loaded.test), images, notes=("it comes with scikit-learn",))


def _get_folder(root: Path) -> str:
    raise DataError("folder reads images of your own, ROOT/CLASS/*.jpg or *.png: there is nothing to fetch")


IMAGE_OPTIONS = ("size", "test_per_class", "cache")
DATASETS: Mapping[str, DatasetEntry] = {
    "digits": DatasetEntry(
        lambda options: digits.digits(),
        _check_digits,
        lambda root: "digits comes with scikit-learn: there is nothing to fetch",
        "scikit-learn's digits: 1,797 images of 8×8, 10 classes",
    ),
    "cifar10": DatasetEntry(
        cifar10.cifar10, cifar10.check, cifar10.get, "CIFAR-10: 60,000 images of 3×32×32, 10 classes"
    ),
    "caltech256": DatasetEntry(
        folder.caltech256,
        folder.check_caltech256,
        folder.get_caltech256,
        "Caltech-256 without its clutter: 29,780 photographs, 256 classes",
        IMAGE_OPTIONS,
    ),
    "folder": DatasetEntry(
        folder.folder, folder.check, _get_folder, "images of your own: ROOT/CLASS/*.jpg or *.png", IMAGE_OPTIONS
    ),
}


def find_dataset(name: str) -> DatasetEntry:
    """Return the entry of a dataset that ships; raise DataError where there is none of that name."""
    if name not in DATASETS:
        raise DataError(unknown("dataset", name, DATASETS))
    return DATASETS[name]


def data_options(
    name: str,
    root: str | Path | None = None,
    seed: int = 0,
    *,
    size: int | None = None,
    test_per_class: int | None = None,
    cache: str | Path | None = None,
) -> DataOptions:
    """Return a loader's options, after checking that the dataset takes them."""
    allowed = find_dataset(name).options
    given = {"size": size, "test_per_class": test_per_class, "cache": cache}
    for option, value in given.items():
        if value is not None and option not in allowed:
            takers = ", ".join(other for other, entry in DATASETS.items() if option in entry.options)
            raise DataError(f"data.{option} is nothing that {name} can change: it is for {takers}")
    paths = [None if path is None else Path(path).expanduser() for path in (root, cache)]
    return DataOptions(paths[0], seed, size, test_per_class, paths[1])


def load(
    name: str,
    root: str | Path | None = None,
    seed: int = 0,
    *,
    size: int | None = None,
    test_per_class: int | None = None,
    cache: str | Path | None = None,
) -> Dataset:
    """Return a dataset that ships, by its name; `DataOptions` says what the options mean."""
    options = data_options(name, root, seed, size=size, test_per_class=test_per_class, cache=cache)
    return find_dataset(name).load(options)


__all__ = [
    "DATASETS",
    "KINDS",
    "ClientData",
    "DataOptions",
    "Dataset",
    "DatasetEntry",
    "Examples",
    "Findings",
    "LocalExamples",
    "ShardSettings",
    "Shards",
    "data_options",
    "find_dataset",
    "from_datasets",
    "from_tensors",
    "load",
    "make_shards",
    "split",
]
