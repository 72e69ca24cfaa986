"""Draws as in CSM: a group that contains a class, and some of its images."""

import torch
from torch import Tensor

from data.mixed.soft_labels import SoftLabels


class ClassIndex:
    """Which groups contain each class, as one list with a stretch for each class.

    Args:
        classes: of each group, different ones, int64 [G, k].
    """

    def __init__(self, classes: Tensor, num_classes: int) -> None:
        of_entry = classes.flatten()
        # Stable, so that groups ascend within a class.
        self.groups = of_entry.argsort(stable=True) // classes.shape[1]
        self.counts = torch.bincount(of_entry, minlength=num_classes)
        self.starts = self.counts.cumsum(0) - self.counts

    def missing(self, targets: Tensor) -> int | None:
        """A class among the targets, int64 [B], that no group contains; None if all are there."""
        there = self.counts[targets] > 0
        return None if bool(there.all()) else int(targets[~there][0])

    def draw(self, targets: Tensor, rng: torch.Generator) -> Tensor:
        """For each target a random group that contains it, each as likely as any other.

        Args:
            targets: classes that are not missing, int64 [B].
        Returns:
            groups, int64 [B].
        """
        share = torch.rand(len(targets), generator=rng, dtype=torch.float64)
        chosen = (share * self.counts[targets]).long()
        return self.groups[self.starts[targets] + chosen]


def end_and_inner(
    labels: SoftLabels, groups: Tensor, targets: Tensor, *, rng: torch.Generator, count: int = 2
) -> Tensor:
    """Of each group the image that is most certainly of a class, and random inner ones.

    The images are ordered by the label of that class; inner ones lie between the two ends.

    Args:
        groups, targets: int64 [B].
        count: images of each group, the end and `count - 1` inner ones, which differ while the
            series has as many. A single image is the end or an inner one, by a fair coin.
    Returns:
        positions, int64 [B, count].
    """
    order = labels.of_class(groups, targets).argsort(dim=1, descending=True)  # [B, A]
    # A series of two images has no interior; its far end stands in for it.
    end, inner = order[:, :1], order[:, 1:-1] if order.shape[1] > 2 else order[:, 1:]
    both = torch.cat([end, _some(inner, max(count - 1, 1), rng)], dim=1)
    if count > 1:
        return both
    return both.gather(1, torch.randint(2, (len(groups), 1), generator=rng))


def _some(positions: Tensor, count: int, rng: torch.Generator) -> Tensor:
    """Random ones of each row; none comes again before all of its row have come."""
    rows, length = positions.shape
    if count == 1:
        return positions.gather(1, torch.randint(length, (rows, 1), generator=rng))
    shuffled = torch.rand(rows, length, generator=rng).argsort(dim=1)
    return positions.gather(1, shuffled[:, torch.arange(count) % length])
