"""Dual focal loss: a sample counts less the further its class is ahead of the next one."""

from torch import Tensor

from calib.losses.focal import check_gamma, power
from calib.losses.pointwise import PointwiseLoss


class DualFocal(PointwiseLoss):
    """(1 - p_y + p_j)^gamma (-log p_y), averaged over the batch; the official code sums it.

    p_j is the largest probability strictly below p_y, 0 where there is none: classes with
    exactly p_y do not count. The gradient flows through p_j as well.

    Args:
        gamma: from 0, which is cross-entropy (and the official default); the paper tunes it.
    Raises:
        InputError: gamma is out of range.

    Source: Tao et al. 2023, Dual Focal Loss for Calibration, and its official code.
    """

    def __init__(self, num_classes: int, *, gamma: float = 5.0) -> None:
        super().__init__()
        check_gamma(gamma)
        self.gamma = gamma

    def per_sample(self, logits: Tensor, targets: Tensor) -> Tensor:
        log_p = logits.log_softmax(1)
        p = log_p.exp()
        p_y = p.gather(1, targets[:, None])  # [N, 1]
        p_j = p.where(p < p_y, 0).topk(1).values[:, 0]  # [N]; of equals it takes the official one
        log_p_y = log_p.gather(1, targets[:, None])[:, 0]
        return power(1 - p_y[:, 0] + p_j, self.gamma) * -log_p_y
