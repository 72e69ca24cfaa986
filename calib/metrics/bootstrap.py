"""Bootstrap intervals: how far the measures move over resamples of the test images."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from semix.calib.metrics.one_pass import (
    Predictions,
    bin_of,
    check_bins,
    equal_sizes,
    inner_edges,
    read_predictions,
    validated_inputs,
)

LEVEL = 0.95
BLOCK_INDICES = 1 << 18  # drawn per block, so that a block stays in the CPU cache
# Each sample contributes to these measures independently of all other samples. Classwise ECE
# would cost K times as much, MCE and smooth ECE are no sums.
INTERVALS = ("accuracy", "ece", "adaptive_ece", "over_ece", "under_ece", "nll", "brier")


def bootstrap_intervals(
    logits: Tensor, targets: Tensor, bins: int = 15, *, resamples: int = 1000, seed: int = 0
) -> dict[str, tuple[float, float]]:
    """95 % percentile intervals of the measures in INTERVALS, over bootstrap resamples.

    Each resample draws N of the N test images with replacement and has equal-size bins of its own.
    The intervals show the effect of another test set of this size, not of another training.

    Args:
        logits, targets, bins: as for `calibration_metrics`.
    Returns:
        Low and high of each measure, in its unit. Binned ECE is biased upwards, on a resample more
        than on the images themselves, so an interval can lie above the measured value.
    Raises:
        ValueError: see `semix.calib.metrics.one_pass.validated_inputs`; bins or resamples below 1.

    Source: Efron and Tibshirani 1993, section 13.3.
    """
    check_bins(bins)
    if resamples < 1:
        raise ValueError(f"resamples = {resamples}: give a whole number of at least 1")
    predictions = read_predictions(*validated_inputs(logits, targets), bins)
    return intervals_of(resampled(predictions, bins, resamples=resamples, seed=seed))


def resampled(predictions: Predictions, bins: int, *, resamples: int, seed: int) -> Tensor:
    """The measures in INTERVALS on bootstrap resamples, float64 [resamples, M].

    Resample r of N images draws the same images for every classifier, so that classifiers can be
    compared resample by resample.

    Args:
        predictions: from `read_predictions` with the same `bins`.
    """
    samples = _SortedSamples.of(predictions, bins)
    blocks = [
        samples.measures(counts) for counts in _draw_counts(len(predictions.nll), resamples, seed)
    ]
    return torch.cat(blocks)


def intervals_of(resamples: Tensor) -> dict[str, tuple[float, float]]:
    """The percentile intervals of the measures that `resampled` returned."""
    edges = torch.tensor([(1 - LEVEL) / 2, (1 + LEVEL) / 2], dtype=torch.float64)
    low, high = resamples.quantile(edges, dim=0).tolist()
    return dict(zip(INTERVALS, zip(low, high, strict=True), strict=True))


@dataclass(frozen=True)
class _SortedSamples:
    """The samples in order of confidence, so that each adaptive bin is a run of them."""

    order: Tensor  # [N], indices of the samples
    terms: Tensor  # [N, 3 + M]: correct, nll, brier, and the gap in the column of its bin
    gap: Tensor  # [N], confidence - correct
    last: Tensor  # [G], where each run of equal confidences ends
    cuts: Tensor  # [M + 1], where the bins of equal size begin and end

    @classmethod
    def of(cls, predictions: Predictions, bins: int) -> "_SortedSamples":
        confidence, order = predictions.confidence.sort(stable=True)
        correct = predictions.correct[order]
        rounded = confidence.to(predictions.precision)
        bin_index = bin_of(rounded, inner_edges(bins, predictions.precision))
        gap = confidence - correct
        by_bin = functional.one_hot(bin_index, bins) * gap[:, None]
        values = torch.stack([correct, predictions.nll[order], predictions.brier[order]], 1)
        _, ties = confidence.unique_consecutive(return_counts=True)
        sizes = equal_sizes(len(order), bins)
        cuts = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
        return cls(order, torch.cat([values, by_bin], 1), gap, ties.cumsum(0) - 1, cuts.double())

    def measures(self, counts: Tensor) -> Tensor:
        """The measures in INTERVALS of B resamples, [B, 7]; counts are draws per sample, [B, N]."""
        counts = counts[:, self.order]
        means = counts @ self.terms / len(self.gap)
        gaps = means[:, 3:]
        over, under = gaps.clamp(min=0).sum(1), (-gaps).clamp(min=0).sum(1)
        adaptive = self._adaptive(counts)
        return torch.stack([means[:, 0], over + under, adaptive, over, under, *means.T[1:3]], 1)

    def _adaptive(self, counts: Tensor) -> Tensor:
        """Adaptive ECE of each resample, [B].

        Samples of equal confidence share their mean correctness, so that summed gaps are
        interpolated linearly at a cut within such a run.
        """
        nothing = counts.new_zeros(len(counts), 1)
        cumulative = torch.cat([nothing, counts.cumsum(1)[:, self.last]], 1)
        gaps = torch.cat([nothing, (counts * self.gap).cumsum(1)[:, self.last]], 1)
        run = torch.searchsorted(cumulative, self.cuts.repeat(len(counts), 1)).clamp(min=1)
        before, after = cumulative.gather(1, run - 1), cumulative.gather(1, run)
        fraction = (self.cuts - before) / (after - before).clamp(min=1)
        gap_sums = torch.lerp(gaps.gather(1, run - 1), gaps.gather(1, run), fraction)
        return gap_sums.diff(dim=1).abs().sum(1) / len(self.gap)


def _draw_counts(samples: int, resamples: int, seed: int) -> Iterator[Tensor]:
    """Yield how often each resample draws each sample, [B, N] float64, block by block."""
    rng = np.random.default_rng(seed)
    block = max(1, BLOCK_INDICES // samples)
    for start in range(0, resamples, block):
        rows = min(block, resamples - start)
        indices = torch.from_numpy(rng.integers(samples, size=(rows, samples)))
        indices += samples * torch.arange(rows)[:, None]
        counts = torch.bincount(indices.view(-1), minlength=rows * samples)
        yield counts.view(rows, samples).double()
