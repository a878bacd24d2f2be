"""What every builder needs: checks with errors that say what to change, and starting weights."""

from torch import nn

from fedprophet.errors import ModelError
from fedprophet.settings.toml import shown

MOST = 10**6
FOR_SMALL = ("vgg-small", "cnn3")
SMALL = 64
"""Images of at most this many pixels a side get the small form of a model."""


def is_small(input_shape: tuple[int, int, int]) -> bool:
    """Whether a model for these images takes its small form."""
    return max(input_shape[1:]) <= SMALL


def check_least_side(model: str, input_shape: tuple[int, int, int], least: int, why: str) -> None:
    """Raise ModelError if a side of the image is shorter than the model can take."""
    if min(input_shape[1:]) < least:
        others = ", ".join(other for other in FOR_SMALL if other != model)
        raise ModelError(
            f"{model} needs images of at least {least}×{least} pixels ({why}), not {input_shape[1]}×{input_shape[2]}. "
            f"Use larger images (--input is channels, height, width) or a model for small ones ({others})"
        )


def check_positive(model: str, most: int = MOST, **options: int) -> None:
    """Raise ModelError if an option is not a positive whole number of at most `most`."""
    for name, value in options.items():
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            text = f"option {name} of {model} must be a positive whole number, not {shown(value)}"
            raise ModelError(f"{text}. The most is {most}")


def check_fraction(model: str, **options: float) -> None:
    """Raise ModelError if an option is not a number of at least 0 and below 1."""
    for name, value in options.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
            raise ModelError(f"option {name} of {model} must be a number of at least 0 and below 1, not {value!r}")


def initialize(model: nn.Module) -> None:
    """Draw convolutions by fan-out, as He et al. do, from torch's global generator; other layers keep their start."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
