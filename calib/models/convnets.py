"""Convolutional networks of the papers: LeNet, ResNet, WideResNet, DenseNet."""

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from semix.calib.config.model import (
    IMAGENET_STEM,
    DenseNetConfig,
    LeNetConfig,
    PaperResNetConfig,
    ResNetConfig,
    SmallResNetConfig,
    WideResNetConfig,
)
from semix.calib.models.base import ImageClassifier, modules_with_parameters


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
    """Two 3x3 convolutions, each after its norm and ReLU; the shortcut projects without a norm."""

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
    later = [block(channels * block.expansion, channels, stride=1) for _ in range(blocks - 1)]
    return nn.Sequential(first, *later)


def projection(channels_in: int, channels: int, *, stride: int) -> nn.Module:
    """The shortcut of a block: a normed 1x1 convolution where the shape changes."""
    if stride == 1 and channels_in == channels:
        return nn.Identity()
    return nn.Sequential(Pointwise(channels_in, channels, stride), nn.BatchNorm2d(channels))


class Pointwise(nn.Conv2d):
    """A 1x1 convolution without bias that takes its stride first where its input is narrow.

    oneDNN 3.13 (torch 2.15) writes past the end of a buffer in the backward pass of a strided 1x1
    convolution of fewer than 8 channels, channels last, on CPUs with AVX2 but not AVX-512.
    """

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__(channels_in, channels, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        step = self.stride[0]
        if step > 1 and self.in_channels < 8:
            return functional.conv2d(x[..., ::step, ::step], self.weight)
        return super().forward(x)


def convolution(channels_in: int, channels: int, size: int, *, stride: int = 1) -> nn.Conv2d:
    """A convolution without bias, padded to keep the size, initialised as in He et al. 2015."""
    if size == 1:
        conv: nn.Conv2d = Pointwise(channels_in, channels, stride)
    else:
        conv = nn.Conv2d(channels_in, channels, size, stride=stride, padding=size // 2, bias=False)
    if not conv.weight.is_meta:  # it has no values, and torch would load sympy to draw them
        nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv


# Three stages of basic blocks, depth = 6n + 2: He et al. 2016, section 4.2.
THREE_STAGES = {8: 1, 14: 2, 20: 3, 32: 5, 44: 7, 56: 9, 110: 18}
# Four stages: He et al. 2016, table 1. The last is the ResNet-110 of
# focal_calibration and the papers that build on it, 32 times as large as resnet110 above.
FOUR_STAGES: dict[str, tuple[type[Block], tuple[int, ...]]] = {
    "resnet18": (BasicBlock, (2, 2, 2, 2)),
    "resnet34": (BasicBlock, (3, 4, 6, 3)),
    "resnet50": (Bottleneck, (3, 4, 6, 3)),
    "resnet101": (Bottleneck, (3, 4, 23, 3)),
    "resnet152": (Bottleneck, (3, 8, 36, 3)),
    "resnet110_bottleneck": (Bottleneck, (3, 4, 26, 3)),
}


class ResNet(ImageClassifier):
    """Stages of residual blocks behind a stem; every stage but the first halves the image.

    The stem is a 3x3 convolution of stride 1, or that of ImageNet: a 7x7 convolution of stride 2
    and a max pooling of stride 2, which together make the image four times smaller. Features are
    >= 0.

    Args:
        num_classes: K.
        block: kind of block in the stages.
        blocks: number of blocks in each stage.
        widths: channels of each stage, before the block's expansion.
        stem_width: channels of the first convolution.
        grid: the last map is averaged to grid x grid pixels, all of which are features, so
            D = grid^2 expansion widths[-1].
        imagenet_stem: use the stem of ImageNet, for large images.
    """

    def __init__(
        self,
        num_classes: int,
        *,
        block: type[Block],
        blocks: Sequence[int],
        widths: Sequence[int],
        stem_width: int,
        grid: int = 1,
        imagenet_stem: bool = False,
    ) -> None:
        super().__init__()
        modules: OrderedDict[str, nn.Module] = OrderedDict()
        kernel, stride = (7, 2) if imagenet_stem else (3, 1)
        first = convolution(3, stem_width, kernel, stride=stride)
        layers: list[nn.Module] = [first, nn.BatchNorm2d(stem_width), nn.ReLU()]
        if imagenet_stem:
            layers.append(nn.MaxPool2d(3, stride=2, padding=1))
        modules["stem"] = nn.Sequential(*layers)
        channels = stem_width
        for number, (count, width) in enumerate(zip(blocks, widths, strict=True), start=1):
            modules[f"stage{number}"] = stage(
                block, channels, width, blocks=count, stride=1 if number == 1 else 2
            )
            channels = width * block.expansion
        modules["pool"] = nn.Sequential(nn.AdaptiveAvgPool2d(grid), nn.Flatten())
        self.num_features = channels * grid**2
        self.features: nn.Module = nn.Sequential(modules)
        self.classifier: nn.Module = nn.Linear(self.num_features, num_classes)

    def freezing_order(self) -> list[nn.Module]:
        """Classifier, blocks from the last to the first, stem. A ResNet-18 has 10 such modules."""
        stem, *stages = modules_with_parameters(self.features.children())
        blocks = [block for stage in stages for block in stage.children()]
        return [self.classifier, *reversed(blocks), stem]


def small_resnet(num_classes: int, settings: SmallResNetConfig) -> ResNet:
    """A ResNet of three stages."""
    depth, width = int(settings.name.removeprefix("resnet")), settings.width
    return ResNet(
        num_classes,
        block=BasicBlock,
        blocks=[THREE_STAGES[depth]] * 3,
        widths=(width, 2 * width, 4 * width),
        stem_width=width,
    )


def resnet(num_classes: int, settings: ResNetConfig) -> ResNet:
    """A ResNet of four stages, with a choice of stem."""
    return _four_stages(
        num_classes, settings.name, settings.width, imagenet_stem=settings.stem == IMAGENET_STEM
    )


def paper_resnet(num_classes: int, settings: PaperResNetConfig) -> ResNet:
    """A ResNet of focal_calibration; those for Tiny-ImageNet have features of 2 x 2 pixels."""
    name = settings.name.removesuffix("_tiny")
    grid = 1 if name == settings.name else 2
    return _four_stages(num_classes, name, settings.width, grid=grid)


def _four_stages(
    num_classes: int, name: str, width: int, *, grid: int = 1, imagenet_stem: bool = False
) -> ResNet:
    block, blocks = FOUR_STAGES[name]
    return ResNet(
        num_classes,
        block=block,
        blocks=blocks,
        widths=tuple(width * 2**number for number in range(4)),
        stem_width=width,
        grid=grid,
        imagenet_stem=imagenet_stem,
    )


STEM_WIDTH = 16  # channels of the first convolution


class WideResNet(ImageClassifier):
    """Three stages of pre-activation blocks: WRN-(6n+4)-k. Features are >= 0.

    Args:
        num_classes: K.
        blocks: n, number of blocks in each stage.
        widening: k; stages have 16k, 32k and 64k channels, the last is D.

    Source: Zagoruyko and Komodakis 2016, table 1, without dropout.
    """

    def __init__(self, num_classes: int, *, blocks: int, widening: int) -> None:
        super().__init__()
        widths = [STEM_WIDTH * widening * factor for factor in (1, 2, 4)]
        modules: OrderedDict[str, nn.Module] = OrderedDict(stem=convolution(3, STEM_WIDTH, 3))
        for number, (inputs, width) in enumerate(
            zip([STEM_WIDTH, *widths], widths, strict=False), 1
        ):
            modules[f"stage{number}"] = stage(
                PreActivationBlock, inputs, width, blocks=blocks, stride=1 if number == 1 else 2
            )
        modules["norm"] = nn.BatchNorm2d(widths[-1])
        modules["pool"] = nn.Sequential(nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.num_features = widths[-1]
        self.features: nn.Module = nn.Sequential(modules)
        self.classifier: nn.Module = nn.Linear(self.num_features, num_classes)

    def freezing_order(self) -> list[nn.Module]:
        """Classifier, the last norm, blocks from the last to the first, stem."""
        stem, *stages, norm = modules_with_parameters(self.features.children())
        blocks = [block for stage in stages for block in stage.children()]
        return [self.classifier, norm, *reversed(blocks), stem]


def wide_resnet(num_classes: int, settings: WideResNetConfig) -> ImageClassifier:
    """A WideResNet by its name, `wrn` depth `_` widening."""
    depth, widening = map(int, settings.name.removeprefix("wrn").split("_"))
    if settings.name == "wrn26_10":
        # 26 is no 6n + 4: the WRN-26-10 of focal_calibration and the papers that build on it is a
        # ResNet of 6n + 2 layers, with norms behind the convolutions.
        widths = tuple(STEM_WIDTH * widening * factor for factor in (1, 2, 4))
        return ResNet(
            num_classes, block=BasicBlock, blocks=(4, 4, 4), widths=widths, stem_width=STEM_WIDTH
        )
    return WideResNet(num_classes, blocks=(depth - 4) // 6, widening=widening)


class DenseLayer(nn.Module):
    """Appends `growth` channels to its input, by a 1x1 and a 3x3 convolution."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv1 = convolution(channels, 4 * growth, 1)
        self.norm2 = nn.BatchNorm2d(4 * growth)
        self.conv2 = convolution(4 * growth, growth, 3)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.conv1(functional.relu(self.norm1(x)))
        added = self.conv2(functional.relu(self.norm2(inner)))
        return torch.cat([x, added], dim=1)


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
        modules: OrderedDict[str, nn.Module] = OrderedDict(stem=convolution(3, channels, 3))
        for number, layers in enumerate(blocks, start=1):
            if number > 1:
                modules[f"transition{number - 1}"] = _transition(channels, channels // 2)
                channels //= 2
            modules[f"dense{number}"] = nn.Sequential(
                *[DenseLayer(channels + growth * n, growth) for n in range(layers)]
            )
            channels += growth * layers
        modules["norm"] = nn.BatchNorm2d(channels)
        modules["pool"] = nn.Sequential(nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.num_features = channels
        self.features: nn.Module = nn.Sequential(modules)
        self.classifier: nn.Module = nn.Linear(channels, num_classes)


def densenet121(num_classes: int, settings: DenseNetConfig) -> DenseNet:
    """DenseNet-121: D = 1024."""
    return DenseNet(num_classes, blocks=(6, 12, 24, 16), growth=32)


def _transition(channels_in: int, channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.BatchNorm2d(channels_in),
        nn.ReLU(),
        convolution(channels_in, channels, 1),
        nn.AvgPool2d(2),
    )


class LeNet(ImageClassifier):
    """Two 5x5 convolutions and two hidden layers, with today's ReLU and max pooling.

    Without batch norms it overfits a small training set, which makes it the quickest honest
    example of overconfidence.

    `width` multiplies every layer; D = 84 width.

    Source: LeCun et al. 1998, section II.B.
    """

    def __init__(self, num_classes: int, settings: LeNetConfig) -> None:
        super().__init__()
        width = settings.width
        self.num_features = 84 * width
        self.features = nn.Sequential(
            nn.Conv2d(3, 6 * width, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6 * width, 16 * width, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.AdaptiveAvgPool2d(5),  # no change at 32 pixels; other sizes fit as well
            nn.Flatten(),
            nn.Linear(400 * width, 120 * width),
            nn.ReLU(),
            nn.Linear(120 * width, 84 * width),
            nn.ReLU(),
        )
        self.classifier = nn.Linear(self.num_features, num_classes)
