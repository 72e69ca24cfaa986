"""Residual networks for images of about 32 or 64 pixels."""

from collections import OrderedDict
from collections.abc import Callable, Sequence

from torch import nn

from calib.models.base import ImageClassifier, parameterised
from calib.models.residual_blocks import BasicBlock, Block, Bottleneck, convolution, stage
from calib.parameters import in_range

# Three stages of basic blocks, depth = 6n + 2: He et al. 2016, section 4.2.
THREE_STAGES = {8: 1, 14: 2, 20: 3, 32: 5, 44: 7, 56: 9, 110: 18}
# Four stages: He et al. 2016, table 1, on a 3x3 stem. The last is the ResNet-110 of
# focal_calibration and the papers that build on it, 32 times as large as the one above.
FOUR_STAGES: dict[str, tuple[type[Block], tuple[int, ...]]] = {
    "resnet18": (BasicBlock, (2, 2, 2, 2)),
    "resnet34": (BasicBlock, (3, 4, 6, 3)),
    "resnet50": (Bottleneck, (3, 4, 6, 3)),
    "resnet101": (Bottleneck, (3, 4, 23, 3)),
    "resnet152": (Bottleneck, (3, 8, 36, 3)),
    "resnet110_bottleneck": (Bottleneck, (3, 4, 26, 3)),
}


class ResNet(ImageClassifier):
    """Stages of residual blocks behind a 3x3 convolution of stride 1, without max pooling.

    Every stage but the first halves the image. Features are >= 0.

    Args:
        num_classes: K.
        block: of which the stages consist.
        blocks: in each stage.
        widths: channels of each stage, before the block's expansion.
        stem: channels of the first convolution.
        grid: the last map is averaged to grid x grid pixels, all of which are features, so
            D = grid^2 expansion widths[-1].
    """

    def __init__(
        self,
        num_classes: int,
        *,
        block: type[Block],
        blocks: Sequence[int],
        widths: Sequence[int],
        stem: int,
        grid: int = 1,
    ) -> None:
        super().__init__()
        parts: OrderedDict[str, nn.Module] = OrderedDict()
        parts["stem"] = nn.Sequential(convolution(3, stem, 3), nn.BatchNorm2d(stem), nn.ReLU())
        channels = stem
        for number, (count, width) in enumerate(zip(blocks, widths, strict=True), start=1):
            parts[f"stage{number}"] = stage(
                block, channels, width, blocks=count, stride=1 if number == 1 else 2
            )
            channels = width * block.expansion
        parts["pool"] = nn.Sequential(nn.AdaptiveAvgPool2d(grid), nn.Flatten())
        self.num_features = channels * grid**2
        self.features: nn.Module = nn.Sequential(parts)
        self.classifier: nn.Module = nn.Linear(self.num_features, num_classes)

    def freezing_order(self) -> list[nn.Module]:
        """Classifier, blocks from the last to the first, stem: 10 parts of a ResNet-18."""
        stem, *stages = parameterised(self.features.children())
        blocks = [block for stage in stages for block in stage.children()]
        return [self.classifier, *reversed(blocks), stem]


def _three_stages(blocks: int) -> Callable[..., ResNet]:
    def build(num_classes: int, *, width: int = 16) -> ResNet:
        _check_width(width)
        widths = (width, 2 * width, 4 * width)
        return ResNet(num_classes, block=BasicBlock, blocks=[blocks] * 3, widths=widths, stem=width)

    return build


def _four_stages(block: type[Block], blocks: Sequence[int], *, grid: int) -> Callable[..., ResNet]:
    def build(num_classes: int, *, width: int = 64) -> ResNet:
        _check_width(width)
        widths = tuple(width * 2**number for number in range(4))
        return ResNet(num_classes, block=block, blocks=blocks, widths=widths, stem=width, grid=grid)

    return build


def _check_width(width: int) -> None:
    in_range("model.width", width, low=1, what="give a whole number of at least 1", whole=True)


RESNETS: dict[str, Callable[..., ResNet]] = {
    f"resnet{depth}": _three_stages(blocks) for depth, blocks in THREE_STAGES.items()
}
RESNETS |= {name: _four_stages(*parts, grid=1) for name, parts in FOUR_STAGES.items()}
# As the official calibration code has them for Tiny-ImageNet, 64 pixels.
RESNETS |= {f"{name}_tiny": _four_stages(*parts, grid=2) for name, parts in FOUR_STAGES.items()}
