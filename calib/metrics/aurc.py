"""Area under the risk-coverage curve."""

import torch
from torch import Tensor


def risk_coverage_area(confidence: Tensor, correct: Tensor) -> float:
    """AURC = 1/N sum_{k=1..N} (share of errors among the k most confident samples), in [0, 1].

    Samples of equal confidence share their mean error, the expectation over their orders.

    Args:
        confidence, correct: [N] float64.

    Source: Geifman, Uziel and El-Yaniv 2019, eq. (4). Libraries that take the trapezoid over
    k/N and divide by 1 - 1/N differ by at most 1/N.
    """
    order = confidence.argsort(descending=True)
    _, tie, ties = confidence[order].unique_consecutive(return_inverse=True, return_counts=True)
    errors = torch.zeros(len(ties), dtype=torch.float64).index_add_(0, tie, 1 - correct[order])
    kept = torch.arange(1, len(order) + 1, dtype=torch.float64)
    return ((errors / ties)[tie].cumsum(0) / kept).mean().item()
