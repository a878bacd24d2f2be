"""The datasets that ship: the `dataset` decorator registers a loader beside its code; `load` finds it by name."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
from pydantic import Field

from fedprophet.data.dataset import Dataset
from fedprophet.errors import DataError, unknown
from fedprophet.settings.registry import keyword_options, unknown_options
from fedprophet.settings.section import Section
from fedprophet.settings.values import CUSTOM, OneOf, Options

DEFAULT_ROOT = Path("data")
"""Where published datasets are looked for when no folder is given."""

Loader = TypeVar("Loader", bound=Callable[..., Dataset])


@dataclass(frozen=True)
class Findings:
    """What exists of a dataset and what is missing.

    `found` is the file or folder it would be read from. `files` says what each file holds or lacks, `images` how many
    images each class has, `advice` how to solve the problems.
    """

    found: Path | None
    problems: tuple[str, ...] = ()
    train: int = 0
    test: int = 0
    images: Mapping[str, int] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    advice: str = ""

    @property
    def complete(self) -> bool:
        """Whether the dataset is there as it was published."""
        return not self.problems


@dataclass(frozen=True)
class DatasetEntry:
    """A dataset that ships: `load` and `check` take its folder and its options, `get` fetches it into a folder."""

    name: str
    help: str
    load: Callable[..., Dataset]
    check: Callable[..., Findings]
    get: Callable[[Path], str]

    @property
    def options(self) -> tuple[str, ...]:
        """The names of its options: the loader's keyword arguments."""
        return keyword_options(self.load)

    @property
    def line(self) -> str:
        """Its line of help with the names of its options."""
        return f"{self.help} (options: {', '.join(self.options)})" if self.options else self.help


DATASETS: dict[str, DatasetEntry] = {}


def dataset(
    name: str,
    help: str,
    *,
    check: Callable[..., Findings] | None = None,
    get: Callable[[Path], str] | str = "there is nothing to fetch",
) -> Callable[[Loader], Loader]:
    """Register a loader `load(root, *, option=…)`, where `root` is a folder or None.

    Without a `check` of the files, the dataset is loaded and counted. `get` fetches the files, or says why it cannot.
    """

    def register(load: Loader) -> Loader:
        def count(root: Path | None, **options: Any) -> Findings:
            found = load(root, **options)
            counts = torch.cat([found.train.labels, found.test.labels]).bincount(minlength=found.classes)
            images = dict(zip(found.names or map(str, range(found.classes)), counts.tolist(), strict=True))
            return Findings(None, train=len(found.train), test=len(found.test), images=images)

        def refuse(root: Path) -> str:
            raise DataError(f"{name}: {get}")

        DATASETS[name] = DatasetEntry(name, help, load, check or count, refuse if isinstance(get, str) else get)
        return load

    return register


def find_dataset(name: str) -> DatasetEntry:
    """Return the entry of a dataset; raise DataError if there is none of that name."""
    if name not in DATASETS:
        raise DataError(unknown("dataset", name, DATASETS))
    return DATASETS[name]


def check(name: str, root: str | Path | None = None, **options: object) -> Findings:
    """Say what exists of a dataset and what is missing."""
    return _checked(name, options).check(_folder(root), **options)


def load(name: str, root: str | Path | None = None, **options: object) -> Dataset:
    """Return a dataset by its name. The options are the keyword arguments of its loader."""
    return _checked(name, options).load(_folder(root), **options)


def _checked(name: str, options: Mapping[str, object]) -> DatasetEntry:
    entry = find_dataset(name)
    for problem in unknown_options(name, options, entry.options):
        raise DataError(f"data.options: {problem}")
    return entry


def _folder(root: str | Path | None) -> Path | None:
    return None if root is None else Path(root).expanduser()


def _choices() -> Mapping[str, str]:
    shipped = {name: entry.line for name, entry in sorted(DATASETS.items())}
    return {**shipped, CUSTOM: "a dataset passed to fedprophet.train"}


class DataSettings(Section):
    """The dataset, and what each client holds out of its shard."""

    name: Annotated[str, OneOf(_choices)] = Field(default="digits", description="The dataset's name.")
    root: str = Field(
        default="", description='Folder of the dataset\'s files; "": the folder "data" here, where files are needed.'
    )
    options: Options = Field(
        default_factory=dict,
        description="Passed on to the dataset's loader. For image folders: size is the side of the images in pixels, "
        "test_per_class the number of test images of each class, cache the folder for decoded images.",
    )
    validation: float = Field(
        default=0.2, gt=0, lt=1, description="Share of each client's shard that it keeps for validation."
    )
    mirror: bool = Field(
        default=False,
        description="Whether clients also train on the mirror images of their training images, flipped left to right. "
        "For photographs: a mirrored digit is not that digit any more. Held-out, test and public images stay as they "
        "are.",
    )
    shift: int = Field(
        default=0,
        ge=0,
        le=10**9,
        description="Pixels by which each training image is moved at most, down or up and right or left, by an offset "
        "that is drawn anew in each round. What comes in is black. Only training sees moved images.",
    )

    def conflicts(self, config: object) -> Iterator[str]:
        """Yield a line for each option that the dataset's loader does not have."""
        if self.name in DATASETS:
            problems = unknown_options(self.name, self.options, DATASETS[self.name].options)
            yield from (f"data.options: {problem}" for problem in problems)
