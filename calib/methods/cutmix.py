"""CutMix: a box of each image replaced by another image's."""

import torch

from calib.batches import Batch
from calib.losses.base import RealLoss
from calib.methods.base import Forward, Method, Outcome
from calib.methods.mixing import check_alpha, soft_outcome


class CutMix(Method):
    """Soft cross-entropy, where labels are mixed by the areas of the two images.

    One box a batch, of area 1 - lambda with lambda ~ Beta(alpha, alpha), cut off at the edges.
    Each image is paired with the one before it, as torchvision does it.

    Args:
        alpha: above 0.
    Raises:
        InputError: alpha is out of range.

    Source: Yun et al. 2019, section 3.1.
    """

    losses = ("ce",)

    def __init__(self, num_classes: int, *, alpha: float = 1.0) -> None:
        super().__init__()
        check_alpha(alpha)
        with torch.device("cpu"):  # the distribution checks its values, also of a meta model
            from torchvision.transforms import v2  # more than a second, for this method alone

            self.mix = v2.CutMix(alpha=alpha, num_classes=num_classes)

    def forward(self, network: Forward, batch: Batch, loss: RealLoss) -> Outcome:
        channels_first = batch.images.permute(0, 3, 1, 2)
        images, labels = self.mix(channels_first, batch.targets)
        return soft_outcome(network, images.permute(0, 2, 3, 1), labels)
