"""A model and data that are handed over in Python: what they must be, and what to say where they are something else."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fedprophet import models
from fedprophet.cascade.atoms import Chain
from fedprophet.config.config import Config
from fedprophet.data.dataset import Dataset
from fedprophet.errors import DataError, ModelError, unknown
from fedprophet.messages.modules import kinds_of
from fedprophet.settings.values import CUSTOM

COLOURS = (1, 3)
"""The channels that images have: grey, or red, green and blue."""


def check_model(model: object) -> None:
    """Raise ModelError if what is passed in as a model is none, or none of the precision that is trained."""
    if isinstance(model, type):
        raise ModelError(f"model is the class {model.__name__}. Pass a model of it: model={model.__name__}()")
    if isinstance(model, str):
        problem = f": {unknown('model', model, models.MODELS)}" if model not in models.MODELS else ""
        raise ModelError(
            f"model is the text {model!r}{problem}. A model that ships is named in the settings, as in "
            '{"model": {"name": "vgg-small"}}'
        )
    if not isinstance(model, nn.Module | Chain):
        raise ModelError(
            f"model is of type {type(model).__name__}, and must be an nn.Module or an explicit chain "
            "(fedprophet.explicit_chain)"
        )
    for name, parameter in (model.model if isinstance(model, Chain) else model).named_parameters():
        if parameter.dtype != torch.float32:
            kind = str(parameter.dtype).removeprefix("torch.")
            raise ModelError(f"{name} is {kind}; FedProphet trains float32: call model.float()")


def begin_with(chain: Chain, weights: Mapping[str, Tensor]) -> None:
    """Give a model that is passed in again the weights that its run began with; refuse one that is built otherwise."""
    ours, theirs = kinds_of(chain.tensors), kinds_of(weights)
    different = [name for name in {**theirs, **ours} if ours.get(name) != theirs.get(name)]
    if different:
        name = different[0]
        raise ModelError(
            f"the model is not built like the one that the run was started with: there {name!r} is "
            f"{_kind_text(theirs.get(name))}, and here {_kind_text(ours.get(name))}. Pass one that is built like it"
        )
    chain.load(weights)


def _kind_text(kind: tuple[torch.dtype, torch.Size] | None) -> str:
    return "not there" if kind is None else f"{str(kind[0]).removeprefix('torch.')} of shape {tuple(kind[1])}"


def handed_over(config: Config, what: str) -> str:
    named = {"model": config.model.name, "data": config.data.name}
    own = ", ".join(f"{part}=…" for part, name in named.items() if name == CUSTOM)
    return (
        f'{what}.name = "{CUSTOM}" stands for what was handed over in Python: use fedprophet.train({own}), or, with a '
        f"run that is there, fedprophet.resume(RUN, {own}), fedprophet.evaluate(RUN, {own}) or "
        f"fedprophet.export(RUN, FILE, {own})"
    )


def channels_last(shape: tuple[int, ...]) -> str:
    """Return a hint if images seem to have their channels last."""
    match shape:
        case (first, _, last) if last in COLOURS and first not in COLOURS:
            return ". Channels come first: if they are last there, pass images.permute(0, 3, 1, 2)"
    return ""


def check_data(data: object) -> None:
    """Raise DataError if what is passed in as data is no dataset of this package."""
    if not isinstance(data, Dataset):
        raise DataError(
            f"data is a {type(data).__name__}, and must be a dataset of FedProphet: make one with "
            "fedprophet.from_tensors(train_images, train_labels, test_images, test_labels) or, of map-style datasets "
            "of (image, label), with fedprophet.from_datasets(train, test)"
        )
