"""Sub-networks of fewer channels: cut out of the full model, built for real, and written back into it.

`kept` says which channels of each group a sub-network has (`fedprophet.cascade.channels`); names are the model's
state-dict names throughout. What is not cut (the first layer's inputs, the last layer's outputs) is passed on whole.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedprophet.cascade.atoms import Chain
from fedprophet.cascade.channel_flow import BATCH_NORMS, CONVOLUTIONS
from fedprophet.cascade.channels import ChannelAxis, Channels, Kept
from fedprophet.errors import ModelError, unknown

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Scaler:
    """A forward hook on a convolution or linear layer whose inputs are cut: it scales the layer's output.

    The output, bias included, is multiplied by the full number of the layer's input channels over the kept number
    (HeteroFL's 1/r), so that it is as large as that of the full layer. A sub-network exists in local training alone,
    where it is scaled in evaluation mode too: the attack must see the function that is trained, and the norm layers'
    statistics are those of scaled activations. A layer whose inputs are whole, as the first one's are, is not scaled.
    """

    full_over_kept: float

    def __call__(self, layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        return output * self.full_over_kept


def slice_state(channels: Channels, kept: Kept, tensors: Tensors) -> dict[str, Tensor]:
    """Cut a sub-network's tensors out of full ones; all of them are new tensors."""
    return {name: _slice(channels, kept, name, tensor.detach()) for name, tensor in tensors.items()}


def merge_local(channels: Channels, kept: Kept, full: Tensors, part: Tensors) -> dict[str, Tensor]:
    """Write a sub-network's tensors (a client's norm layers) into full ones: new tensors where there is a part."""
    merged = dict(full)
    for name, value in part.items():
        merged[name] = full_tensor(full, name).detach().clone()
        merged[name][kept_index(channels, kept, name, merged[name], value)] = value.detach().to(merged[name])
    return merged


def kept_index(channels: Channels, kept: Kept, name: str, full: Tensor, part: Tensor) -> tuple[slice | Tensor, ...]:
    """Return the coordinates of a full tensor that a sub-network has; its part must have the shape for them."""
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


def full_tensor(tensors: Tensors, name: str) -> Tensor:
    """Return a tensor of the full model by its name."""
    if name not in tensors:
        raise ModelError(unknown("tensor of the full model", name, tensors))
    return tensors[name]


def narrow_chain(chain: Chain, channels: Channels, kept: Kept, scaled: bool = True) -> Chain:
    """Return a chain of the same atoms around a copy of the model that has the kept channels alone, with their values.

    Classes, settings and state-dict names are the model's; if `scaled`, layers whose inputs are cut have a `Scaler`.
    """
    narrow = copy.deepcopy(chain, _parts(chain.model, channels, kept))
    factors = full_over_kept(channels, kept) if scaled else {}
    for name, layer in narrow.model.named_modules():
        _resize(layer)
        if name in factors:
            layer.register_forward_hook(Scaler(factors[name]))
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


def _positions(kept: Kept, axis: ChannelAxis) -> Tensor:
    """Return where the kept channels lie along an axis that has `repeat` neighbours for each."""
    return (kept[axis.group].view(-1, 1) * axis.repeat + torch.arange(axis.repeat)).flatten()


def _check_full(channels: Channels, name: str, full: Tensor) -> None:
    for axis in channels.axes.get(name, ()):
        size = channels.groups[axis.group] * axis.repeat
        if full.ndim <= axis.axis or full.shape[axis.axis] != size:
            raise ModelError(
                f"tensor {name!r} has shape {tuple(full.shape)}; a full one has {size} in dimension {axis.axis}"
            )
