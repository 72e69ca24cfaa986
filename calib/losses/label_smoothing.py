"""Label smoothing, of one strength for all samples or of one a sample."""

import torch
from torch import Tensor
from torch.nn import functional

from calib.losses.base import RealLoss
from calib.parameters import in_range


def smoothed_cross_entropy(logits: Tensor, targets: Tensor, smoothing: Tensor) -> Tensor:
    """Mean over n of (1 - a_n) (-log p_ny) + a_n mean_k(-log p_nk), as a float32 scalar.

    Args:
        logits: [N, K] float.
        targets: [N] int64.
        smoothing: a, [N] or one value; the true class keeps 1 - a + a/K.
    """
    log_p = functional.log_softmax(logits.float(), dim=1)  # [N, K]
    hard = -log_p.gather(1, targets[:, None])[:, 0]  # [N]
    uniform = -log_p.mean(1)  # [N]
    return ((1 - smoothing) * hard + smoothing * uniform).mean()


class LabelSmoothing(RealLoss):
    """Cross-entropy against (1 - a) onehot + a/K, as in torch: the share a is over all classes.

    Args:
        smoothing: a, in [0, 1]; 0.05 is usual, 0.1 for CIFAR-100.
    Raises:
        InputError: smoothing is out of range.

    Source: Szegedy et al. 2016, section 7.
    """

    def __init__(self, num_classes: int, *, smoothing: float = 0.05) -> None:
        super().__init__()
        in_range("loss.smoothing", smoothing, low=0, high=1, what="must lie in [0, 1]")
        self.smoothing = smoothing

    def forward(
        self,
        logits: Tensor,
        targets: Tensor,
        *,
        features: Tensor | None = None,
        indices: Tensor | None = None,
    ) -> Tensor:
        smoothing = logits.new_tensor(self.smoothing, dtype=torch.float32)
        return smoothed_cross_entropy(logits, targets, smoothing)
