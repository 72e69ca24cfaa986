"""What every classifier is to the trainer: features, and a layer from features to logits."""

from torch import Tensor, nn


class ImageClassifier(nn.Module):
    """`features` maps images [N, 3, S, S] to [N, D], `classifier` maps features to logits.

    Another head on the same features may replace `classifier`.
    """

    num_features: int  # D
    features: nn.Module
    classifier: nn.Module

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Images float [N, 3, S, S] to logits [N, K] and features [N, D], which are >= 0."""
        features = self.features(images)
        return self.classifier(features), features
