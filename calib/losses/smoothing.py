"""Losses that smooth labels or bound logits: label smoothing, margins, ACLS."""

from torch import Tensor
from torch.nn import functional

from semix.calib.config.loss import (
    AdaptiveConditionalLabelSmoothingConfig,
    LabelSmoothingConfig,
    MarginLabelSmoothingConfig,
)
from semix.calib.losses.base import PointwiseLoss, log_probability


class LabelSmoothing(PointwiseLoss):
    """Cross-entropy against (1 - a) onehot + a/K, as in torch: a is spread over all K classes.

    a is the setting `smoothing`.

    Source: Szegedy et al. 2016, section 7.
    """

    def __init__(self, num_classes: int, settings: LabelSmoothingConfig) -> None:
        super().__init__()
        self.smoothing = settings.smoothing

    def per_sample(self, logits: Tensor, targets: Tensor) -> Tensor:
        # Filled on the device, which avoids a copy from the host that would synchronise.
        smoothing = logits.new_full((), self.smoothing)
        return blended_cross_entropy(logits, targets, smoothing, uniform_cross_entropy(logits))


def uniform_cross_entropy(logits: Tensor) -> Tensor:
    """Cross-entropy against the uniform distribution, mean_k(-log p_k), [N] from [N, K]."""
    return -logits.log_softmax(1).mean(1)


def blended_cross_entropy(
    logits: Tensor, targets: Tensor, smoothing: Tensor, penalty: Tensor
) -> Tensor:
    """(1 - a_n) (-log p_ny) + a_n penalty_n of each sample, [N].

    Args:
        logits, targets: [N, K] float32 and [N] int64.
        smoothing: a, [N] or one value. With `uniform_cross_entropy` as the penalty this is label
            smoothing: the true class keeps 1 - a + a/K.
        penalty: [N].
    """
    return (1 - smoothing) * -log_probability(logits, targets) + smoothing * penalty


class MarginLabelSmoothing(PointwiseLoss):
    """-log p_y + weight mean_k max(0, max_l z_l - z_k - margin), averaged over the batch.

    The gradient flows through the largest logit as well. The weight suits the mean over classes,
    as in the official code; the paper's formula has a sum.

    Source: Liu et al. 2022, The Devil is in the Margin, equation 5, and its official code.
    """

    def __init__(self, num_classes: int, settings: MarginLabelSmoothingConfig) -> None:
        super().__init__()
        self.margin, self.weight = settings.margin, settings.weight

    def per_sample(self, logits: Tensor, targets: Tensor) -> Tensor:
        penalty = excess_over_margin(logits, self.margin).mean(1)
        return -log_probability(logits, targets) + self.weight * penalty


def excess_over_margin(logits: Tensor, margin: float) -> Tensor:
    """max(0, max_l z_l - z_k - margin) of every logit, [N, K]."""
    return functional.relu(logits.max(1, keepdim=True).values - logits - margin)


class AdaptiveConditionalLabelSmoothing(PointwiseLoss):
    """-log p_y + weight * (positive * A + negative * B), averaged over the batch.

    A = max(0, z_max - margin)^2 penalises the largest logit above the margin.
    B = the mean over the other K - 1 logits of max(0, sg(z_max) - z_k - margin)^2; no gradient
    flows through z_max. If several logits are the largest, each adds A and none enters B, while the
    divisor of B stays K - 1. All of this is as in the official code.

    Source: Park et al. 2023, ACLS, and its official code, losses/acls.py.
    """

    def __init__(self, num_classes: int, settings: AdaptiveConditionalLabelSmoothingConfig) -> None:
        super().__init__()
        self.margin, self.weight = settings.margin, settings.weight
        self.positive, self.negative = settings.positive, settings.negative

    def per_sample(self, logits: Tensor, targets: Tensor) -> Tensor:
        largest = logits.max(1, keepdim=True).values  # [N, 1]
        is_largest = logits == largest
        excess = functional.relu(largest - self.margin).square()[:, 0] * is_largest.sum(1)
        distances = functional.relu(largest.detach() - logits - self.margin).square()
        mean_distance = distances.masked_fill(is_largest, 0).sum(1) / (logits.shape[1] - 1)
        penalty = self.positive * excess + self.negative * mean_distance
        return -log_probability(logits, targets) + self.weight * penalty
