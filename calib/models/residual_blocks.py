"""Residual blocks, and stages of them."""

from torch import Tensor, nn
from torch.nn import functional


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut, projected where the shape changes (option B)."""

    expansion = 1  # output channels per channel of the stage

    def __init__(self, channels_in: int, channels: int, *, stride: int) -> None:
        super().__init__()
        self.conv1 = convolution(channels_in, channels, 3, stride=stride)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = convolution(channels, channels, 3)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut = projection(channels_in, channels, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(inner)) + self.shortcut(x))


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions, the last four times as wide; the 3x3 one has the stride."""

    expansion = 4

    def __init__(self, channels_in: int, channels: int, *, stride: int) -> None:
        super().__init__()
        self.conv1 = convolution(channels_in, channels, 1)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = convolution(channels, channels, 3, stride=stride)
        self.norm2 = nn.BatchNorm2d(channels)
        self.conv3 = convolution(channels, 4 * channels, 1)
        self.norm3 = nn.BatchNorm2d(4 * channels)
        self.shortcut = projection(channels_in, 4 * channels, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.relu(self.norm1(self.conv1(x)))
        inner = functional.relu(self.norm2(self.conv2(inner)))
        return functional.relu(self.norm3(self.conv3(inner)) + self.shortcut(x))


class PreActivationBlock(nn.Module):
    """Two 3x3 convolutions, each after its norm and ReLU; a bare projection beside them."""

    expansion = 1

    def __init__(self, channels_in: int, channels: int, *, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(channels_in)
        self.conv1 = convolution(channels_in, channels, 3, stride=stride)
        self.norm2 = nn.BatchNorm2d(channels)
        self.conv2 = convolution(channels, channels, 3)
        self.projects = stride != 1 or channels_in != channels
        self.shortcut: nn.Module = nn.Identity()
        if self.projects:
            self.shortcut = convolution(channels_in, channels, 1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        active = functional.relu(self.norm1(x))
        inner = self.conv2(functional.relu(self.norm2(self.conv1(active))))
        shortcut: Tensor = self.shortcut(active if self.projects else x)
        return inner + shortcut


Block = BasicBlock | Bottleneck | PreActivationBlock


def stage(
    block: type[Block], channels_in: int, channels: int, *, blocks: int, stride: int
) -> nn.Sequential:
    """Blocks in a row, the first of which changes the shape; channels x expansion come out."""
    first = block(channels_in, channels, stride=stride)
    rest = [block(channels * block.expansion, channels, stride=1) for _ in range(blocks - 1)]
    return nn.Sequential(first, *rest)


def projection(channels_in: int, channels: int, *, stride: int) -> nn.Module:
    """The shortcut of a block: a normed 1x1 convolution where the shape changes."""
    if stride == 1 and channels_in == channels:
        return nn.Identity()
    return nn.Sequential(
        nn.Conv2d(channels_in, channels, 1, stride=stride, bias=False), nn.BatchNorm2d(channels)
    )


def convolution(channels_in: int, channels: int, size: int, *, stride: int = 1) -> nn.Conv2d:
    """Without bias, padded to keep the size, with weights after He et al. 2015."""
    conv = nn.Conv2d(channels_in, channels, size, stride=stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv
