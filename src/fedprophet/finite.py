"""Whether numbers are finite, with few questions to a GPU: each answer is a wait."""

from collections.abc import Iterable

import torch
from torch import Tensor


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether no number is infinite or NaN."""
    return all_true(map(torch.isfinite, tensors))


def all_true(truths: Iterable[Tensor]) -> bool:
    """Whether all entries are true. A device is asked once for all tensors that it has."""
    flags: dict[torch.device, list[Tensor]] = {}
    for truth in truths:
        flags.setdefault(truth.device, []).append(truth.all())
    return all(bool(torch.stack(found).all()) for found in flags.values())
