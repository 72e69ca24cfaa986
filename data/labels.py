"""Soft labels of images between two classes, and sparse labels of a whole dataset."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

SparseLabel = Sequence[Sequence[float]]  # [class, probability], ...


def sharpen(weight: Tensor, scale: float) -> Tensor:
    """Turn raw projection weights into probabilities of the first class.

    The logistic function of CSM's loader: sigmoid(scale (weight - 1/2)). For Gaussian classes of
    equal covariance it is the exact posterior if scale = 1 / variance of the weight in a class.

    Args:
        weight: [N], 1 at the first prototype and 0 at the second, unclipped.
    Returns:
        [N] in (0, 1).
    """
    return torch.sigmoid(scale * (weight - 0.5))


def soft_labels(weight: Tensor, first: Tensor, second: Tensor, num_classes: int) -> Tensor:
    """Labels with `weight` on the first class of each pair and 1 - weight on the second.

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


@dataclass(frozen=True)
class SoftLabels:
    """Labels of G series of A images over K classes, at most m of which are in one label.

    Dense labels would fill the memory: an image has two of perhaps a thousand classes.

    Attributes:
        probabilities: float32 [G, A, m].
        classes: int32 [G, A, m]; stored once if all images share them. Shorter labels are
            padded with probability 0.
    """

    probabilities: Tensor
    classes: Tensor
    num_classes: int

    def of_class(self, groups: Tensor, target: Tensor) -> Tensor:
        """Probability of one class in all images of a series.

        Args:
            groups, target: indices of series and classes, int64 [B].
        Returns:
            [B, A].
        """
        matches = self.classes[groups] == target[:, None, None]  # [B, A, m]
        return torch.where(matches, self.probabilities[groups], 0.0).sum(-1)

    def dense(self, groups: Tensor, positions: Tensor) -> Tensor:
        """Labels of single images, float32 [..., K]; the indices broadcast together."""
        probabilities = self.probabilities[groups, positions]  # [..., m]
        labels = probabilities.new_zeros(*probabilities.shape[:-1], self.num_classes)
        return labels.scatter_add_(-1, self.classes[groups, positions].long(), probabilities)


def dense_labels(
    labels: Sequence[SparseLabel], num_classes: int, *, dtype: Any = np.float32
) -> np.ndarray:
    """Sparse labels, in the format of records, as an array [n, K]."""
    dense = np.zeros((len(labels), num_classes), dtype)
    for row, label in enumerate(labels):
        for target, probability in label:
            dense[row, int(target)] = probability
    return dense


def sparse_arrays(series: Sequence[Sequence[SparseLabel]]) -> tuple[np.ndarray, np.ndarray]:
    """Turn the labels of some series, in the format of records, into arrays.

    Args:
        series: the label of each image of each series.
    Returns:
        probabilities float32 and classes int32, [g, A, m].
    """
    width = max(len(label) for images in series for label in images)
    padded: Any = [
        [[*label, *[(0, 0.0)] * (width - len(label))] for label in images] for images in series
    ]
    pairs = np.array(padded, dtype=np.float64)  # exact for class indices
    return pairs[..., 1].astype(np.float32), pairs[..., 0].astype(np.int32)


def joined(chunks: Sequence[tuple[np.ndarray, np.ndarray]], *, num_classes: int) -> SoftLabels:
    """Join chunks of the labels of some series to the labels of all series."""
    width = max(probabilities.shape[2] for probabilities, _ in chunks)
    probabilities, classes = (
        torch.from_numpy(np.concatenate([_widened(chunk[item], width) for chunk in chunks]))
        for item in (0, 1)
    )
    return SoftLabels(probabilities, shared(classes), num_classes)


def sharpened(weights: Tensor, classes: Tensor, scale: float, *, num_classes: int) -> SoftLabels:
    """Labels between two classes, from raw weights.

    Args:
        weights: of the first class, float32 [G, A]; classes: int64 [G, 2].
        scale: of `sharpen`.
    """
    first = sharpen(weights.flatten(), scale).view_as(weights)
    expanded = classes.int()[:, None].expand(-1, first.shape[1], -1)
    return SoftLabels(torch.stack([first, 1 - first], dim=-1), expanded, num_classes)


def by_ratio(mixtures: Tensor, classes: Tensor, *, num_classes: int) -> SoftLabels:
    """The conditioning weights as labels, which do not depend on the images.

    Args:
        mixtures: float32 [G, A, k]; classes: int64 [G, k].
    """
    expanded = classes.int()[:, None].expand(-1, mixtures.shape[1], -1)
    return SoftLabels(mixtures, expanded, num_classes)


def shared(classes: Tensor) -> Tensor:
    """Equal to `classes` [G, A, m], but stored once if all series, or images of one, share it."""
    for values in (classes[:1, :1], classes[:, :1]):
        if bool((classes == values).all()):
            return values.clone().expand_as(classes)
    return classes


def _widened(values: np.ndarray, width: int) -> np.ndarray:
    return np.pad(values, ((0, 0), (0, 0), (0, width - values.shape[2])))
