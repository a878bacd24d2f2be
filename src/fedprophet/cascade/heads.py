"""The auxiliary head of a module: what lets it be trained before the modules behind it (the theta_m of Eq. 9).

A head is one linear layer behind a pool that keeps it small: an image feature is averaged to the smallest square of
positions that leaves at least as many inputs as there are classes, tokens are averaged to one.
"""

import math
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from fedprophet.errors import ModelError

BYTES = 4
"""The bytes of one float32: every size in the paper's cost model is for float32."""
HEADS = "heads/"
"""How the parameters of auxiliary heads begin. No attribute of a model has a slash, but many a model has `heads`."""


class HeadShape(NamedTuple):
    """How a head reads a feature: the size it is pooled to (None: not pooled) and the inputs of its linear layer."""

    pool: tuple[int, int] | None
    inputs: int


class HeadCost(NamedTuple):
    """What a head adds to its module: bytes of training memory, forward FLOPs, parameters."""

    memory: int
    flops: int
    parameters: int


class Head(nn.Linear):
    """One linear layer on a pooled feature. `weight` and `bias` are its only parameters, drawn as nn.Linear does."""

    def __init__(self, shape: HeadShape, classes: int) -> None:
        super().__init__(shape.inputs, classes)
        self.pool = shape.pool

    def forward(self, features: Tensor) -> Tensor:
        """Return the logits of a batch of C×H×W maps, of L×D tokens or of vectors."""
        if self.pool is not None:
            features = F.adaptive_avg_pool2d(features, self.pool)
        if features.ndim == 3:
            features = features.mean(1)
        return super().forward(features.flatten(1))


def head_name(module: int) -> str:
    """Return what the head behind a module is called among the parameters of tasks, answers and states."""
    return f"{HEADS}{module}"


def head_parameters(module: int) -> tuple[str, str]:
    """Return the names of a head's parameters."""
    return f"{head_name(module)}.weight", f"{head_name(module)}.bias"


def of_head(name: str) -> bool:
    """Whether a parameter belongs to an auxiliary head, and not to the model."""
    return name.startswith(HEADS)


def head_shape(feature: tuple[int, ...], classes: int) -> HeadShape:
    """Return the head's shape for one sample's feature: C×H×W, L×D (tokens) or D."""
    if len(feature) not in (1, 2, 3):
        raise ModelError(
            f"an auxiliary head reads a vector, tokens or a C×H×W map, not a feature of shape {feature}. "
            "Let the atom end where the feature has one of these shapes"
        )
    if len(feature) < 3:
        return HeadShape(None, feature[-1])
    channels, height, width = feature
    side = math.isqrt((classes - 1) // channels) + 1  # ceil(sqrt(classes / C)), in whole numbers
    if max(height, width) <= side:
        return HeadShape(None, channels * height * width)
    pool = min(side, height), min(side, width)
    return HeadShape(pool, channels * pool[0] * pool[1])


def build_head(feature: tuple[int, ...], classes: int) -> Head:
    """Return a fresh head for one sample's feature shape, drawn from torch's global generator."""
    return Head(head_shape(feature, classes), classes)


def head_cost(feature: tuple[int, ...], classes: int, copies: int) -> HeadCost:
    """Return what a head on a batch of features (batch first) costs: its input, its parameters' copies, its logits."""
    batch, elements = feature[0], math.prod(feature)
    shape = head_shape(feature[1:], classes)
    parameters = (shape.inputs + 1) * classes
    return HeadCost(
        memory=BYTES * (elements + copies * parameters + batch * classes),
        flops=batch * shape.inputs * classes + (elements if shape.pool is not None else 0),
        parameters=parameters,
    )
