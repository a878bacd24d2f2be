"""The digits that ship with scikit-learn: 1797 real images of 8×8 pixels, so that a first run needs no download."""

import numpy as np

from fedprophet.data.dataset import Dataset, from_tensors


def digits() -> Dataset:
    """Return the digits, 1437 for training and 360 for test.

    The split is one for all runs, whatever their seed: the images are sorted by class, in the order of the file within
    a class, and every fifth is a test image. So each class gives a fifth of its images, give or take one.
    """
    from sklearn.datasets import load_digits  # takes a second to import, and other datasets do not need it

    pixels, labels = load_digits(return_X_y=True)
    images = (pixels.reshape(-1, 1, 8, 8) / 16).astype(np.float32)
    held_out = np.zeros(len(labels), dtype=bool)
    held_out[np.argsort(labels, kind="stable")[::5]] = True
    return from_tensors(images[~held_out], labels[~held_out], images[held_out], labels[held_out], name="digits")
