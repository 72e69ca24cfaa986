"""Soft labels of an image between two classes."""

import torch
from torch import Tensor


def sharpen(weight: Tensor, scale: float) -> Tensor:
    """Raw projection weights to probabilities of the first class.

    The logistic of CSM's loader: sigmoid(scale (weight - 1/2)). With Gaussian classes of equal
    covariance it is the exact posterior for scale = 1 / variance of the weight in a class.

    Args:
        weight: [N], 1 at the first prototype and 0 at the second, unclipped.
    Returns:
        [N] in (0, 1).
    """
    return torch.sigmoid(scale * (weight - 0.5))


def soft_labels(weight: Tensor, first: Tensor, second: Tensor, num_classes: int) -> Tensor:
    """Labels with `weight` on the first class of each pair and the rest on the second.

    Args:
        weight: [N] in [0, 1]; first, second: class indices, int64 [N].
    Returns:
        [N, K], rows sum to 1, all other classes exactly 0.
    """
    labels = torch.zeros(len(weight), num_classes, dtype=weight.dtype, device=weight.device)
    rows = torch.arange(len(weight), device=weight.device)
    labels[rows, first] = weight
    labels[rows, second] = 1 - weight
    return labels
