"""Starting weights, drawn from torch's global generator, which the caller seeds."""

from torch import nn


def initialize(model: nn.Module) -> None:
    """Draw convolutions as He et al. do, by fan-out; norm layers and linear layers keep PyTorch's own start."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
