"""VGG with batch norm (Simonyan and Zisserman, 2015), with torchvision's parameter names, and a small relative."""

from collections.abc import Sequence

from torch import Tensor, nn

from fedprophet.models.checks import check_fraction, check_least_side, check_positive, initialize, is_small
from fedprophet.models.registry import FAMILIES, model

POOL = 0
"""Stands for a 2×2 max-pool in a list of widths."""

WIDTHS: dict[str, tuple[int, ...]] = {
    "vgg11": (64, POOL, 128, POOL, 256, 256, POOL, 512, 512, POOL, 512, 512, POOL),
    "vgg13": (64, 64, POOL, 128, 128, POOL, 256, 256, POOL, 512, 512, POOL, 512, 512, POOL),
    "vgg16": (64, 64, POOL, 128, 128, POOL, 256, 256, 256, POOL, 512, 512, 512, POOL, 512, 512, 512, POOL),
}
"""As published, which is with a first convolution of 64 channels."""

SMALL_WIDTHS: dict[str, tuple[float, ...]] = {
    "vgg-small-3": (1, POOL, 2, POOL, 4),
    "vgg-small-5": (1, 1.5, POOL, 2, 4, POOL, 4),
    # Balanced for 8×8 images: no atom needs more than a quarter of the memory of the whole model (batches of 16 to 64).
    "vgg-small": (1, 1.5, POOL, 2, 4, POOL, 4, 4, 4),
}
"""In multiples of the first convolution's width, rounded down."""

FAMILIES.extend([("cnn3", *WIDTHS), tuple(SMALL_WIDTHS)])


class VGG(nn.Module):
    """Convolutions with batch norm and ReLU, pools between them, an average pool and a classifier."""

    def __init__(self, features: nn.Sequential, avgpool: nn.Module, classifier: nn.Module) -> None:
        super().__init__()
        self.features = features
        self.avgpool = avgpool
        self.classifier = classifier
        initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.avgpool(self.features(x))
        scores: Tensor = self.classifier(x.flatten(1))
        return scores


@model("vgg16", "VGG16 with batch norm, images from 32×32; 13 convolutions")
@model("vgg13", "VGG13 with batch norm, images from 32×32; 10 convolutions")
@model("vgg11", "VGG11 with batch norm, images from 32×32; 8 convolutions")
def build_vgg(
    name: str, input_shape: tuple[int, int, int], classes: int, *, dropout: float = 0.5, width: int = 64
) -> nn.Module:
    """Build vgg11, vgg13 or vgg16: as published, but with a small classifier for images up to 64 pixels.

    The first convolution has `width` channels and everything else goes with it, the classifier included.
    """
    check_least_side(name, input_shape, 32, "it halves them five times")
    check_fraction(name, dropout=dropout)
    check_positive(name, width=width)
    small = is_small(input_shape)
    pooled, hidden = (1, 8 * width) if small else (7, 64 * width)
    classifier = nn.Sequential(
        nn.Linear(8 * width * pooled * pooled, hidden),
        nn.ReLU(inplace=True),
        nn.Dropout(dropout),
        nn.Linear(hidden, hidden),
        nn.ReLU(inplace=True),
        nn.Dropout(dropout),
        nn.Linear(hidden, classes),
    )
    widths = [channels // 64 * width for channels in WIDTHS[name]]
    return VGG(convolutions(input_shape[0], widths), nn.AdaptiveAvgPool2d(pooled), classifier)


@model("vgg-small", "small VGG, images from 4×4, made for 8×8 digits; 7 convolutions")
@model("vgg-small-5", "the first 5 convolutions of vgg-small (a baseline's middle model)")
@model("vgg-small-3", "3 convolutions, images from 4×4 (a baseline's smallest model)")
def build_vgg_small(name: str, input_shape: tuple[int, int, int], classes: int, *, width: int = 16) -> nn.Module:
    """Build a VGG for images from 4×4 pixels: three, five or seven convolutions, two pools and one linear layer."""
    check_least_side(name, input_shape, 4, "it halves them twice")
    check_positive(name, width=width)
    widths = [int(multiple * width) for multiple in SMALL_WIDTHS[name]]
    classifier = nn.Sequential(nn.Linear(4 * width, classes))
    return VGG(convolutions(input_shape[0], widths), nn.AdaptiveAvgPool2d(1), classifier)


def convolutions(channels: int, widths: Sequence[int]) -> nn.Sequential:
    """Return 3×3 convolutions of the given widths, each with batch norm and ReLU, and the pools between them."""
    layers: list[nn.Module] = []
    for width in widths:
        if width == POOL:
            layers.append(nn.MaxPool2d(2))
            continue
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
        channels = width
    return nn.Sequential(*layers)
