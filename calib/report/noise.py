"""Mixed datasets side by side that differ in their noise: stability scores, and what they bring."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from data.dataset import MixedDataset
from data.quality import Agreement, series_quality


@dataclass(frozen=True)
class Compared:
    """One mixed dataset of the comparison, and how a judge read its end points."""

    label: str
    dataset: MixedDataset
    agreement: Agreement | Mapping[str, Any]


@dataclass(frozen=True)
class NoiseRow:
    """A line of the comparison; numbers as text, empty where there are none."""

    label: str
    strategy: str
    series: int
    images: int
    stability: str  # of the noises that were used
    candidates: str  # of all that were scored: what random noises score
    agreement: str
    median: float  # Spearman(alpha, weight)
    mean: float
    not_monotone: float


def noise_rows(compared: Sequence[Compared]) -> list[NoiseRow]:
    return [_row(one) for one in compared]


def _row(one: Compared) -> NoiseRow:
    noises = [group.noise for group in one.dataset.groups]
    quality = series_quality(one.dataset.alphas, one.dataset.weights)
    used = [noise["stability"] for noise in noises if noise["stability"] is not None]
    scored = [score for noise in noises for score in noise.get("scores", []) if score is not None]
    return NoiseRow(
        label=one.label,
        strategy=", ".join(sorted({noise["strategy"] for noise in noises})),
        series=len(noises),
        images=one.dataset.alphas.numel(),
        stability=_spread(used),
        candidates=f"{_spread(scored)} ({len(scored):,})" if scored else "",
        agreement=_share(one.agreement),
        median=quality.median,
        mean=quality.mean,
        not_monotone=quality.not_monotone,
    )


def _spread(scores: Sequence[float]) -> str:
    """`0.812 ± 0.034`: mean and standard deviation."""
    if len(scores) < 2:
        return f"{scores[0]:.3f}" if scores else ""
    values = torch.tensor(scores, dtype=torch.float64)
    return f"{float(values.mean()):.3f} ± {float(values.std()):.3f}"


def _share(agreement: Agreement | Mapping[str, Any]) -> str:
    """`98.5 ± 0.9`: percent, with the standard error that the number of images alone gives.

    Two hits and two misses are added first (Agresti and Coull 1998), else it is 0 at 100 %.
    """
    share, images = agreement["share"], agreement["images"] + 4
    adjusted = (share * agreement["images"] + 2) / images
    return f"{100 * share:.1f} ± {100 * math.sqrt(adjusted * (1 - adjusted) / images):.1f}"
