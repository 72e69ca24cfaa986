"""Losses on mixed images, whose label is a probability for each class."""

from torch import Tensor
from torch.nn import functional


def squared_error(logits: Tensor, soft_labels: Tensor) -> Tensor:
    """Mean over n of sum_k (p_nk - y_nk)^2: a sum over classes, not a mean.

    Its gradient is bounded, unlike that of cross-entropy.

    Args:
        logits: [N, K] float, before softmax.
        soft_labels: [N, K] float, rows that sum to 1.
    Returns:
        A float32 scalar in [0, 2].
    Raises:
        ValueError: the shapes differ.

    Source: Calibration-aware Semantic Mixing (arXiv 2504.13548), as in its official code.
    """
    _check_shapes(logits, soft_labels)
    return (logits.float().softmax(1) - soft_labels.float()).square().sum(1).mean()


def soft_cross_entropy(logits: Tensor, soft_labels: Tensor) -> Tensor:
    """Mean over n of -sum_k y_nk log p_nk, as a float32 scalar; else as `squared_error`."""
    _check_shapes(logits, soft_labels)
    return functional.cross_entropy(logits.float(), soft_labels.float())


def _check_shapes(logits: Tensor, soft_labels: Tensor) -> None:
    if logits.shape != soft_labels.shape or logits.ndim != 2:
        found = f"{tuple(logits.shape)} and {tuple(soft_labels.shape)}"
        raise ValueError(f"logits and soft_labels have shapes {found}: give both as [N, K]")
