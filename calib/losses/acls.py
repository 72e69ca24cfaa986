"""ACLS: label smoothing that acts only where logits leave a margin, more the further they do."""

from torch import Tensor
from torch.nn import functional

from calib.losses.mbls import check_margin
from calib.losses.pointwise import PointwiseLoss, log_probability
from calib.parameters import in_range


class AdaptiveConditionalLabelSmoothing(PointwiseLoss):
    """-log p_y + weight (positive A + negative B), averaged over the batch.

    A = max(0, z_max - margin)^2: the largest logit itself is kept below the margin.
    B = the mean over the K - 1 others of max(0, sg(z_max) - z_k - margin)^2, where no gradient
    flows through z_max. Of logits that tie for the largest, each adds A and none enters B, while
    the divisor of B stays K - 1. All of this is as in the official code.

    Args:
        margin: from 0; 6 for CIFAR, 10 for Tiny-ImageNet.
        positive, negative: weights of A and B, from 0.
        weight: of both together, from 0.
    Raises:
        InputError: a value out of range.

    Source: Park et al. 2023, ACLS, and its official code, losses/acls.py.
    """

    def __init__(
        self,
        num_classes: int,
        *,
        margin: float = 10.0,
        positive: float = 1.0,
        negative: float = 0.1,
        weight: float = 0.1,
    ) -> None:
        super().__init__()
        check_margin(margin)
        for name, value in (("positive", positive), ("negative", negative), ("weight", weight)):
            in_range(f"loss.{name}", value, low=0, high=1e6, what="must be 0 or more")
        self.margin, self.weight = margin, weight
        self.positive, self.negative = positive, negative

    def per_sample(self, logits: Tensor, targets: Tensor) -> Tensor:
        largest = logits.max(1, keepdim=True).values  # [N, 1]
        tops = logits == largest
        top = functional.relu(largest - self.margin).square()[:, 0] * tops.sum(1)
        others = functional.relu(largest.detach() - logits - self.margin).square()
        rest = others.masked_fill(tops, 0).sum(1) / (logits.shape[1] - 1)
        penalty = self.positive * top + self.negative * rest
        return -log_probability(logits, targets) + self.weight * penalty
