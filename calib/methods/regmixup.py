"""RegMixup: mixup beside the images as they are, as a regulariser."""

from typing import Literal

import torch

from calib.batches import Batch
from calib.losses.base import RealLoss
from calib.losses.mixed import soft_cross_entropy
from calib.methods.base import Forward, Method, Outcome
from calib.methods.mixing import (
    blend,
    blended_labels,
    check_alpha,
    draw_partners,
    draw_weight,
)
from calib.parameters import in_range, one_of


class RegMixup(Method):
    """L(images) + weight CE(blends): both halves in one pass of 2B images, one lambda a batch.

    Args:
        alpha: of Beta(alpha, alpha); large, so that blends are near one half. 20 for CIFAR-10,
            10 for CIFAR-100.
        weight: of the blends' cross-entropy.
        variant: "code" averages over all 2B images, which halves the sum; "paper" adds.
    Raises:
        InputError: a parameter is out of range.

    Source: Pinto et al. 2022 (RegMixup), and its official code.
    """

    def __init__(
        self,
        num_classes: int,
        *,
        alpha: float = 20.0,
        weight: float = 1.0,
        variant: Literal["code", "paper"] = "code",
    ) -> None:
        super().__init__()
        check_alpha(alpha)
        in_range("method.weight", weight, low=0, high=1e6, what="must be 0 or more")
        one_of("method.variant", variant, ("code", "paper"))
        self.num_classes, self.alpha, self.weight = num_classes, alpha, weight
        self.scale = 0.5 if variant == "code" else 1.0

    def forward(self, network: Forward, batch: Batch, loss: RealLoss) -> Outcome:
        count, targets = len(batch.targets), batch.targets
        weight, partners = draw_weight(self.alpha), draw_partners(targets)
        blends = blend(batch.images, partners, weight)
        labels = blended_labels(targets, partners, weight, self.num_classes)
        logits, features = network(torch.cat([batch.images.float(), blends]))
        clean, mixed = logits[:count], logits[count:]
        real = loss(clean, targets, features=features[:count], indices=batch.indices)
        value = self.scale * (real + self.weight * soft_cross_entropy(mixed, labels))
        return Outcome(value, clean, targets)
