"""What a dataset's loader is given, and what a look at its files finds."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fedprophet.errors import DataError

DEFAULT_ROOT = Path("data")
"""Where published datasets are looked for when no folder is given."""


@dataclass(frozen=True)
class DataOptions:
    """What a loader may use: the folder that holds its files, a seed, and what only image folders take.

    `size` is the side of an image in pixels, `test_per_class` how many images of each class are the test set, `cache`
    the folder where decoded images are kept. None leaves each to the dataset.
    """

    root: Path | None = None
    seed: int = 0
    size: int | None = None
    test_per_class: int | None = None
    cache: Path | None = None

    def __post_init__(self) -> None:
        for name, value in {"size": self.size, "test_per_class": self.test_per_class}.items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise DataError(f"data.{name} must be a positive whole number, not {value!r}")

    @property
    def place(self) -> Path:
        """The folder of a published dataset's files."""
        return self.root if self.root is not None else DEFAULT_ROOT


@dataclass(frozen=True)
class Findings:
    """What is there of a dataset and what is missing.

    `found` is the file or folder it would be read from. `files` says of each file what it holds or lacks, `images` how
    many images each class has, `advice` what to do about the problems.
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
