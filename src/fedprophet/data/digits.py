"""The digits that ship with scikit-learn: 1797 real images of 8×8 pixels, so that a first run needs no download."""

import gzip
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedprophet.data.dataset import Dataset, from_tensors
from fedprophet.data.registry import dataset


@dataset(
    "digits",
    "scikit-learn's digits: 1,797 images of 8×8, 10 classes",
    get=lambda root: "digits comes with scikit-learn: there is nothing to fetch",
)
def digits(root: Path | None = None) -> Dataset:
    """Return the digits, 1437 for training and 360 for test.

    The split is the same for all seeds: the images are sorted by class, in the order of the file within a class, and
    every fifth is a test image. So each class gives a fifth of its images, give or take one.
    """
    pixels, labels = _pixels_and_labels()
    images = (pixels.reshape(-1, 1, 8, 8) / 16).astype(np.float32)
    held_out = np.zeros(len(labels), dtype=bool)
    held_out[np.argsort(labels, kind="stable")[::5]] = True
    return from_tensors(images[~held_out], labels[~held_out], images[held_out], labels[held_out], name="digits")


def _pixels_and_labels() -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Read scikit-learn's file: importing scikit-learn for it would take longer than some short runs."""
    package = find_spec("sklearn")
    file = Path(package.origin if package and package.origin else "").parent / "datasets" / "data" / "digits.csv.gz"
    if not file.is_file():  # another release may keep it elsewhere
        from sklearn.datasets import load_digits

        pixels, labels = load_digits(return_X_y=True)
        return pixels, labels
    with gzip.open(file, "rt", encoding="ascii") as text:
        rows = np.loadtxt(text, delimiter=",")
    return rows[:, :-1], rows[:, -1].astype(int)
