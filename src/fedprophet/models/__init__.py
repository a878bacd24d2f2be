"""The models that ship: a table of names, and `build`."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from torch import nn

from fedprophet.errors import ModelError, unknown
from fedprophet.models.cnn import build_cnn3, build_cnn4
from fedprophet.models.resnet import build_resnet
from fedprophet.models.vgg import build_vgg, build_vgg_small
from fedprophet.models.vit import build_vit


@dataclass(frozen=True)
class ModelEntry:
    """A model of the registry. `construct` takes input shape and number of classes, and its options by name."""

    construct: Callable[..., nn.Module]
    description: str

    @property
    def options(self) -> tuple[str, ...]:
        """The names of the options that `build` passes on."""
        parameters = inspect.signature(self.construct).parameters.values()
        return tuple(p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY)


MODELS: Mapping[str, ModelEntry] = {
    "vgg11": ModelEntry(partial(build_vgg, "vgg11"), "VGG11 with batch norm, images from 32×32; 8 convolutions"),
    "vgg13": ModelEntry(partial(build_vgg, "vgg13"), "VGG13 with batch norm, images from 32×32; 10 convolutions"),
    "vgg16": ModelEntry(partial(build_vgg, "vgg16"), "VGG16 with batch norm, images from 32×32; 13 convolutions"),
    "vgg-small": ModelEntry(
        partial(build_vgg_small, "vgg-small"), "small VGG, images from 4×4, made for 8×8 digits; 7 convolutions"
    ),
    "vgg-small-5": ModelEntry(
        partial(build_vgg_small, "vgg-small-5"), "the first 5 convolutions of vgg-small (a baseline's middle model)"
    ),
    "vgg-small-3": ModelEntry(
        partial(build_vgg_small, "vgg-small-3"), "3 convolutions, images from 4×4 (a baseline's smallest model)"
    ),
    "resnet10": ModelEntry(partial(build_resnet, "resnet10"), "ResNet of 4 basic blocks, images from 8×8"),
    "resnet18": ModelEntry(partial(build_resnet, "resnet18"), "ResNet18, images from 8×8; 8 basic blocks"),
    "resnet34": ModelEntry(partial(build_resnet, "resnet34"), "ResNet34, images from 8×8; 16 basic blocks"),
    "cnn3": ModelEntry(build_cnn3, "2 convolutions and a linear layer, for small images (a baseline's smallest model)"),
    "cnn4": ModelEntry(
        build_cnn4, "2 convolutions and 2 linear layers, for large images (a baseline's smallest model)"
    ),
    "vit": ModelEntry(build_vit, "vision transformer: ViT-B/16 for large images, 6 blocks of width 192 for small ones"),
}

FAMILIES: tuple[tuple[str, ...], ...] = (
    ("cnn3", "vgg11", "vgg13", "vgg16"),
    ("cnn4", "resnet10", "resnet18", "resnet34"),
    ("vgg-small-3", "vgg-small-5", "vgg-small"),
)
"""Models that the knowledge-distillation baselines train side by side, smallest first."""


def family_of(name: str) -> tuple[str, ...]:
    """Return the models that clients may train where `name` is the largest: its family up to and including it."""
    for family in FAMILIES:
        if name in family:
            return family[: family.index(name) + 1]
    raise ModelError(
        f"model {name} belongs to no family of models that clients of different memory may train. "
        f"Set distillation.family to a list of models, smallest first, that ends with {name}"
    )


def build(name: str, input_shape: tuple[int, ...], classes: int, **options: object) -> nn.Module:
    """Build a model of the registry for images of `input_shape` (channels, height, width), weights drawn anew."""
    if name not in MODELS:
        raise ModelError(unknown("model", name, MODELS))
    entry = MODELS[name]
    for option in options:
        if option not in entry.options:
            raise ModelError(unknown(f"option of model {name}", option, entry.options))
    if len(input_shape) != 3 or not all(isinstance(side, int) and side >= 1 for side in input_shape):
        raise ModelError(f"{name} takes images of channels x height x width, not {'x'.join(map(str, input_shape))}")
    if isinstance(classes, bool) or not isinstance(classes, int) or classes < 2:
        raise ModelError(f"{name} needs at least 2 classes, not {classes!r}")
    return entry.construct(tuple(input_shape), classes, **options)
