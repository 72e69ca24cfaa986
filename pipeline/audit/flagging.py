"""Which series are wanting, and how: one boolean a series for each flag."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from data.flags import FLAGS, Flag
from data.quality import falls, spearman
from pipeline.audit.duplicates import Duplicates, find_duplicates
from pipeline.audit.pictures import UNCHANGED
from pipeline.audit.series import Series


@dataclass(frozen=True)
class Findings:
    """What follows for each of G series.

    Attributes:
        correlation: float64 [G, k], Spearman, of each class's weight in the conditioning and in
            CLIP's projection; in a pair both are the same.
        flags: bool [G] for each flag.
        duplicates: which series is like which.
    """

    correlation: Tensor
    flags: dict[Flag, np.ndarray]
    duplicates: Duplicates

    @property
    def rho(self) -> Tensor:
        """One number a series, float64 [G]: the mean over its classes."""
        return self.correlation.mean(1)

    def groups(self, series: Series) -> dict[Flag, list[int]]:
        """Group numbers by flag, ascending."""
        return {flag: sorted(series.group[self.flags[flag]].tolist()) for flag in FLAGS}


def find(series: Series) -> Findings:
    """Look for everything that a flag stands for."""
    usable = series.faults == 0
    duplicates = find_duplicates(series.hashes, series.coarse, series.exact, usable=usable)
    correlation = class_correlations(series)
    doubled = np.zeros(len(series.group), dtype=bool)
    doubled[duplicates.rows] = True
    flags: dict[Flag, np.ndarray] = {
        "backwards": (correlation.mean(1) < 0).numpy(),
        "not_monotone": _falling(series),
        "end_points": (series.intended != series.nearest).any(1),
        "duplicate": doubled,
        # Flat neighbours are alike because they show nothing, which is another flag.
        "still": ((series.steps < UNCHANGED) & usable[:, 1:] & usable[:, :-1]).any(1),
        "degenerate": (~usable).any(1),
    }
    return Findings(correlation, flags, duplicates)


def class_correlations(series: Series) -> Tensor:
    """Spearman correlation for each class of a series, float64 [G, k].

    In a pair the second class mirrors the first; so do its ranks.
    """
    classes = series.classes.shape[1]
    if classes == 2:
        rho = spearman(torch.from_numpy(series.alphas), torch.from_numpy(series.weights))
        return rho[:, None].expand(-1, 2)
    mixture, seen = torch.from_numpy(series.mixture), torch.from_numpy(series.coordinates)
    return torch.stack([spearman(mixture[..., j], seen[..., j]) for j in range(classes)], 1)


def _falling(series: Series) -> np.ndarray:
    """Pairs whose weight falls somewhere; points of a simplex have no order to fall along."""
    if series.classes.shape[1] > 2:
        return np.zeros(len(series.group), dtype=bool)
    found: np.ndarray = falls(
        torch.from_numpy(series.alphas), torch.from_numpy(series.weights)
    ).numpy()
    return found
