"""Residual networks for images of about 32 pixels."""

from collections import OrderedDict
from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional

from calib.models.base import ImageClassifier
from calib.parameters import in_range

BLOCKS_PER_STAGE = {8: 1, 14: 2, 20: 3, 32: 5, 44: 7, 56: 9, 110: 18}  # depth = 6n + 2


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut, projected where the shape changes (option B)."""

    def __init__(self, channels_in: int, channels: int, *, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv3x3(channels_in, channels, stride=stride)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = _conv3x3(channels, channels)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride=stride, bias=False),
                nn.BatchNorm2d(channels),
            )

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(inner)) + self.shortcut(x))


class ResNet(ImageClassifier):
    """A residual network of three stages for images of about 32 pixels.

    Args:
        num_classes: K.
        blocks: in each stage.
        width: channels of the first stage; the last has D = 4 width.
    Raises:
        InputError: width is not a whole number of at least 1.

    Source: He et al. 2016, section 4.2: 3x3 stem, no max pooling.
    """

    def __init__(self, num_classes: int, *, blocks: int, width: int = 16) -> None:
        super().__init__()
        what = "give a whole number of at least 1"
        in_range("model.width", width, low=1, what=what, whole=True)
        self.num_features = 4 * width
        self.features: nn.Module = nn.Sequential(
            OrderedDict(
                stem=nn.Sequential(_conv3x3(3, width), nn.BatchNorm2d(width), nn.ReLU()),
                stage1=_stage(width, width, blocks=blocks, stride=1),
                stage2=_stage(width, 2 * width, blocks=blocks, stride=2),
                stage3=_stage(2 * width, 4 * width, blocks=blocks, stride=2),
                pool=nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
            )
        )
        self.classifier: nn.Module = nn.Linear(self.num_features, num_classes)


def _of_depth(blocks: int) -> Callable[..., ResNet]:
    def build(num_classes: int, *, width: int = 16) -> ResNet:
        return ResNet(num_classes, blocks=blocks, width=width)

    return build


RESNETS = {f"resnet{depth}": _of_depth(blocks) for depth, blocks in BLOCKS_PER_STAGE.items()}


def _stage(channels_in: int, channels: int, *, blocks: int, stride: int) -> nn.Sequential:
    first = BasicBlock(channels_in, channels, stride=stride)
    rest = [BasicBlock(channels, channels, stride=1) for _ in range(blocks - 1)]
    return nn.Sequential(first, *rest)


def _conv3x3(channels_in: int, channels: int, *, stride: int = 1) -> nn.Conv2d:
    conv = nn.Conv2d(channels_in, channels, 3, stride=stride, padding=1, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv
