"""Interpolation along alpha, from the anchors of a series to its other images."""

import torch
from torch import Tensor

from pipeline.rows import anchor_ranks


class Anchors:
    """Which rows of a batch of series are computed, and how the others follow from them.

    Args:
        alphas: [G, A] of the series, in any order.
        count: anchors a series: those of least and greatest alpha, and evenly between by rank.
    """

    def __init__(self, alphas: Tensor, count: int, *, device: torch.device | str = "cpu") -> None:
        series, images = alphas.shape
        alphas = alphas.cpu()
        ranks = torch.tensor(anchor_ranks(images, count))
        rest = torch.tensor([rank for rank in range(images) if rank not in ranks.tolist()])
        ordered, order = alphas.sort(dim=1, stable=True)
        rows = order + images * torch.arange(series)[:, None]
        self.rows = rows[:, ranks].flatten().to(device)  # [G n], row numbers in the batch
        self.others = rows[:, rest].flatten().to(device)  # [G (A - n)]
        left = torch.searchsorted(ranks, rest, right=True) - 1  # the anchor below each other row
        near, far = ordered[:, ranks[left]], ordered[:, ranks[left + 1]]  # [G, A - n]
        share = (ordered[:, rest] - near) / (far - near)
        self._share = torch.where(far == near, torch.zeros_like(share), share).flatten().to(device)
        below = left + count * torch.arange(series)[:, None]
        self._below = below.flatten().to(device)  # [G (A - n)], positions among the anchors

    def to_others(self, features: Tensor) -> Tensor:
        """Features of the anchors, [G n, ...], to those of the other rows, [G (A - n), ...].

        Linear in alpha between the anchors on either side.
        """
        share = self._share.to(features).view(-1, *[1] * (features.dim() - 1))
        return torch.lerp(features[self._below], features[self._below + 1], share)

    def merge(self, of_anchors: Tensor, of_others: Tensor) -> Tensor:
        """Rows of the whole batch, [G A, ...], in its order."""
        merged = of_anchors.new_empty(len(self.rows) + len(self.others), *of_anchors.shape[1:])
        merged[self.rows] = of_anchors
        merged[self.others] = of_others
        return merged
