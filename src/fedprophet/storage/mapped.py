"""Tensors whose memory is a file: the system may take it back at any time, as nothing is lost by that.

A file has no name any more as soon as it is mapped, so that nothing is left behind, however the process ends. It lies
where Python puts temporary files (TMPDIR). A process that is forked shares the memory with its parent.
"""

import math
import os
import tempfile

import torch
from torch import Tensor

from fedprophet.errors import DataError


def empty_in_file(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor of zeros in a file of its own."""
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    with tempfile.NamedTemporaryFile(prefix="fedprophet-") as file:
        try:
            # A disk that is full must be noticed here: writing to the mapping would end the process without a word.
            os.posix_fallocate(file.fileno(), 0, count * dtype.itemsize)
        except OSError as error:
            raise DataError(
                f"cannot write {count * dtype.itemsize} bytes to a temporary file in {tempfile.gettempdir()}: "
                f"{error.strerror}. Make room there, or set TMPDIR to another folder"
            ) from error
        return torch.from_file(file.name, shared=True, size=count, dtype=dtype).view(shape)


def copied_to_file(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor in a file of its own."""
    return empty_in_file(tuple(tensor.shape), tensor.dtype).copy_(tensor.detach())
