"""Batch norm folded into the convolution before it while neither changes: in attacks and in evaluation.

In evaluation mode a norm layer is an affine map of each channel, so that with s = gamma / sqrt(variance + eps)

    BN(W ∗ x + b) = gamma · (W ∗ x + b − mean) / sqrt(variance + eps) + beta = (s·W) ∗ x + s·(b − mean) + beta,

which is one convolution: nothing of the size of a feature is computed, stored or differentiated for the norm layer.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedprophet.cascade.atoms import Chain


def fold(convolution: nn.Conv2d, norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """Return weight and bias of the convolution that does the work of both."""
    # torch.nn.utils.fusion cuts the gradients to both layers and rounds the bias differently: runs would not repeat.
    assert norm.running_mean is not None
    assert norm.running_var is not None
    scale = torch.rsqrt(norm.running_var + norm.eps)
    if norm.weight is not None:
        scale = scale * norm.weight
    shift = -norm.running_mean if convolution.bias is None else convolution.bias - norm.running_mean
    bias = shift * scale if norm.bias is None else torch.addcmul(norm.bias, shift, scale)
    return convolution.weight * scale.view(-1, 1, 1, 1), bias


class FoldedConvolution(nn.Module):
    """A convolution and its norm layer in evaluation mode. It folds their parameters at every call, or once if held."""

    def __init__(self, convolution: nn.Conv2d, norm: nn.BatchNorm2d) -> None:
        super().__init__()
        self.convolution = convolution
        self.norm = norm
        self.held: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.held or fold(self.convolution, self.norm)
        return convolve(self.convolution, x, weight, bias)


def folded(convolution: nn.Module, norm: nn.Module) -> FoldedConvolution | None:
    """Return both as one layer; None if they do anything but what the equation says."""
    if type(convolution) is not nn.Conv2d or type(norm) is not nn.BatchNorm2d:
        return None
    has_statistics = norm.running_mean is not None and norm.running_var is not None
    if not has_statistics or convolution.padding_mode != "zeros" or is_hooked(convolution) or is_hooked(norm):
        return None
    return FoldedConvolution(convolution, norm)


@contextmanager
def held(chain: Chain, first: int, last: int | None) -> Iterator[None]:
    """Fold once for a `with` block in which no parameter of atoms `first` … `last` − 1 changes."""
    layers = [layer for layer in chain.modules(first, last) if isinstance(layer, FoldedConvolution)]
    try:
        with torch.no_grad():
            for layer in layers:
                layer.held = fold(layer.convolution, layer.norm)
        yield
    finally:
        for layer in layers:
            layer.held = None


class Pointwise(nn.Module):
    """A 1×1 convolution with a stride, which first drops the positions that the stride skips."""

    def __init__(self, convolution: nn.Conv2d) -> None:
        super().__init__()
        self.convolution = convolution

    def forward(self, x: Tensor) -> Tensor:
        return convolve(self.convolution, x, self.convolution.weight, self.convolution.bias)


def convolve(layer: nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Do what a convolution does, with another weight and bias."""
    if not is_strided_pointwise(layer):
        return F.conv2d(x, weight, bias, layer.stride, layer.padding, layer.dilation, layer.groups)
    down, right = layer.stride
    return F.conv2d(x[:, :, ::down, ::right], weight, bias, groups=layer.groups)


def is_strided_pointwise(layer: nn.Module) -> bool:
    """Whether a layer is a 1×1 convolution that skips positions, as on the shortcuts of a ResNet.

    With channels last and fewer channels than a vector has places, oneDNN (up to 3.12 at least) writes past its memory
    in the gradient of such a weight. Without the stride it does not.
    """
    if not isinstance(layer, nn.Conv2d):
        return False
    return layer.kernel_size == (1, 1) and layer.stride != (1, 1) and layer.padding in ((0, 0), "valid")


def is_hooked(layer: nn.Module) -> bool:
    """Whether hooks are registered on a layer."""
    return bool(layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks)
