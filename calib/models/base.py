"""What every classifier is to the trainer: features, and a layer from features to logits."""

from collections.abc import Iterable

from torch import Tensor, nn


class ImageClassifier(nn.Module):
    """`features` maps images [N, 3, S, S] to [N, D], `classifier` maps features to logits.

    Another head on the same features may replace `classifier`.
    """

    num_features: int  # D
    image_size: int | None = None  # S, where it takes no other
    features: nn.Module
    classifier: nn.Module

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Images float [N, 3, S, S] to logits [N, K] and features [N, D]."""
        features = self.features(images)
        return self.classifier(features), features

    def freezing_order(self) -> list[nn.Module]:
        """The parts from the output down: classifier, last block, ..., stem.

        Every parameter is in exactly one of them.
        """
        return [self.classifier, *reversed(parameterised(self.features.children()))]


def parameterised(parts: Iterable[nn.Module]) -> list[nn.Module]:
    """Those with parameters, in their order."""
    return [part for part in parts if any(True for _ in part.parameters())]
