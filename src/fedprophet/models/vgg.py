"""VGG with batch norm (Simonyan and Zisserman, 2015), with torchvision's parameter names, and a small relative."""

from collections.abc import Sequence

from torch import Tensor, nn

from fedprophet.models.checks import check_fraction, check_least_side, check_positive, is_small
from fedprophet.models.initialize import initialize

POOL = 0
"""Stands for a 2×2 max-pool in a list of widths."""

WIDTHS: dict[str, tuple[int, ...]] = {
    "vgg11": (64, POOL, 128, POOL, 256, 256, POOL, 512, 512, POOL, 512, 512, POOL),
    "vgg13": (64, 64, POOL, 128, 128, POOL, 256, 256, POOL, 512, 512, POOL, 512, 512, POOL),
    "vgg16": (64, 64, POOL, 128, 128, POOL, 256, 256, 256, POOL, 512, 512, 512, POOL, 512, 512, 512, POOL),
}


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


def build_vgg(name: str, input_shape: tuple[int, int, int], classes: int, *, dropout: float = 0.5) -> nn.Module:
    """Build vgg11, vgg13 or vgg16: as published, but with a small classifier for images up to 64 pixels."""
    check_least_side(name, input_shape, 32, "it halves them five times")
    check_fraction(name, dropout=dropout)
    small = is_small(input_shape)
    pooled, hidden = (1, 512) if small else (7, 4096)
    classifier = nn.Sequential(
        nn.Linear(512 * pooled * pooled, hidden),
        nn.ReLU(inplace=True),
        nn.Dropout(dropout),
        nn.Linear(hidden, hidden),
        nn.ReLU(inplace=True),
        nn.Dropout(dropout),
        nn.Linear(hidden, classes),
    )
    return VGG(convolutions(input_shape[0], WIDTHS[name]), nn.AdaptiveAvgPool2d(pooled), classifier)


def build_vgg_small(input_shape: tuple[int, int, int], classes: int, *, width: int = 16) -> nn.Module:
    """Build a VGG for images from 4×4 pixels: seven convolutions, two pools and one linear layer."""
    check_least_side("vgg-small", input_shape, 4, "it halves them twice")
    check_positive("vgg-small", width=width)
    # Balanced for 8×8 images: no atom needs more than a quarter of the memory of the whole model (batches of 16 to 64).
    widths = (width, 3 * width // 2, POOL, 2 * width, 4 * width, POOL, 4 * width, 4 * width, 4 * width)
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
