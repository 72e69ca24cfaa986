"""Focal losses: samples that are predicted well count less."""

import torch
from torch import Tensor

from calib.losses.pointwise import PointwiseLoss, log_probability
from calib.parameters import in_range

TINY = torch.finfo(torch.float32).tiny


def check_gamma(gamma: float) -> None:
    """Raises InputError unless it is 0 or more."""
    in_range("loss.gamma", gamma, low=0, high=1e6, what="must be 0 or more")


class Focal(PointwiseLoss):
    """(1 - p_y)^gamma (-log p_y), averaged over the batch; focal_calibration's code sums it.

    Args:
        gamma: from 0, which is cross-entropy.
    Raises:
        InputError: gamma is out of range.

    Source: Lin et al. 2017, Focal Loss; Mukhoti et al. 2020 for calibration.
    """

    def __init__(self, num_classes: int, *, gamma: float = 3.0) -> None:
        super().__init__()
        check_gamma(gamma)
        self.gamma = gamma

    def per_sample(self, logits: Tensor, targets: Tensor) -> Tensor:
        log_p = log_probability(logits, targets)
        return power(1 - log_p.exp(), self.gamma) * -log_p


class FLSD53(PointwiseLoss):
    """Focal loss of gamma 5 where p_y < 0.2 and gamma 3 elsewhere, averaged over the batch.

    The choice carries no gradient. The official code sums over the batch.

    Source: Mukhoti et al. 2020, Calibrating Deep Neural Networks using Focal Loss, section 5.
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__()

    def per_sample(self, logits: Tensor, targets: Tensor) -> Tensor:
        log_p = log_probability(logits, targets)
        p = log_p.exp()
        return power(1 - p, torch.where(p < 0.2, 5.0, 3.0)) * -log_p


def power(base: Tensor, gamma: float | Tensor) -> Tensor:
    """base^gamma for base >= 0; at 0 the gradient is 0, which has no limit for gamma < 1."""
    return base.clamp(min=TINY).pow(gamma)
