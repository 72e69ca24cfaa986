"""Draws as in CSM: a group that contains a class, and two of its images."""

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
    labels: SoftLabels, groups: Tensor, targets: Tensor, *, rng: torch.Generator
) -> Tensor:
    """Of each group the image that is most certainly of a class, and a random inner one.

    The images are ordered by the label of that class; inner ones lie between the two ends.

    Args:
        groups, targets: int64 [B].
    Returns:
        positions, int64 [B, 2].
    """
    order = labels.of_class(groups, targets).argsort(dim=1, descending=True)  # [B, A]
    # A series of two images has no interior; its far end stands in for it.
    last = max(order.shape[1] - 1, 2)
    inside = torch.randint(1, last, (len(groups), 1), generator=rng)
    return torch.cat([order[:, :1], order.gather(1, inside)], dim=1)
