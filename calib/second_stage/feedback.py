"""What the classifier with its new head says of whole splits after an epoch."""

from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn

from calib.classifier import Network
from calib.evaluate import in_chunks
from calib.feedback import Outputs
from calib.second_stage.views import FeatureViews
from calib.training_data import TrainingData, decode


class PlainFeatures:
    """Features of whole splits as they are, of a network that does not change any more.

    Those of the validation images, which many ask for after every epoch, are kept.
    """

    def __init__(self, network: Network, data: TrainingData, views: FeatureViews) -> None:
        self.network, self.data, self.views = network, data, views

    @cached_property
    def validation(self) -> Tensor:
        """[N, D] float32, in the precision in which classifiers are measured."""
        images = decode(self.data.real.validation)
        return in_chunks(self.network.features, images, device=self.views.device)

    def of(self, split: Literal["train", "validation"]) -> Tensor:
        return self.validation if split == "validation" else self.views.as_they_are()

    def targets(self, split: Literal["train", "validation"]) -> Tensor:
        return torch.from_numpy(getattr(self.data.real, split).targets)


class HeadFeedback:
    """Runs a head when asked; one object an epoch.

    Args:
        head: features to logits; left in the mode in which it is.
    """

    def __init__(self, head: nn.Module, features: PlainFeatures) -> None:
        self.head, self.features = head, features
        self._found: dict[str, Outputs] = {}

    def outputs(self, split: Literal["train", "validation"]) -> Outputs:
        if split not in self._found:
            features = self.features.of(split)
            logits = predict(self.head, features)
            targets = self.features.targets(split).to(features.device)
            self._found[split] = Outputs(logits, features, targets)
        return self._found[split]


def predict(head: nn.Module, features: Tensor) -> Tensor:
    """Logits in eval mode, float32 [N, K]; the mode is then what it was."""
    training = head.training
    head.eval()
    try:
        return in_chunks(head, features).float()
    finally:
        head.train(training)
