"""Classwise expected calibration error."""

from torch import Tensor

from calib.metrics.bins import equal_width
from calib.metrics.ece import expected_error


def classwise_error(logits: Tensor, targets: Tensor, bins: int) -> float:
    """Mean over all K classes of the ECE of p_k against "the target is k", in [0, 1].

    Args:
        logits, targets: as `checked` gives them, [N, K] and [N]. K is the width of the logits,
            so a class that is missing among the targets counts as well.

    Source: Kull et al. 2019, eq. (2) with bins of equal width.
    """
    by_class = logits.softmax(1).T.contiguous()  # [K, N]
    errors = [
        expected_error(equal_width(probability, (targets == k).double(), bins))
        for k, probability in enumerate(by_class)
    ]
    return sum(errors) / len(errors)
