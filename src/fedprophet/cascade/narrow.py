"""Sub-networks of fewer channels: cut out of the full model, built for real, averaged back into it.

`kept` says which channels of each group a sub-network has (`fedprophet.cascade.channels`); names are the model's
state-dict names throughout. What is not cut (the first layer's inputs, the last layer's outputs) is passed on whole.
"""

import copy
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from fedprophet.cascade.atoms import Chain
from fedprophet.cascade.channels import BATCH_NORMS, CONVOLUTIONS, ChannelAxis, Channels, Kept
from fedprophet.errors import ModelError, unknown

Tensors = Mapping[str, Tensor]
Index = tuple[slice | Tensor, ...]


class Scaler(nn.Module):
    """What a convolution or linear layer becomes when its inputs are cut: the layer, its output scaled.

    The output, bias included, is multiplied by the full number of the layer's input channels over the kept number
    (HeteroFL's 1/r), so that it is as large as that of the full layer. A sub-network exists in local training alone,
    where it is scaled in evaluation mode too: the attack must see the function that is trained, and the norm layers'
    statistics are those of scaled activations. A layer whose inputs are whole, as the first one's are, is not scaled.
    """

    full_over_kept: float

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = super().forward(x)
        return result * self.full_over_kept

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, full_over_kept={self.full_over_kept:.4g}"


def slice_state(channels: Channels, kept: Kept, tensors: Tensors) -> dict[str, Tensor]:
    """Cut a sub-network's tensors out of full ones; all of them are new tensors."""
    return {name: _slice(channels, kept, name, tensor.detach()) for name, tensor in tensors.items()}


def scatter_average(
    channels: Channels, current: Tensors, updates: Iterable[tuple[float, Kept, Tensors]]
) -> dict[str, Tensor]:
    """Average each coordinate over the sub-networks that have it; what none of them has stays.

    An update is a client's weight, its kept channels and its tensors. Sums are taken in the order given, in float64.
    """
    sums: dict[str, Tensor] = {}
    weights: dict[str, Tensor] = {}
    for weight, kept, tensors in updates:
        for name, value in tensors.items():
            full = _full(current, name)
            if name not in sums:
                # Where the updates are: on a GPU they would take longer to fetch than to add up.
                sums[name] = torch.zeros_like(full, dtype=torch.float64, device=value.device)
                weights[name] = torch.zeros(
                    _weight_shape(channels, name, full), dtype=torch.float64, device=value.device
                )
            index = _index(channels, kept, name, sums[name], value)
            sums[name][index] += value.detach().to(sums[name]) * weight
            weights[name][index] += weight
    averaged = {}
    for name, total in sums.items():
        mean = (total / weights[name]).to(current[name].dtype)
        averaged[name] = torch.where(weights[name] > 0, mean, current[name].detach().to(mean.device))
    return {**current, **averaged}


def merge_local(channels: Channels, kept: Kept, full: Tensors, part: Tensors) -> dict[str, Tensor]:
    """Write a sub-network's tensors (a client's norm layers) into full ones: new tensors where there is a part."""
    merged = dict(full)
    for name, value in part.items():
        merged[name] = _full(full, name).detach().clone()
        merged[name][_index(channels, kept, name, merged[name], value)] = value.detach().to(merged[name])
    return merged


def narrow_model(model: nn.Module, channels: Channels, kept: Kept) -> nn.Module:
    """Return a copy of a model that really has the kept channels alone, with the values the model has for them.

    Classes, settings and state-dict names are the model's; only layers whose inputs are cut become a `Scaler` too.
    """
    narrow = copy.deepcopy(model, _parts(model, channels, kept))
    _refit(narrow, channels, kept)
    return narrow


def narrow_chain(chain: Chain, channels: Channels, kept: Kept, scaled: bool = True) -> Chain:
    """Return a chain of the same atoms around the narrow model; if not `scaled`, its layers are the model's kinds."""
    narrow = copy.deepcopy(chain, _parts(chain.model, channels, kept))
    _refit(narrow.model, channels, kept, scaled)
    return narrow


def full_over_kept(channels: Channels, kept: Kept) -> dict[str, float]:
    """Return by how much the output of each layer is scaled whose inputs are cut, by the layer's name."""
    found = {}
    for name, axes in channels.axes.items():
        for axis, group, _ in axes:
            if axis == 1 and len(kept[group]) < channels.groups[group]:
                found[name.removesuffix("weight").removesuffix(".")] = channels.groups[group] / len(kept[group])
    return found


def _parts(model: nn.Module, channels: Channels, kept: Kept) -> dict[int, Any]:
    """Return the kept part of each tensor as a memo for deepcopy, which takes what it finds there.

    So the full tensors are never copied, and tied ones stay tied.
    """
    memo: dict[int, Any] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):
            part = _slice(channels, kept, name, tensor.detach())
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(part, requires_grad=tensor.requires_grad) if is_parameter else part
    return memo


def _refit(narrow: nn.Module, channels: Channels, kept: Kept, scaled: bool = True) -> None:
    """Let the layers of a narrow model know their sizes, and scale those whose inputs were cut."""
    factors = full_over_kept(channels, kept) if scaled else {}
    for name, layer in narrow.named_modules():
        _resize(layer)
        if name in factors:
            _scale(layer, factors[name])


def _scale(layer: Any, full_over_kept: float) -> None:
    """Make a layer a `Scaler` as well; its tensors, settings and names stay."""
    kind: Any = type(layer)
    layer.__class__ = _scaled(kind)
    layer.full_over_kept = full_over_kept


@cache
def _scaled(kind: Any) -> type[nn.Module]:
    return type(f"Scaled{kind.__name__}", (Scaler, kind), {})


def _resize(layer: Any) -> None:
    """Let a layer say the sizes that its tensors have."""
    if isinstance(layer, CONVOLUTIONS):
        layer.out_channels, layer.in_channels = layer.weight.shape[:2]
    elif isinstance(layer, nn.Linear):
        layer.out_features, layer.in_features = layer.weight.shape
    elif isinstance(layer, BATCH_NORMS):
        sizes = [len(tensor) for tensor in (layer.weight, layer.running_mean) if tensor is not None]
        layer.num_features = sizes[0] if sizes else layer.num_features
    elif isinstance(layer, nn.PReLU):
        layer.num_parameters = len(layer.weight)


def _slice(channels: Channels, kept: Kept, name: str, full: Tensor) -> Tensor:
    _check_full(channels, name, full)
    part = full
    for axis in channels.axes.get(name, ()):
        part = part.index_select(axis.axis, _positions(kept, axis).to(full.device))
    return full.clone() if part is full else part


def _index(channels: Channels, kept: Kept, name: str, full: Tensor, part: Tensor) -> Index:
    """Return the coordinates of a full tensor that a sub-network has, after a look at its part's shape."""
    _check_full(channels, name, full)
    axes = channels.axes.get(name, ())
    shape = list(full.shape)
    index: list[slice | Tensor] = [slice(None)] * full.ndim
    for number, axis in enumerate(axes):
        positions = _positions(kept, axis)
        shape[axis.axis] = len(positions)
        # Indices of several axes are combined like rows and columns.
        index[axis.axis] = positions.to(full.device).view(-1, *[1] * (len(axes) - 1 - number))
    if list(part.shape) != shape:
        raise ModelError(f"tensor {name!r} of a sub-network has shape {tuple(part.shape)} instead of {tuple(shape)}")
    return tuple(index)


def _positions(kept: Kept, axis: ChannelAxis) -> Tensor:
    """Return where the kept channels lie along an axis that has `repeat` neighbours for each."""
    return (kept[axis.group].view(-1, 1) * axis.repeat + torch.arange(axis.repeat)).flatten()


def _weight_shape(channels: Channels, name: str, full: Tensor) -> list[int]:
    """Return the shape that tells coordinates of a tensor apart by who trained them: only channels differ."""
    cut = {axis.axis for axis in channels.axes.get(name, ())}
    return [size if axis in cut else 1 for axis, size in enumerate(full.shape)]


def _full(tensors: Tensors, name: str) -> Tensor:
    if name not in tensors:
        raise ModelError(unknown("tensor of the full model", name, tensors))
    return tensors[name]


def _check_full(channels: Channels, name: str, full: Tensor) -> None:
    for axis in channels.axes.get(name, ()):
        size = channels.groups[axis.group] * axis.repeat
        if full.ndim <= axis.axis or full.shape[axis.axis] != size:
            raise ModelError(
                f"tensor {name!r} has shape {tuple(full.shape)}; a full one has {size} in dimension {axis.axis}"
            )
