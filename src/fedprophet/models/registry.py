"""The models that ship: the `model` decorator registers a builder beside its code; `build` finds it by name."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, TypeVar

from pydantic import Field
from torch import nn

from fedprophet.errors import ModelError, unknown
from fedprophet.settings.registry import keyword_options, unknown_options
from fedprophet.settings.section import Section
from fedprophet.settings.values import CUSTOM, OneOf, Options

Builder = TypeVar("Builder", bound=Callable[..., nn.Module])


@dataclass(frozen=True)
class ModelEntry:
    """A model that ships. `construct` takes its name, the input shape, the number of classes, and its options."""

    construct: Callable[..., nn.Module]
    help: str

    @property
    def options(self) -> tuple[str, ...]:
        """The names of its options: the builder's keyword arguments."""
        return keyword_options(self.construct)


MODELS: dict[str, ModelEntry] = {}
FAMILIES: list[tuple[str, ...]] = []
"""Models that the knowledge-distillation baselines train side by side, smallest first."""


def model(name: str, help: str) -> Callable[[Builder], Builder]:
    """Register a builder `build(name, input_shape, classes, *, option=…)`. It may have several names."""

    def register(construct: Builder) -> Builder:
        MODELS[name] = ModelEntry(construct, help)
        return construct

    return register


def family_of(name: str) -> tuple[str, ...]:
    """Return the models that clients may train where `name` is the largest: its family up to and including it."""
    for family in FAMILIES:
        if name in family:
            return family[: family.index(name) + 1]
    raise ModelError(
        f"model {name} belongs to no family of models for clients with different amounts of memory. "
        f"Set distillation.family to a list of models, smallest first, that ends with {name}"
    )


def build(name: str, input_shape: tuple[int, ...], classes: int, **options: object) -> nn.Module:
    """Build a model for images of `input_shape` (channels, height, width), with newly drawn weights."""
    if name not in MODELS:
        raise ModelError(unknown("model", name, MODELS))
    entry = MODELS[name]
    for problem in unknown_options(f"model {name}", options, entry.options):
        raise ModelError(problem)
    if len(input_shape) != 3 or not all(isinstance(side, int) and side >= 1 for side in input_shape):
        raise ModelError(f"{name} takes images of channels x height x width, not {'x'.join(map(str, input_shape))}")
    if isinstance(classes, bool) or not isinstance(classes, int) or classes < 2:
        raise ModelError(f"{name} needs at least 2 classes, not {classes!r}")
    return entry.construct(name, tuple(input_shape), classes, **options)


def _choices() -> Mapping[str, str]:
    return {name: entry.help for name, entry in MODELS.items()} | {CUSTOM: "a model passed to fedprophet.train"}


class ModelSettings(Section):
    """The model that is trained."""

    name: Annotated[str, OneOf(_choices)] = Field(default="vgg-small", description="The model's name.")
    options: Options = Field(default_factory=dict, description="Passed on to the model's builder as they are.")
    weights: str = Field(
        default="",
        description='Starting weights: a safetensors file with torchvision\'s names, or "imagenet"; "": drawn anew.',
    )

    def conflicts(self, config: object) -> Iterator[str]:
        """Yield a line for each option that the model's builder does not have."""
        if self.name in MODELS:
            problems = unknown_options(f"model {self.name}", self.options, MODELS[self.name].options)
            yield from (f"model.options: {problem}" for problem in problems)
