"""Negative log-likelihood."""

from torch import Tensor
from torch.nn import functional


def negative_log_likelihood(logits: Tensor, targets: Tensor) -> float:
    """NLL = -mean of log p_y, natural logarithm, from 0 up. Logits [N, K], targets [N]."""
    return functional.cross_entropy(logits, targets).item()
