"""Every class against all others: samples by class and bin of that class's probability."""

from dataclasses import dataclass

import torch
from torch import Tensor

from calib.metrics.bins import bin_of, inner_edges


@dataclass(frozen=True)
class ClassBins:
    """Bins of equal width (l, u] over p_k, for each class k."""

    samples: int  # N; every sample is in one bin of each class
    count: Tensor  # [K, M] int64
    mass: Tensor  # [K, M] float64, sum of p_k
    positives: Tensor  # [K, M] int64, samples whose target is k


class ClassBinsSum:
    """Sums ClassBins over parts of the samples.

    At most M - 1 of a row's probabilities lie above 1/M, so only those are put into bins; the
    lowest bin of a class is what is left of its total.

    Args:
        precision: that of the probabilities; edges are rounded to it.
    """

    def __init__(self, num_classes: int, bins: int, *, precision: torch.dtype) -> None:
        self.shape = num_classes, bins
        self.edges = inner_edges(bins, precision)
        self.samples = 0
        self.total = torch.zeros(num_classes, dtype=torch.float64)  # sum of p_k
        self.high: list[tuple[Tensor, Tensor]] = []  # class and p_k of those above 1/M
        self.of_target: list[tuple[Tensor, Tensor]] = []  # class y and p_y

    def add(self, probabilities: Tensor, targets: Tensor) -> None:
        """[B, K] and [B]."""
        self.samples += len(targets)
        self.total += probabilities.sum(0, dtype=torch.float64)
        if len(self.edges):
            flat = probabilities.view(-1)
            place = (flat > self.edges[0]).nonzero()[:, 0]
            self.high.append((place % self.shape[0], flat[place]))
        self.of_target.append((targets, probabilities.gather(1, targets[:, None])[:, 0]))

    def finish(self) -> ClassBins:
        count = torch.zeros(self.shape, dtype=torch.int64)
        mass = torch.zeros(self.shape, dtype=torch.float64)
        if self.high:
            classes, values = (torch.cat(part) for part in zip(*self.high, strict=True))
            place = self._place(classes, values)
            size = count.numel()
            count += torch.bincount(place, minlength=size).view(self.shape)
            mass += torch.bincount(place, values.double(), minlength=size).view(self.shape)
        count[:, 0] = self.samples - count.sum(1)
        # Rounding alone could leave less than nothing.
        mass[:, 0] = (self.total - mass.sum(1)).clamp(min=0)
        targets, values = (torch.cat(part) for part in zip(*self.of_target, strict=True))
        place = self._place(targets, values)
        positives = torch.bincount(place, minlength=count.numel()).view(self.shape)
        return ClassBins(self.samples, count, mass, positives)

    def _place(self, classes: Tensor, values: Tensor) -> Tensor:
        return classes * self.shape[1] + bin_of(values, self.edges)
