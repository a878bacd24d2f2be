"""The small models of the paper's knowledge-distillation baselines: CNN3 for small images, CNN4 for large ones."""

from torch import Tensor, nn

from fedprophet.models.checks import check_least_side, check_positive, initialize
from fedprophet.models.registry import model


class CNN(nn.Module):
    """Convolutions and a classifier behind an adaptive max-pool."""

    def __init__(self, features: nn.Sequential, classifier: nn.Sequential) -> None:
        super().__init__()
        self.features = features
        self.classifier = classifier
        initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.classifier(self.features(x).flatten(1))
        return scores


@model("cnn3", "2 convolutions and a linear layer, for small images (a baseline's smallest model)")
def build_cnn3(name: str, input_shape: tuple[int, int, int], classes: int, *, width: int = 64) -> nn.Module:
    """Build two 3×3 convolutions, the second with stride 2, and one linear layer."""
    check_least_side(name, input_shape, 3, "two positions are left to pool")
    check_positive(name, width=width)
    features = nn.Sequential(
        *_convolution(input_shape[0], width, kernel=3, stride=1),
        *_convolution(width, 2 * width, kernel=3, stride=2),
        nn.AdaptiveMaxPool2d(2),
    )
    return CNN(features, nn.Sequential(nn.Linear(8 * width, classes)))


@model("cnn4", "2 convolutions and 2 linear layers, for large images (a baseline's smallest model)")
def build_cnn4(name: str, input_shape: tuple[int, int, int], classes: int, *, width: int = 64) -> nn.Module:
    """Build two 7×7 convolutions with stride 2 and two linear layers."""
    check_least_side(name, input_shape, 49, "seven positions are left to pool")
    check_positive(name, width=width)
    features = nn.Sequential(
        *_convolution(input_shape[0], width, kernel=7, stride=2),
        nn.MaxPool2d(2),
        *_convolution(width, 2 * width, kernel=7, stride=2),
        nn.AdaptiveMaxPool2d(7),
    )
    classifier = nn.Sequential(nn.Linear(98 * width, 8 * width), nn.ReLU(inplace=True), nn.Linear(8 * width, classes))
    return CNN(features, classifier)


def _convolution(channels: int, width: int, kernel: int, stride: int) -> list[nn.Module]:
    convolution = nn.Conv2d(channels, width, kernel, stride=stride, padding=kernel // 2)
    return [convolution, nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
