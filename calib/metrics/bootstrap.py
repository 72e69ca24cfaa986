"""Bootstrap intervals: how far the measures move when the test images are drawn again."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from semix.calib.metrics.one_pass import (
    Predictions,
    as_given,
    bin_of,
    check_bins,
    equal_sizes,
    inner_edges,
    read_predictions,
)
from torch import Tensor
from torch.nn import functional

LEVEL = 0.95
AT_ONCE = 1 << 18  # draws worked on together: what they need stays in a cache
# Of these each sample has a share that no other sample changes. Classwise ECE would cost K times
# as much, MCE and smooth ECE are no sums.
INTERVALS = ("accuracy", "ece", "adaptive_ece", "over_ece", "under_ece", "nll", "brier")


def bootstrap_intervals(
    logits: Tensor, targets: Tensor, bins: int = 15, *, resamples: int = 1000, seed: int = 0
) -> dict[str, tuple[float, float]]:
    """95 % percentile intervals of the measures in INTERVALS, over test images drawn anew.

    Each resample draws N of the N images with replacement; its equal-size bins are those of the
    resample. They say what another test set of this size would change, not another training.

    Args:
        logits, targets, bins: as for `calibration_metrics`.
    Returns:
        Low and high of each measure, in its unit. ECE of a resample is biased upwards like any
        binned ECE, once more than the figure itself, so an interval can lie above its figure.
    Raises:
        ValueError: see `semix.calib.metrics.one_pass.as_given`; bins or resamples below 1.

    Source: Efron and Tibshirani 1993, section 13.3.
    """
    check_bins(bins)
    if resamples < 1:
        raise ValueError(f"resamples = {resamples}: give a whole number of at least 1")
    found = read_predictions(*as_given(logits, targets), bins)
    return intervals_of(resampled(found, bins, resamples=resamples, seed=seed))


def resampled(found: Predictions, bins: int, *, resamples: int, seed: int) -> Tensor:
    """The measures in INTERVALS on test images drawn anew, float64 [resamples, M].

    Resample r draws the same of N images whatever was predicted of them, so that classifiers can
    be compared resample by resample.

    Args:
        found: of one pass, with these bins.
    """
    samples = _Sorted.of(found, bins)
    parts = [samples.measures(counts) for counts in _draws(len(found.nll), resamples, seed)]
    return torch.cat(parts)


def intervals_of(drawn: Tensor) -> dict[str, tuple[float, float]]:
    """The intervals of what `resampled` gave."""
    edges = torch.tensor([(1 - LEVEL) / 2, (1 + LEVEL) / 2], dtype=torch.float64)
    low, high = drawn.quantile(edges, dim=0).tolist()
    return dict(zip(INTERVALS, zip(low, high, strict=True), strict=True))


@dataclass(frozen=True)
class _Sorted:
    """The samples in order of confidence, so that adaptive bins are runs of them."""

    order: Tensor  # [N], the samples' own indices
    shares: Tensor  # [N, 3 + M]: correct, nll, brier, and the gap in the column of its bin
    gap: Tensor  # [N], confidence - correct
    last: Tensor  # [G], where each run of equal confidences ends
    cuts: Tensor  # [M + 1], where the bins of equal size begin and end

    @classmethod
    def of(cls, found: Predictions, bins: int) -> "_Sorted":
        confidence, order = found.confidence.sort(stable=True)
        correct = found.correct[order]
        rounded = confidence.to(found.precision)
        place = bin_of(rounded, inner_edges(bins, found.precision))
        gap = confidence - correct
        by_bin = functional.one_hot(place, bins) * gap[:, None]
        figures = torch.stack([correct, found.nll[order], found.brier[order]], 1)
        _, ties = confidence.unique_consecutive(return_counts=True)
        sizes = equal_sizes(len(order), bins)
        cuts = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
        return cls(order, torch.cat([figures, by_bin], 1), gap, ties.cumsum(0) - 1, cuts.double())

    def measures(self, counts: Tensor) -> Tensor:
        """Resamples, as how often each sample was drawn [B, N], to INTERVALS [B, 7]."""
        counts = counts[:, self.order]
        means = counts @ self.shares / len(self.gap)
        gaps = means[:, 3:]
        over, under = gaps.clamp(min=0).sum(1), (-gaps).clamp(min=0).sum(1)
        adaptive = self._adaptive(counts)
        return torch.stack([means[:, 0], over + under, adaptive, over, under, *means.T[1:3]], 1)

    def _adaptive(self, counts: Tensor) -> Tensor:
        """Adaptive ECE of each resample, [B].

        Summed gaps up to a cut that falls into a run of equal confidences grow evenly inside it,
        as its samples share their mean correctness.
        """
        nothing = counts.new_zeros(len(counts), 1)
        drawn = torch.cat([nothing, counts.cumsum(1)[:, self.last]], 1)
        gaps = torch.cat([nothing, (counts * self.gap).cumsum(1)[:, self.last]], 1)
        run = torch.searchsorted(drawn, self.cuts.repeat(len(counts), 1)).clamp(min=1)
        before, after = drawn.gather(1, run - 1), drawn.gather(1, run)
        part = (self.cuts - before) / (after - before).clamp(min=1)
        upto = torch.lerp(gaps.gather(1, run - 1), gaps.gather(1, run), part)
        return upto.diff(dim=1).abs().sum(1) / len(self.gap)


def _draws(samples: int, resamples: int, seed: int) -> Iterator[Tensor]:
    """How often each sample is drawn, [B, N] float64, until there were so many resamples."""
    rng = np.random.default_rng(seed)
    block = max(1, AT_ONCE // samples)
    for start in range(0, resamples, block):
        rows = min(block, resamples - start)
        drawn = torch.from_numpy(rng.integers(samples, size=(rows, samples)))
        drawn += samples * torch.arange(rows)[:, None]
        counts = torch.bincount(drawn.view(-1), minlength=rows * samples)
        yield counts.view(rows, samples).double()
