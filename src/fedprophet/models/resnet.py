"""ResNet of basic blocks (He et al., 2016), with torchvision's parameter names."""

from torch import Tensor, nn

from fedprophet.models.checks import check_least_side, check_positive, initialize, is_small
from fedprophet.models.registry import FAMILIES, model

BLOCKS: dict[str, tuple[int, int, int, int]] = {
    "resnet10": (1, 1, 1, 1),
    "resnet18": (2, 2, 2, 2),
    "resnet34": (3, 4, 6, 3),
}
FAMILIES.append(("cnn4", *BLOCKS))


class BasicBlock(nn.Module):
    """Two 3×3 convolutions and a shortcut around them."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample: nn.Module | None = None
        if stride != 1 or channels != width:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels, width, 1, stride=stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        inner = self.relu(self.bn1(self.conv1(x)))
        result: Tensor = self.relu(self.bn2(self.conv2(inner)) + shortcut)
        return result


class ResNet(nn.Module):
    """A stem, four layers of blocks, an average pool and one linear layer."""

    def __init__(self, channels: int, blocks: tuple[int, int, int, int], classes: int, small: bool, width: int) -> None:
        super().__init__()
        kernel, stride = (3, 1) if small else (7, 2)
        self.conv1 = nn.Conv2d(channels, width, kernel, stride=stride, padding=kernel // 2, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.Identity() if small else nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = _layer(width, width, blocks[0], 1)
        self.layer2 = _layer(width, 2 * width, blocks[1], 2)
        self.layer3 = _layer(2 * width, 4 * width, blocks[2], 2)
        self.layer4 = _layer(4 * width, 8 * width, blocks[3], 2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8 * width, classes)
        initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        scores: Tensor = self.fc(self.avgpool(x).flatten(1))
        return scores


@model("resnet34", "ResNet34, images from 8×8; 16 basic blocks")
@model("resnet18", "ResNet18, images from 8×8; 8 basic blocks")
@model("resnet10", "ResNet of 4 basic blocks, images from 8×8")
def build_resnet(name: str, input_shape: tuple[int, int, int], classes: int, *, width: int = 64) -> nn.Module:
    """Build resnet10, 18 or 34, its stem `width` wide; images up to 64 pixels get a 3×3 stem without a pool."""
    check_least_side(name, input_shape, 8, "it halves them three times")
    check_positive(name, width=width)
    return ResNet(input_shape[0], BLOCKS[name], classes, is_small(input_shape), width)


def _layer(channels: int, width: int, blocks: int, stride: int) -> nn.Sequential:
    first = BasicBlock(channels, width, stride)
    return nn.Sequential(first, *(BasicBlock(width, width, 1) for _ in range(blocks - 1)))
