"""DenseNet-BC for images of about 32 pixels."""

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from calib.models.base import ImageClassifier
from calib.models.residual_blocks import convolution


class DenseLayer(nn.Module):
    """Adds `growth` channels to what it sees, by a 1x1 and a 3x3 convolution."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv1 = convolution(channels, 4 * growth, 1)
        self.norm2 = nn.BatchNorm2d(4 * growth)
        self.conv2 = convolution(4 * growth, growth, 3)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.conv1(functional.relu(self.norm1(x)))
        new = self.conv2(functional.relu(self.norm2(inner)))
        return torch.cat([x, new], dim=1)


class DenseNet(ImageClassifier):
    """Dense blocks behind a 3x3 convolution; each transition halves channels and image.

    Features are >= 0.

    Args:
        num_classes: K.
        blocks: layers in each dense block.
        growth: channels that a layer adds.

    Source: Huang et al. 2017, DenseNet-BC, with the stem of the official calibration code.
    """

    def __init__(self, num_classes: int, *, blocks: Sequence[int], growth: int) -> None:
        super().__init__()
        channels = 2 * growth
        parts: OrderedDict[str, nn.Module] = OrderedDict(stem=convolution(3, channels, 3))
        for number, layers in enumerate(blocks, start=1):
            if number > 1:
                parts[f"transition{number - 1}"] = _transition(channels, channels // 2)
                channels //= 2
            parts[f"dense{number}"] = nn.Sequential(
                *[DenseLayer(channels + growth * n, growth) for n in range(layers)]
            )
            channels += growth * layers
        parts["norm"] = nn.BatchNorm2d(channels)
        parts["pool"] = nn.Sequential(nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.num_features = channels
        self.features: nn.Module = nn.Sequential(parts)
        self.classifier: nn.Module = nn.Linear(channels, num_classes)


def densenet121(num_classes: int) -> DenseNet:
    """DenseNet-121: D = 1024."""
    return DenseNet(num_classes, blocks=(6, 12, 24, 16), growth=32)


def _transition(channels_in: int, channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.BatchNorm2d(channels_in),
        nn.ReLU(),
        convolution(channels_in, channels, 1),
        nn.AvgPool2d(2),
    )
