"""Class means and the variance of the weight, each in one pass over batches of features."""

import math

import torch
from torch import Tensor
from torch.nn.functional import normalize

COINCIDE = 1e-8  # squared distance below which two prototypes define no line
ROWS = 256  # features compared with all classes at once, which bounds memory


class ClassSums:
    """Running sums of the features of each class, in float64: no order or chunk shows."""

    def __init__(self, num_classes: int) -> None:
        self.counts = torch.zeros(num_classes, dtype=torch.int64)
        self._sums: Tensor | None = None

    def add(self, features: Tensor, targets: Tensor) -> None:
        """Args: features [N, D]; targets int64 [N]."""
        if self._sums is None:
            width = features.shape[1]
            self._sums = torch.zeros(len(self.counts), width, dtype=torch.float64)
        self.counts += torch.bincount(targets, minlength=len(self.counts))
        self._sums.index_add_(0, targets, features.double())

    def means(self) -> Tensor:
        """float64 [K, D]. Raises ValueError: a class has no features."""
        if self._sums is None or not self.counts.all():
            raise ValueError(f"class {int(self.counts.argmin())} has no features")
        return self._sums / self.counts[:, None]


class WeightVariance:
    """Variance of the projection weight of real images around the mean of their class.

    Averaged over all images and all other classes; 1 / variance is the sharpening under which
    labels are the posterior of two Gaussian classes.

    Args:
        means: of each class, [K, D]; prototypes: [K, D], which span the lines. The same, unless
            prototypes are scaled to length 1.
    """

    def __init__(self, means: Tensor, prototypes: Tensor) -> None:
        self._means = means.double()
        self._prototypes = prototypes.double()
        self._total, self._count, self._least = 0.0, 0, math.inf

    def add(self, features: Tensor, targets: Tensor) -> None:
        """Args: features [N, D]; targets int64 [N]."""
        for rows, own in zip(features.split(ROWS), targets.split(ROWS), strict=True):
            self._add(rows.double(), own)

    def value(self) -> float:
        """The variance; infinite where two prototypes coincide."""
        return self._total / self._count if self._least >= COINCIDE else math.inf

    def _add(self, features: Tensor, targets: Tensor) -> None:
        own = self._prototypes[targets]  # [N, D]
        deviations = features - self._means[targets]
        along = (deviations * own).sum(1, keepdim=True) - deviations @ self._prototypes.T  # [N, K]
        lengths_sq = squared_distances(own, self._prototypes)
        lengths_sq.scatter_(1, targets[:, None], math.inf)  # no line leads from a class to itself
        self._least = min(self._least, float(lengths_sq.min()))
        self._total += float((along / lengths_sq).square().sum())
        self._count += len(features) * (len(self._prototypes) - 1)


def squared_distances(first: Tensor, second: Tensor) -> Tensor:
    """float64 [N, D], [K, D] -> [N, K]."""
    inner = first @ second.T
    return first.square().sum(1)[:, None] + second.square().sum(1)[None] - 2 * inner


def coinciding(prototypes: Tensor) -> tuple[int, int] | None:
    """Two classes between whose prototypes [K, D] no line lies, or None."""
    exact = prototypes.double()
    for index in range(1, len(exact)):
        close = squared_distances(exact[index : index + 1], exact[:index])[0] < COINCIDE
        if close.any():
            return int(close.nonzero()[0]), index
    return None


def unit(vectors: Tensor) -> Tensor:
    """Vectors [N, D] at length 1."""
    return normalize(vectors, dim=1)
