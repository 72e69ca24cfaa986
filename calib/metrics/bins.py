"""Samples grouped by confidence: into bins of equal width, or of equal size."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from calib.metrics.inputs import as_given, check_bins
from calib.metrics.softmax import hits, softmax_rows

# Of adaptive ECE: the sorted samples split evenly, or edges as the official code finds them.
Adaptive = Literal["split", "code"]

FEW_EDGES = 32  # so few comparisons of everything are several times faster than a search


@dataclass(frozen=True)
class ReliabilityBins:
    """Mean confidence and accuracy of the samples in each bin, lowest confidence first."""

    count: Tensor  # [M] int64, samples in the bin
    confidence: Tensor  # [M] float64 in [0, 1]; 0 where the bin is empty
    accuracy: Tensor  # [M] float64 in [0, 1]; 0 where the bin is empty
    samples: int  # N, also those that no bin holds

    @property
    def share(self) -> Tensor:
        """[M] float64: the part of all samples that is in each bin."""
        return self.count.double() / self.samples

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
        ValueError: see `calib.metrics.inputs.as_given`; or bins below 1.
    """
    check_bins(bins)
    logits, targets = as_given(logits, targets)
    return equal_width(*top_label(logits, targets), bins, precision=logits.dtype)


def top_label(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Confidence of the predicted class, and 1 where it is right: [N] and [N] float64.

    Args:
        logits, targets: [N, K] and [N], checked.
    """
    parts = [(rows.highest, rows.rest) for rows in softmax_rows(logits)]
    highest, rest = (torch.cat(part) for part in zip(*parts, strict=True))
    return 1 / (1 + rest), hits(logits, targets, highest=highest, rest=rest).double()


def inner_edges(bins: int, precision: torch.dtype) -> Tensor:
    """The M - 1 values between bins of equal width, rounded as the confidences are."""
    check_bins(bins)
    return (torch.arange(1, bins, dtype=torch.float64) / bins).to(precision)


def bin_of(values: Tensor, edges: Tensor) -> Tensor:
    """Which bin each value is in, int64 [N]; a value on an edge belongs to the bin below it.

    Args:
        values: [N], none of them NaN.
        edges: [M - 1] ascending, of the same type.
    """
    if len(edges) > FEW_EDGES:
        return torch.bucketize(values, edges)
    place = torch.zeros(values.shape, dtype=torch.uint8)
    for edge in edges:
        place += values > edge
    return place.long()


def equal_width(
    confidence: Tensor, correct: Tensor, bins: int, *, precision: torch.dtype = torch.float64
) -> ReliabilityBins:
    """Bins (l, u] of width 1/bins; a value on an edge belongs to the bin below it.

    Args:
        confidence, correct: [N] float64.
        precision: of the logits. A float32 confidence of 0.6 lies on the edge 9/15 because both
            are rounded to float32 before they are compared, as in the official code.
    """
    place = bin_of(confidence.to(precision), inner_edges(bins, precision))
    return _averaged(confidence, correct, place, bins)


def equal_mass(
    confidence: Tensor,
    correct: Tensor,
    bins: int,
    *,
    variant: Adaptive = "split",
    precision: torch.dtype = torch.float64,
) -> ReliabilityBins:
    """Bins that hold the same number of samples, as nearly as that goes.

    Args:
        confidence, correct: [N] float64.
        variant: "split" sorts the samples and splits them evenly; the first N mod M bins get one
            more. Equal confidences that fall on a border could go either way: they share their
            mean correctness, so that the order of the samples does not matter. "code" puts edges
            at every (N/M)-th sorted confidence, interpolated, as the official code of focal
            calibration and its descendants does; bins are (l, u], so the samples at the lowest
            confidence are in none, and equal confidences merge bins.
        precision: of the logits, to which "code" rounds confidences and edges.
    """
    check_bins(bins)
    if variant == "code":
        return _between_quantiles(confidence, correct, bins, precision)
    order = confidence.argsort()
    _, tie, ties = confidence[order].unique_consecutive(return_inverse=True, return_counts=True)
    correct = (torch.zeros(len(ties)).double().index_add_(0, tie, correct[order]) / ties)[tie]
    place = torch.arange(bins).repeat_interleave(equal_sizes(len(order), bins))
    return _averaged(confidence[order], correct, place, bins)


def equal_sizes(samples: int, bins: int) -> Tensor:
    """[M] int64 that sum to `samples` and differ by at most 1, the larger ones first."""
    return samples // bins + (torch.arange(bins) < samples % bins).long()


def _between_quantiles(
    confidence: Tensor, correct: Tensor, bins: int, precision: torch.dtype
) -> ReliabilityBins:
    samples, values = len(confidence), confidence.to(precision)
    places = np.linspace(0, samples, bins + 1)
    edges = np.interp(places, np.arange(samples), values.sort().values.numpy())
    place = torch.bucketize(values, torch.from_numpy(edges).to(precision))
    # Place 0 is at or below the lowest edge, in no bin.
    found = _averaged(confidence, correct, place, bins + 1)
    return ReliabilityBins(found.count[1:], found.confidence[1:], found.accuracy[1:], samples)


def _averaged(confidence: Tensor, correct: Tensor, bin_of: Tensor, bins: int) -> ReliabilityBins:
    count = torch.bincount(bin_of, minlength=bins)
    safe = count.clamp(min=1)  # an empty bin has sums 0
    return ReliabilityBins(
        count=count,
        confidence=torch.bincount(bin_of, confidence, minlength=bins) / safe,
        accuracy=torch.bincount(bin_of, correct, minlength=bins) / safe,
        samples=len(bin_of),
    )
