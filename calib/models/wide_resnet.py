"""Wide residual networks."""

from collections import OrderedDict
from collections.abc import Callable

from torch import nn

from calib.models.base import ImageClassifier, parameterised
from calib.models.residual_blocks import BasicBlock, PreActivationBlock, convolution, stage
from calib.models.resnet import ResNet

STEM = 16  # channels of the first convolution


class WideResNet(ImageClassifier):
    """Three stages of pre-activation blocks: WRN-(6n+4)-k. Features are >= 0.

    Args:
        num_classes: K.
        blocks: n, in each stage.
        widening: k; stages have 16k, 32k and 64k channels, the last is D.

    Source: Zagoruyko and Komodakis 2016, table 1, without dropout.
    """

    def __init__(self, num_classes: int, *, blocks: int, widening: int) -> None:
        super().__init__()
        widths = [STEM * widening * factor for factor in (1, 2, 4)]
        parts: OrderedDict[str, nn.Module] = OrderedDict(stem=convolution(3, STEM, 3))
        for number, (before, width) in enumerate(zip([STEM, *widths], widths, strict=False), 1):
            parts[f"stage{number}"] = stage(
                PreActivationBlock, before, width, blocks=blocks, stride=1 if number == 1 else 2
            )
        parts["norm"] = nn.BatchNorm2d(widths[-1])
        parts["pool"] = nn.Sequential(nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.num_features = widths[-1]
        self.features: nn.Module = nn.Sequential(parts)
        self.classifier: nn.Module = nn.Linear(self.num_features, num_classes)

    def freezing_order(self) -> list[nn.Module]:
        """Classifier, the last norm, blocks from the last to the first, stem."""
        stem, *stages, norm = parameterised(self.features.children())
        blocks = [block for stage in stages for block in stage.children()]
        return [self.classifier, norm, *reversed(blocks), stem]


def _of_depth(depth: int, widening: int) -> Callable[..., WideResNet]:
    def build(num_classes: int) -> WideResNet:
        return WideResNet(num_classes, blocks=(depth - 4) // 6, widening=widening)

    return build


def _wrn26_10(num_classes: int) -> ResNet:
    # 26 is no 6n + 4: the WRN-26-10 of focal_calibration and the papers that build on it is a
    # ResNet of 6n + 2 layers, with norms behind the convolutions, ten times as wide.
    widths = tuple(STEM * 10 * factor for factor in (1, 2, 4))
    return ResNet(num_classes, block=BasicBlock, blocks=(4, 4, 4), widths=widths, stem=STEM)


WIDE_RESNETS: dict[str, Callable[..., ImageClassifier]] = {
    "wrn26_10": _wrn26_10,
    "wrn28_10": _of_depth(28, 10),
    "wrn40_2": _of_depth(40, 2),
}
