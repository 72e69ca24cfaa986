"""MbLS: a penalty on logits that lie further below the largest one than a margin."""

from torch import Tensor
from torch.nn import functional

from calib.losses.pointwise import PointwiseLoss, log_probability
from calib.parameters import in_range


def check_margin(margin: float) -> None:
    """Raises InputError unless it is 0 or more."""
    in_range("loss.margin", margin, low=0, high=1e6, what="must be 0 or more")


class MarginLabelSmoothing(PointwiseLoss):
    """-log p_y + weight mean_k max(0, max_l z_l - z_k - margin), averaged over the batch.

    The gradient flows through the largest logit as well.

    Args:
        margin: m, from 0; 6 for CIFAR, 10 for Tiny-ImageNet.
        weight: of the penalty, from 0; 0.1 is meant for a mean over classes, as the official code
            takes it (the paper writes a sum).
    Raises:
        InputError: a value out of range.

    Source: Liu et al. 2022, The Devil is in the Margin, equation 5, and its official code.
    """

    def __init__(self, num_classes: int, *, margin: float = 6.0, weight: float = 0.1) -> None:
        super().__init__()
        check_margin(margin)
        in_range("loss.weight", weight, low=0, high=1e6, what="must be 0 or more")
        self.margin, self.weight = margin, weight

    def per_sample(self, logits: Tensor, targets: Tensor) -> Tensor:
        penalty = excess_over_margin(logits, self.margin).mean(1)
        return -log_probability(logits, targets) + self.weight * penalty


def excess_over_margin(logits: Tensor, margin: float) -> Tensor:
    """max(0, max_l z_l - z_k - margin) of every logit, [N, K]."""
    return functional.relu(logits.max(1, keepdim=True).values - logits - margin)
