"""Label smoothing: a fixed share of the label is spread over all classes."""

from torch import Tensor

from calib.losses.pointwise import PointwiseLoss, log_probability
from calib.parameters import in_range


class LabelSmoothing(PointwiseLoss):
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

    def per_sample(self, logits: Tensor, targets: Tensor) -> Tensor:
        smoothing = logits.new_full((), self.smoothing)  # made on the device: no wait
        return blended_cross_entropy(logits, targets, smoothing, uniform_cross_entropy(logits))


def uniform_cross_entropy(logits: Tensor) -> Tensor:
    """Cross-entropy against the uniform distribution, mean_k(-log p_k), [N] from [N, K]."""
    return -logits.log_softmax(1).mean(1)


def blended_cross_entropy(
    logits: Tensor, targets: Tensor, share: Tensor, penalty: Tensor
) -> Tensor:
    """(1 - a_n) (-log p_ny) + a_n penalty_n of each sample, [N].

    Args:
        logits, targets: [N, K] float32 and [N] int64.
        share: a, [N] or one value. With `uniform_cross_entropy` as the penalty this is label
            smoothing: the true class keeps 1 - a + a/K.
        penalty: [N].
    """
    return (1 - share) * -log_probability(logits, targets) + share * penalty
