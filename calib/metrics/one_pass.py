"""Check the inputs of the measures and reduce them in one pass: predictions, bins, class bins."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor


def validated_float64(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """As `validated_inputs`, with float64 logits for fitting: [N, K] and int64 [N]."""
    logits, targets = validated_inputs(logits, targets)
    return logits.double(), targets


def validated_inputs(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The same values on the CPU without gradient, at least float32 [N, K] and int64 [N].

    Raises:
        ValueError: wrong shapes or types, no samples, a logit that is not finite, or a target
            outside the classes; the message names the first such value.
    """
    if logits.ndim != 2 or logits.shape[1] < 2 or not logits.is_floating_point():
        raise ValueError(
            f"logits are {logits.dtype} {tuple(logits.shape)}: give float [N, K] with K >= 2"
        )
    if targets.shape != logits.shape[:1]:
        expected = f"[{logits.shape[0]}], one target per row of logits"
        raise ValueError(f"targets have shape {tuple(targets.shape)}: give {expected}")
    if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        raise ValueError(f"targets are {targets.dtype}: give class numbers")
    if len(logits) == 0:
        raise ValueError("logits have 0 rows: give at least one sample")
    logits, targets = logits.detach().cpu(), targets.detach().cpu().long()
    if logits.dtype != torch.float64:
        logits = logits.float()
    _check_values(logits, targets)
    return logits, targets


def check_bins(bins: int) -> None:
    """Raises ValueError unless `bins` is a positive whole number."""
    if isinstance(bins, bool) or not isinstance(bins, int) or bins < 1:
        raise ValueError(f"bins = {bins}: give a whole number of at least 1")


def _check_values(logits: Tensor, targets: Tensor) -> None:
    # If a value is not finite, neither is the sum; but a sum can also overflow: check each logit.
    bad = torch.empty(0) if logits.sum().isfinite() else (~logits.isfinite()).nonzero()
    if len(bad):
        row, column = bad[0].tolist()
        value = f"logits[{row}, {column}] = {logits[row, column].item()}"
        raise ValueError(f"{value}: every logit must be finite")
    classes = logits.shape[1]
    wrong = ((targets < 0) | (targets >= classes)).nonzero()
    if len(wrong):
        row = int(wrong[0])
        value = f"targets[{row}] = {targets[row].item()}"
        raise ValueError(f"{value}: must lie in 0..{classes - 1}, as logits have {classes} columns")


CHUNK_VALUES = 1 << 17  # 0.5 MB of float32; half and twice as many were slower


@dataclass(frozen=True)
class SoftmaxRows:
    """Softmax terms of consecutive rows of logits."""

    highest: Tensor  # [B], the row's largest logit
    exponentials: Tensor  # [B, K], exp(logits - highest)
    tail: Tensor  # [B] float64, their sum without that of the largest logit, which is 1


def softmax_rows(logits: Tensor) -> Iterator[SoftmaxRows]:
    """Iterate over validated logits [N, K] in chunks.

    Exponentials keep the precision of the logits, whose rounding error is larger than theirs.
    They are summed in float64, so that 1 / (1 + tail) distinguishes 1 - 1e-9 from 1 - 1e-12.
    """
    for chunk in logits.split(max(1, CHUNK_VALUES // logits.shape[1])):
        highest = chunk.amax(1, keepdim=True)
        exponentials = (chunk - highest).exp_()
        yield SoftmaxRows(highest[:, 0], exponentials, exponentials.sum(1, dtype=torch.float64) - 1)


def hits(logits: Tensor, targets: Tensor, *, highest: Tensor, tail: Tensor) -> Tensor:
    """Whether the predicted class is the target, bool [N]; of equal logits the first is predicted.

    Searching for the largest logit costs more than all other steps, so it is done only for rows
    in which another logit may be equal.
    """
    correct = logits.gather(1, targets[:, None])[:, 0] == highest
    tied = (correct & (tail >= 1)).nonzero()[:, 0]  # an equal logit adds another 1
    predicted = torch.from_numpy(logits[tied].numpy().argmax(1))
    correct[tied] = predicted == targets[tied]
    return correct


# Adaptive ECE: sorted samples split evenly, or the edges of the official code.
Adaptive = Literal["split", "code"]

FEW_EDGES = 32  # up to here, comparing with every edge is several times faster than a search


@dataclass(frozen=True)
class ReliabilityBins:
    """Mean confidence and accuracy of the samples in each bin, lowest confidence first."""

    count: Tensor  # [M] int64, samples in the bin
    confidence: Tensor  # [M] float64 in [0, 1]; 0 where the bin is empty
    accuracy: Tensor  # [M] float64 in [0, 1]; 0 where the bin is empty
    samples: int  # N, including samples in no bin

    @property
    def fraction(self) -> Tensor:
        """[M] float64: the fraction of all samples in each bin."""
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
        ValueError: see `semix.calib.metrics.one_pass.validated_inputs`; or bins below 1.
    """
    check_bins(bins)
    logits, targets = validated_inputs(logits, targets)
    return equal_width(*top_label(logits, targets), bins, precision=logits.dtype)


def top_label(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Confidence of the predicted class, and 1 where it is right: [N] and [N] float64.

    Args:
        logits, targets: [N, K] and [N], validated.
    """
    chunks = [(rows.highest, rows.tail) for rows in softmax_rows(logits)]
    highest, tail = (torch.cat(column) for column in zip(*chunks, strict=True))
    return 1 / (1 + tail), hits(logits, targets, highest=highest, tail=tail).double()


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
    index = torch.zeros(values.shape, dtype=torch.uint8)
    for edge in edges:
        index += values > edge
    return index.long()


def equal_width(
    confidence: Tensor, correct: Tensor, bins: int, *, precision: torch.dtype = torch.float64
) -> ReliabilityBins:
    """Bins (l, u] of width 1/bins; a value on an edge belongs to the bin below it.

    Args:
        confidence, correct: [N] float64.
        precision: of the logits. A float32 confidence of 0.6 lies on the edge 9/15 because both
            are rounded to float32 before they are compared, as in the official code.
    """
    bin_index = bin_of(confidence.to(precision), inner_edges(bins, precision))
    return _mean_bins(confidence, correct, bin_index, bins)


def equal_mass(
    confidence: Tensor,
    correct: Tensor,
    bins: int,
    *,
    variant: Adaptive = "split",
    precision: torch.dtype = torch.float64,
) -> ReliabilityBins:
    """Bins that hold the same number of samples, as nearly as possible.

    Args:
        confidence, correct: [N] float64.
        variant: "split" sorts the samples and splits them evenly; the first N mod M bins get one
            more. Samples of equal confidence at a border could go to either bin: each counts
            with their mean correctness, so that the order of the samples does not matter. "code"
            puts edges at every (N/M)-th sorted confidence, interpolated, as the official code of
            focal calibration and its descendants does; bins are (l, u], so the samples at the
            lowest confidence are in no bin, and equal confidences merge bins.
        precision: of the logits, to which "code" rounds confidences and edges.
    """
    check_bins(bins)
    if variant == "code":
        return _between_quantiles(confidence, correct, bins, precision)
    order = confidence.argsort()
    _, tie, ties = confidence[order].unique_consecutive(return_inverse=True, return_counts=True)
    correct = (torch.zeros(len(ties)).double().index_add_(0, tie, correct[order]) / ties)[tie]
    bin_index = torch.arange(bins).repeat_interleave(equal_sizes(len(order), bins))
    return _mean_bins(confidence[order], correct, bin_index, bins)


def equal_sizes(samples: int, bins: int) -> Tensor:
    """[M] int64 that sum to `samples` and differ by at most 1, the larger ones first."""
    return samples // bins + (torch.arange(bins) < samples % bins).long()


def _between_quantiles(
    confidence: Tensor, correct: Tensor, bins: int, precision: torch.dtype
) -> ReliabilityBins:
    samples, values = len(confidence), confidence.to(precision)
    ranks = np.linspace(0, samples, bins + 1)
    edges = np.interp(ranks, np.arange(samples), values.sort().values.numpy())
    bin_index = torch.bucketize(values, torch.from_numpy(edges).to(precision))
    # Index 0 holds samples at or below the lowest edge, which are in no bin.
    all_bins = _mean_bins(confidence, correct, bin_index, bins + 1)
    return ReliabilityBins(
        all_bins.count[1:], all_bins.confidence[1:], all_bins.accuracy[1:], samples
    )


def _mean_bins(
    confidence: Tensor, correct: Tensor, bin_index: Tensor, bins: int
) -> ReliabilityBins:
    count = torch.bincount(bin_index, minlength=bins)
    divisor = count.clamp(min=1)  # an empty bin has sums 0
    return ReliabilityBins(
        count=count,
        confidence=torch.bincount(bin_index, confidence, minlength=bins) / divisor,
        accuracy=torch.bincount(bin_index, correct, minlength=bins) / divisor,
        samples=len(bin_index),
    )


@dataclass(frozen=True)
class ClassBins:
    """Bins of equal width (l, u] over p_k, for each class k."""

    samples: int  # N; every sample is in one bin of each class
    count: Tensor  # [K, M] int64
    mass: Tensor  # [K, M] float64, sum of p_k
    positives: Tensor  # [K, M] int64, samples whose target is k


class ClassBinsSum:
    """Sums ClassBins over chunks of the samples.

    At most M - 1 of a row's probabilities lie above 1/M, so only those are binned; the lowest bin
    of a class is its total minus the other bins.

    Args:
        precision: that of the probabilities; edges are rounded to it.
    """

    def __init__(self, num_classes: int, bins: int, *, precision: torch.dtype) -> None:
        self.shape = num_classes, bins
        self.edges = inner_edges(bins, precision)
        self.samples = 0
        self.total = torch.zeros(num_classes, dtype=torch.float64)  # sum of p_k
        self.high: list[tuple[Tensor, Tensor]] = []  # class k and p_k, where p_k is above 1/M
        self.of_target: list[tuple[Tensor, Tensor]] = []  # class y and p_y

    def add(self, probabilities: Tensor, targets: Tensor) -> None:
        """[B, K] and [B]."""
        self.samples += len(targets)
        self.total += probabilities.sum(0, dtype=torch.float64)
        if len(self.edges):
            flat = probabilities.view(-1)
            positions = (flat > self.edges[0]).nonzero()[:, 0]
            self.high.append((positions % self.shape[0], flat[positions]))
        self.of_target.append((targets, probabilities.gather(1, targets[:, None])[:, 0]))

    def finish(self) -> ClassBins:
        count = torch.zeros(self.shape, dtype=torch.int64)
        mass = torch.zeros(self.shape, dtype=torch.float64)
        if self.high:
            classes, values = (torch.cat(column) for column in zip(*self.high, strict=True))
            cells = self._flat_cell(classes, values)
            size = count.numel()
            count += torch.bincount(cells, minlength=size).view(self.shape)
            mass += torch.bincount(cells, values.double(), minlength=size).view(self.shape)
        count[:, 0] = self.samples - count.sum(1)
        # Rounding errors could make the difference negative.
        mass[:, 0] = (self.total - mass.sum(1)).clamp(min=0)
        targets, values = (torch.cat(column) for column in zip(*self.of_target, strict=True))
        cells = self._flat_cell(targets, values)
        positives = torch.bincount(cells, minlength=count.numel()).view(self.shape)
        return ClassBins(self.samples, count, mass, positives)

    def _flat_cell(self, classes: Tensor, values: Tensor) -> Tensor:
        return classes * self.shape[1] + bin_of(values, self.edges)


@dataclass(frozen=True)
class Predictions:
    """The contribution of each sample to the measures, which are means over samples."""

    confidence: Tensor  # [N] float64 in (0, 1], probability of the predicted class
    correct: Tensor  # [N] float64, 1 where the predicted class is the target
    nll: Tensor  # [N] float64, -log p_y in nats
    brier: Tensor  # [N] float64 in [0, 2], sum_k (p_k - [y = k])^2
    precision: torch.dtype  # of the logits, in which confidences are binned
    classes: ClassBins


def read_predictions(logits: Tensor, targets: Tensor, bins: int) -> Predictions:
    """The predictions of validated logits [N, K] and targets [N], in one pass."""
    chunks, start = [], 0
    classes = ClassBinsSum(logits.shape[1], bins, precision=logits.dtype)
    for rows in softmax_rows(logits):
        row_targets = targets[start : start + len(rows.tail)]
        start += len(row_targets)
        probabilities = rows.exponentials.div_((1 + rows.tail).to(logits.dtype)[:, None])
        classes.add(probabilities, row_targets)
        p_target = probabilities.gather(1, row_targets[:, None])[:, 0]
        squares = torch.linalg.vecdot(probabilities, probabilities)
        chunks.append((rows.highest, rows.tail, p_target.double(), squares.double()))
    highest, tail, p_target, squares = (torch.cat(column) for column in zip(*chunks, strict=True))
    shortfall = highest - logits.gather(1, targets[:, None])[:, 0]
    other_squares = (squares - p_target.square()).clamp(min=0)  # below 0 by rounding alone
    return Predictions(
        confidence=1 / (1 + tail),
        correct=hits(logits, targets, highest=highest, tail=tail).double(),
        nll=tail.log1p() + shortfall.double(),
        brier=(1 - p_target).square() + other_squares,
        precision=logits.dtype,
        classes=classes.finish(),
    )
