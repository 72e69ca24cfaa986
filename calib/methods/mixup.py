"""Mixup: blends of image pairs in place of the images."""

from typing import Any

import torch

from calib.batches import Batch
from calib.losses.base import RealLoss
from calib.methods.base import Forward, Method, Outcome
from calib.methods.mixing import check_alpha, soft_outcome
from data.errors import InputError


class Mixup(Method):
    """Soft cross-entropy of lambda x_i + (1 - lambda) x_j, lambda ~ Beta(alpha, alpha).

    One lambda a batch. Each image is paired with the one before it, as torchvision does it; the
    batch is shuffled already.

    Args:
        alpha: above 0; 0.2 is usual for calibration, 1.0 for accuracy.
        heavier: take max(lambda, 1 - lambda), so that x_i keeps the larger share, as MIT's code.
    Raises:
        InputError: a parameter is out of range.

    Source: Zhang et al. 2018 (mixup: Beyond Empirical Risk Minimization).
    """

    losses = ("ce",)

    def __init__(self, num_classes: int, *, alpha: float = 0.2, heavier: bool = False) -> None:
        super().__init__()
        check_alpha(alpha)
        if not isinstance(heavier, bool):
            raise InputError("method.heavier", heavier, "give true or false")
        with torch.device("cpu"):  # the distribution checks its values, also of a meta model
            kind = heavier_mixup() if heavier else plain_mixup()
            self.mix = kind(alpha=alpha, num_classes=num_classes)

    def forward(self, network: Forward, batch: Batch, loss: RealLoss) -> Outcome:
        images, labels = self.mix(batch.images.float(), batch.targets)
        return soft_outcome(network, images, labels)


def plain_mixup() -> Any:
    from torchvision.transforms import v2  # two seconds, for this method alone

    return v2.MixUp


def heavier_mixup() -> Any:
    """One that never gives an image less than half."""

    class HeavierMixUp(plain_mixup()):  # type: ignore[misc]
        def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
            weight = super().make_params(flat_inputs)["lam"]
            return {"lam": max(weight, 1 - weight)}

    return HeavierMixUp
