"""Samples grouped by confidence: into bins of equal width, or of equal size."""

from dataclasses import dataclass

import torch
from torch import Tensor

from calib.metrics.inputs import check_bins, checked


@dataclass(frozen=True)
class ReliabilityBins:
    """Mean confidence and accuracy of the samples in each bin, lowest confidence first."""

    count: Tensor  # [M] int64, samples in the bin
    confidence: Tensor  # [M] float64 in [0, 1]; 0 where the bin is empty
    accuracy: Tensor  # [M] float64 in [0, 1]; 0 where the bin is empty

    @property
    def share(self) -> Tensor:
        """[M] float64: the part of all samples that is in each bin."""
        return self.count.double() / self.count.sum()

    @property
    def gap(self) -> Tensor:
        """[M] float64 in [-1, 1]: confidence minus accuracy, above 0 where overconfident."""
        return self.confidence - self.accuracy


def reliability_bins(logits: Tensor, targets: Tensor, bins: int = 15) -> ReliabilityBins:
    """The data of a reliability diagram: bins of equal width over the top-label confidence.

    Args:
        logits: [N, K] float, before softmax.
        targets: [N] int, class numbers.
        bins: M; bin m holds confidences in (m/M, (m+1)/M].
    Raises:
        ValueError: see `checked`; or bins below 1.
    """
    return equal_width(*top_label(*checked(logits, targets)), bins)


def top_label(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Confidence of the predicted class, and 1 where it is right: [N] and [N] float64."""
    confidence, predicted = logits.softmax(1).max(1)
    return confidence, (predicted == targets).double()


def equal_width(confidence: Tensor, correct: Tensor, bins: int) -> ReliabilityBins:
    """Bins (l, u] of width 1/bins; a value on an edge belongs to the bin below it."""
    check_bins(bins)
    inner = torch.arange(1, bins, dtype=torch.float64) / bins
    return _averaged(confidence, correct, torch.bucketize(confidence, inner), bins)


def equal_mass(confidence: Tensor, correct: Tensor, bins: int) -> ReliabilityBins:
    """The samples in order of confidence, split evenly; the first N mod bins bins get one more.

    Equal confidences that fall on a border could go either way. They share their mean
    correctness, so that the order of the samples does not matter.
    """
    check_bins(bins)
    order = confidence.argsort()
    _, tie, ties = confidence[order].unique_consecutive(return_inverse=True, return_counts=True)
    correct = (torch.zeros(len(ties)).double().index_add_(0, tie, correct[order]) / ties)[tie]
    sizes = torch.tensor([len(part) for part in torch.arange(len(order)).tensor_split(bins)])
    return _averaged(confidence[order], correct, torch.arange(bins).repeat_interleave(sizes), bins)


def _averaged(confidence: Tensor, correct: Tensor, bin_of: Tensor, bins: int) -> ReliabilityBins:
    count = torch.bincount(bin_of, minlength=bins)
    safe = count.clamp(min=1)  # an empty bin has sums 0
    return ReliabilityBins(
        count=count,
        confidence=torch.bincount(bin_of, confidence, minlength=bins) / safe,
        accuracy=torch.bincount(bin_of, correct, minlength=bins) / safe,
    )
