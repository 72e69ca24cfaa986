"""Brier score."""

from torch import Tensor
from torch.nn import functional


def brier_score(logits: Tensor, targets: Tensor) -> float:
    """Mean over samples of sum_k (p_k - [y = k])^2, in [0, 2]: not divided by the classes.

    Args:
        logits, targets: [N, K] and [N].

    Source: Brier 1950, in its original form of several classes.
    """
    wanted = functional.one_hot(targets, logits.shape[1])
    return (logits.softmax(1) - wanted).square().sum(1).mean().item()
