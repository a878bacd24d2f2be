"""The operations that stacks of networks are made of, in plain torch: for any device, and to test the GPU's against.

Images are stacked as clients × samples × height × width × channels (K×N×H×W×C), convolutions as K×9×C_in×C_out with the
nine taps row by row. Statistics have one number for each client and channel (K×C), in float32.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_weight


class Kernels(Protocol):
    """What a device must offer."""

    multiple: int
    """Channels are padded with zeros to a multiple of this."""

    def convolve(self, x: Tensor, weight: Tensor, shift: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Return the 3×3 convolution; with `shift`, that is added and a ReLU follows; `mask` keeps where it is > 0."""

    def weight_gradient(self, x: Tensor, gradient: Tensor) -> Tensor:
        """Return the gradient of a convolution's weight, in float32."""

    def pool(self, x: Tensor) -> Tensor:
        """Return the 2×2 max-pool."""

    def unpool(self, x: Tensor, gradient: Tensor) -> Tensor:
        """Return the gradient of a ReLU and a 2×2 max-pool; `x` is what lies between the two."""

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and (biased) variance over samples and positions."""

    def scale_shift_relu(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        """Return max(0, scale · x + shift)."""

    def norm_sums(self, gradient: Tensor, active: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return Σ g and Σ g · x over samples and positions, where g is the gradient where `active` > 0."""

    def norm_gradient(self, gradient: Tensor, active: Tensor, x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        """Return a · g + b · x + c, where g is the gradient where `active` > 0."""


class TorchKernels:
    """Client after client, each with torch's own convolutions in channels-last layout."""

    multiple = 1

    def convolve(self, x: Tensor, weight: Tensor, shift: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        outputs = []
        for images, taps in zip(x, weight, strict=True):
            result = F.conv2d(images.permute(0, 3, 1, 2), _filters(taps), padding=1)
            outputs.append(result.permute(0, 2, 3, 1))
        stacked = _stack(outputs)
        if shift is not None:
            stacked = stacked.add_(_spread(shift, stacked)).relu_()
        return stacked if mask is None else stacked.mul_(mask > 0)

    def weight_gradient(self, x: Tensor, gradient: Tensor) -> Tensor:
        found = []
        for images, outputs in zip(x, gradient, strict=True):
            images, outputs = images.permute(0, 3, 1, 2), outputs.permute(0, 3, 1, 2)
            shape = (outputs.shape[1], images.shape[1], 3, 3)
            weight = conv2d_weight(images, shape, outputs, padding=1)  # type: ignore[no-untyped-call]
            found.append(weight.permute(2, 3, 1, 0).reshape(9, shape[1], shape[0]))
        return _stack(found).float()

    def pool(self, x: Tensor) -> Tensor:
        return _windows(x).amax(dim=(3, 5))

    def unpool(self, x: Tensor, gradient: Tensor) -> Tensor:
        k, n, h, w, c = gradient.shape
        # The four positions of a window side by side: the first largest one takes the whole gradient.
        four = _windows(x).permute(0, 1, 2, 4, 6, 3, 5).reshape(k, n, h, w, c, 4)
        winner = F.one_hot(four.argmax(dim=5), 4).to(gradient.dtype) * (four.amax(dim=5, keepdim=True) > 0)
        spread = (winner * gradient.unsqueeze(5)).reshape(k, n, h, w, c, 2, 2)
        return spread.permute(0, 1, 2, 5, 3, 6, 4).reshape(x.shape)

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        variance, mean = torch.var_mean(x.float(), dim=(1, 2, 3), correction=0)
        return mean, variance

    def scale_shift_relu(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return torch.addcmul(_spread(shift, x), _spread(scale, x), x.float()).relu_().to(x.dtype)

    def norm_sums(self, gradient: Tensor, active: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        g = gradient.float() * (active > 0)
        return g.sum(dim=(1, 2, 3)), (g * x.float()).sum(dim=(1, 2, 3))

    def norm_gradient(self, gradient: Tensor, active: Tensor, x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        g = gradient.float() * (active > 0)
        return (_spread(a, x) * g + _spread(b, x) * x.float() + _spread(c, x)).to(x.dtype)


def _stack(parts: list[Tensor]) -> Tensor:
    return parts[0].unsqueeze(0) if len(parts) == 1 else torch.stack(parts)


def _filters(taps: Tensor) -> Tensor:
    """Return one client's taps as torch's filters."""
    _, inputs, outputs = taps.shape
    return taps.view(3, 3, inputs, outputs).permute(3, 2, 0, 1)


def _spread(values: Tensor, like: Tensor) -> Tensor:
    """Return K×C numbers so that they broadcast against a stack of images."""
    return values.view(len(values), *[1] * (like.ndim - 2), -1)


def _windows(x: Tensor) -> Tensor:
    k, n, h, w, c = x.shape
    return x.view(k, n, h // 2, 2, w // 2, 2, c)
