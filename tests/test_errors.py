"""Out of memory: a sentence that says what for, how much, and what to do."""

import numpy as np
import pytest
import torch

from fedprophet.errors import OutOfMemoryError, memory_for

PETABYTES = 10**15


@pytest.mark.parametrize(
    ("work", "amount"),
    [
        (lambda: torch.empty(PETABYTES), " (4000000000000000 bytes could not be had)"),
        (lambda: torch.empty(PETABYTES, PETABYTES), ""),
        (lambda: np.empty(PETABYTES), r" (7.11 PiB could not be had)"),
        (lambda: bytearray(PETABYTES), ""),
    ],
)
def test_the_sentence(work, amount):
    with pytest.raises(OutOfMemoryError) as error, memory_for("a model was built", "Build a smaller one"):
        work()
    assert str(error.value) == f"out of memory while a model was built{amount}. Build a smaller one"


def test_other_errors_are_left_alone():
    for other in (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), KeyError("memory")):
        with pytest.raises(type(other)) as error, memory_for("", ""):
            raise other
        assert error.value is other
