"""Soft labels kept sparse: of a thousand classes an image is of two."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.labels import sharpen

SparseLabel = Sequence[Sequence[float]]  # [class, probability], ...


@dataclass(frozen=True)
class SoftLabels:
    """Labels of G groups of A images over K classes, m of which an image can have.

    Attributes:
        probabilities: float32 [G, A, m].
        classes: int32 [G, A, m]; where images share them, in memory only once. Entries that
            fill up a shorter label have probability 0.
    """

    probabilities: Tensor
    classes: Tensor
    num_classes: int

    def of_class(self, groups: Tensor, target: Tensor) -> Tensor:
        """Probability of one class in all images of a group.

        Args:
            groups, target: int64 [B].
        Returns:
            [B, A].
        """
        theirs = self.classes[groups] == target[:, None, None]  # [B, A, m]
        return torch.where(theirs, self.probabilities[groups], 0.0).sum(-1)

    def dense(self, groups: Tensor, positions: Tensor) -> Tensor:
        """Labels of single images, float32 [..., K]; the indices broadcast together."""
        probabilities = self.probabilities[groups, positions]  # [..., m]
        labels = probabilities.new_zeros(*probabilities.shape[:-1], self.num_classes)
        return labels.scatter_add_(-1, self.classes[groups, positions].long(), probabilities)

    def of_groups(self, groups: Tensor) -> "SoftLabels":
        """The labels of some groups, int64 [g], alone."""
        alike = self.classes.stride(0) == 0
        classes = self.classes[:1].expand(len(groups), -1, -1) if alike else self.classes[groups]
        return SoftLabels(self.probabilities[groups], classes, self.num_classes)


def sparse_arrays(series: Sequence[Sequence[SparseLabel]]) -> tuple[np.ndarray, np.ndarray]:
    """The labels of some groups, as records hold them, as arrays.

    Args:
        series: for each group and image its label.
    Returns:
        probabilities float32 and classes int32, [g, A, m].
    """
    longest = max(len(label) for images in series for label in images)
    filled: Any = [
        [[*label, *[(0, 0.0)] * (longest - len(label))] for label in images] for images in series
    ]
    pairs = np.array(filled, dtype=np.float64)  # exact for class indices
    return pairs[..., 1].astype(np.float32), pairs[..., 0].astype(np.int32)


def joined(parts: Sequence[tuple[np.ndarray, np.ndarray]], *, num_classes: int) -> SoftLabels:
    """The labels of all groups, from those of some at a time."""
    longest = max(probabilities.shape[2] for probabilities, _ in parts)
    probabilities, classes = (
        torch.from_numpy(np.concatenate([_widened(part[which], longest) for part in parts]))
        for which in (0, 1)
    )
    return SoftLabels(probabilities, shared(classes), num_classes)


def sharpened(weights: Tensor, classes: Tensor, scale: float, *, num_classes: int) -> SoftLabels:
    """Labels between two classes, from raw weights.

    Args:
        weights: of the first class, float32 [G, A]; classes: int64 [G, 2].
        scale: of `data.labels.sharpen`.
    """
    first = sharpen(weights.flatten(), scale).view_as(weights)
    each = classes.int()[:, None].expand(-1, first.shape[1], -1)
    return SoftLabels(torch.stack([first, 1 - first], dim=-1), each, num_classes)


def shared(classes: Tensor) -> Tensor:
    """The same [G, A, m], with what all groups or all images of a group share kept once."""
    for once in (classes[:1, :1], classes[:, :1]):
        if bool((classes == once).all()):
            return once.clone().expand_as(classes)
    return classes


def _widened(values: np.ndarray, width: int) -> np.ndarray:
    return np.pad(values, ((0, 0), (0, 0), (0, width - values.shape[2])))
