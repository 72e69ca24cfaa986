"""Derive flags of series, and figures of the whole, of classes and of pairs, from audited facts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NotRequired, TypedDict

import numpy as np
import torch
from semix.data.formats import FLAGS, Flag
from semix.data.quality import (
    EndPointAgreement,
    endpoint_agreement,
    falls,
    series_quality,
    spearman,
    weight_curve,
)
from semix.pipeline.audit.pictures import FAULTS, UNCHANGED, Duplicates, find_duplicates
from semix.pipeline.audit.read import AuditFacts, SeriesFacts
from torch import Tensor


@dataclass(frozen=True)
class Findings:
    """Results for each of G series.

    Attributes:
        correlation: float64 [G, k], Spearman, of each class's conditioning weight and CLIP weight;
            equal for both classes of a pair.
        flags: bool [G] for each flag.
        duplicates: which series resembles which.
    """

    correlation: Tensor
    flags: dict[Flag, np.ndarray]
    duplicates: Duplicates

    @property
    def rho(self) -> Tensor:
        """One number per series, float64 [G]: the mean over its classes."""
        return self.correlation.mean(1)

    def groups(self, series: SeriesFacts) -> dict[Flag, list[int]]:
        """Group numbers by flag, ascending."""
        return {flag: sorted(series.group[self.flags[flag]].tolist()) for flag in FLAGS}


def find(series: SeriesFacts) -> Findings:
    """Compute all flags."""
    pictures = series.pictures
    usable = pictures.faults == 0
    duplicates = find_duplicates(pictures.hashes, pictures.coarse, pictures.exact, usable=usable)
    correlation = class_correlations(series)
    doubled = np.zeros(len(series.group), dtype=bool)
    doubled[duplicates.rows] = True
    flags: dict[Flag, np.ndarray] = {
        "backwards": (correlation.mean(1) < 0).numpy(),
        "not_monotone": _falling(series),
        "end_points": (series.intended != series.nearest).any(1),
        "duplicate": doubled,
        # Flat neighbours are equal because they are degenerate, which is another flag.
        "still": ((pictures.steps < UNCHANGED) & usable[:, 1:] & usable[:, :-1]).any(1),
        "degenerate": (~usable).any(1),
    }
    return Findings(correlation, flags, duplicates)


def class_correlations(series: SeriesFacts) -> Tensor:
    """Spearman correlation for each class of a series, float64 [G, k].

    In a pair the weight of the second class is the complement of the first; so are its ranks.
    """
    classes = series.classes.shape[1]
    if classes == 2:
        rho = spearman(torch.from_numpy(series.alphas), torch.from_numpy(series.weights))
        return rho[:, None].expand(-1, 2)
    mixture, weights = torch.from_numpy(series.mixture), torch.from_numpy(series.coordinates)
    return torch.stack([spearman(mixture[..., j], weights[..., j]) for j in range(classes)], 1)


def _falling(series: SeriesFacts) -> np.ndarray:
    """Series of pairs whose weight falls somewhere; points of a simplex have no order."""
    if series.classes.shape[1] > 2:
        return np.zeros(len(series.group), dtype=bool)
    falling: np.ndarray = falls(
        torch.from_numpy(series.alphas), torch.from_numpy(series.weights)
    ).numpy()
    return falling


BINS = 20


class Histogram(TypedDict):
    """Counts in equal bins."""

    edges: list[float]
    counts: list[int]


class Correlation(TypedDict):
    """Correlation of alpha and weight, over all series; `not_monotone` is for pairs."""

    median: float
    mean: float
    not_monotone: float | None
    negative: float
    histogram: Histogram


class CurveFigures(TypedDict):
    """The fields of `semix.data.quality.WeightCurve`."""

    alphas: list[float]
    mean: list[float]
    levels: list[float]
    quantiles: list[list[float]]


class EndPointFigures(TypedDict):
    """How often unmixed images are assigned to their class, by three classifiers."""

    nearest_prototype: EndPointAgreement | None
    nearest_of_series: EndPointAgreement | None
    judge: EndPointAgreement | None


class LabelFigures(TypedDict):
    first_class: Histogram
    entropy_mean: float
    entropy_most: float


class DuplicateFigures(TypedDict):
    series: int
    same_pixels: int
    share: float


class ScoreSummary(TypedDict):
    """Statistics of a score over the series that record it."""

    recorded: int
    mean: float
    median: float
    least: float
    most: float


class Overall(TypedDict):
    """Figures of all series; None where one does not apply."""

    correlation: Correlation
    weight_curve: CurveFigures | None
    end_points: EndPointFigures
    labels: LabelFigures
    duplicates: DuplicateFigures
    still: dict[str, float]  # `share`
    degenerate: dict[str, int]  # `images`, and of each kind
    disagreement: ScoreSummary | None
    stability: ScoreSummary | None


class ClassFigures(TypedDict):
    """One class: `share` of all label mass, and mean `correlation` over its series."""

    name: str
    series: int
    images: int
    mass: float
    share: float
    correlation: float | None
    end_points: int
    end_points_agreed: int


class PairFigures(TypedDict):
    """One list per column, one entry per set of classes that has series.

    `labels` is the histogram of the first class's probability in LABEL_BINS equal bins.
    """

    classes: list[list[int]]
    series: list[int]
    correlation_median: list[float]
    correlation_mean: list[float]
    negative: list[float]
    not_monotone: list[float]
    end_points_nearest: list[float | None]
    end_points_judge: NotRequired[list[float | None]]
    labels: list[list[int]]
    entropy: list[float]


def figures(facts: AuditFacts, findings: Findings) -> Overall:
    """Figures over all series, as plain values."""
    series = facts.series
    return {
        "correlation": _correlation(series, findings),
        "weight_curve": _curve(series),
        "end_points": end_point_figures(series),
        "labels": {
            "first_class": histogram(series.label, 0, 1),
            "entropy_mean": float(series.entropy.mean()),
            "entropy_most": float(np.log(series.classes.shape[1])),
        },
        "duplicates": {
            "series": len(findings.duplicates.rows),
            "same_pixels": int(findings.duplicates.same.sum()),
            "share": len(findings.duplicates.rows) / len(series.group),
        },
        "still": {"share": float(findings.flags["still"].mean())},
        "degenerate": {
            "images": int((series.pictures.faults > 0).sum()),
            **{
                name.replace(" ", "_"): int((series.pictures.faults >> bit & 1).sum())
                for bit, name in enumerate(FAULTS)
            },
        },
        "disagreement": _spread(series.disagreement),
        "stability": _spread(series.stability),
    }


def end_point_figures(series: SeriesFacts) -> EndPointFigures:
    ends = series.intended >= 0
    return {
        "nearest_prototype": _agreement(series.intended, series.nearest, ends),
        "nearest_of_series": _agreement(series.intended, series.of_series, ends),
        "judge": _agreement(series.intended, series.judged, ends & (series.judged >= 0)),
    }


def histogram(values: np.ndarray, low: float, high: float, bins: int = BINS) -> Histogram:
    """Counts in equal bins; values out of range count in the outermost bins."""
    clipped = values.astype(np.float64).clip(low, high)
    counts, edges = np.histogram(clipped, bins=bins, range=(low, high))
    return {"edges": edges.round(6).tolist(), "counts": counts.tolist()}


def _correlation(series: SeriesFacts, findings: Findings) -> Correlation:
    rho = findings.rho
    result: Correlation = {
        "median": float(rho.quantile(0.5)),
        "mean": float(rho.mean()),
        "not_monotone": None,
        "negative": float((rho < 0).double().mean()),
        "histogram": histogram(rho.numpy(), -1, 1),
    }
    if series.classes.shape[1] == 2:
        quality = series_quality(torch.from_numpy(series.alphas), torch.from_numpy(series.weights))
        result["median"], result["mean"] = quality.median, quality.mean
        result["not_monotone"], result["negative"] = (quality.not_monotone, quality.negative)
    return result


def _curve(series: SeriesFacts) -> CurveFigures | None:
    if series.classes.shape[1] > 2:
        return None
    curve = weight_curve(torch.from_numpy(series.alphas), torch.from_numpy(series.weights))
    return {
        "alphas": curve.alphas.tolist(),
        "mean": curve.mean.tolist(),
        "levels": list(curve.levels),
        "quantiles": curve.quantiles.tolist(),
    }


def _agreement(
    intended: np.ndarray, assigned: np.ndarray, where: np.ndarray
) -> EndPointAgreement | None:
    if not where.any():
        return None
    return endpoint_agreement(torch.from_numpy(assigned[where]), torch.from_numpy(intended[where]))


def _spread(values: np.ndarray) -> ScoreSummary | None:
    """Mean, median and extremes of the finite values; None if there are none."""
    finite = values[np.isfinite(values)].astype(np.float64)
    if not finite.size:
        return None
    return {
        "recorded": len(finite),
        "mean": float(finite.mean()),
        "median": float(np.median(finite)),
        "least": float(finite.min()),
        "most": float(finite.max()),
    }


LABEL_BINS = 10


def class_figures(
    facts: AuditFacts, findings: Findings, names: Sequence[str]
) -> list[ClassFigures]:
    """Images, label mass, correlation and end points of each class."""
    series, count = facts.series, len(names)
    of_series = np.bincount(series.classes.ravel(), minlength=count)
    rho = findings.correlation.numpy()
    sums = np.bincount(series.classes.ravel(), weights=rho.ravel(), minlength=count)
    ends = series.intended >= 0
    intended = np.bincount(series.intended[ends], minlength=count)
    right = ends & (series.intended == series.nearest)
    agreed = np.bincount(series.intended[right], minlength=count)
    return [
        {
            "name": name,
            "series": int(of_series[k]),
            "images": int(of_series[k]) * series.alphas.shape[1],
            "mass": float(facts.mass[k]),
            "share": float(facts.mass[k] / facts.mass.sum()),
            "correlation": float(sums[k] / of_series[k]) if of_series[k] else None,
            "end_points": int(intended[k]),
            "end_points_agreed": int(agreed[k]),
        }
        for k, name in enumerate(names)
    ]


def pair_figures(series: SeriesFacts, findings: Findings) -> PairFigures:
    classes, inverse = np.unique(series.classes, axis=0, return_inverse=True)
    count, inverse = len(classes), inverse.reshape(-1)
    number = np.bincount(inverse, minlength=count)
    rho = findings.rho.numpy()

    def mean(values: np.ndarray) -> list[float]:
        return (np.bincount(inverse, weights=values, minlength=count) / number).tolist()

    ends = series.intended >= 0
    agreed = (ends & (series.intended == series.nearest)).sum(1)
    judged = ends & (series.judged >= 0)
    right = (judged & (series.intended == series.judged)).sum(1)
    pairs: PairFigures = {
        "classes": classes.tolist(),
        "series": number.tolist(),
        "correlation_median": _medians(rho, inverse, number).tolist(),
        "correlation_mean": mean(rho),
        "negative": mean(rho < 0),
        "not_monotone": mean(findings.flags["not_monotone"]),
        "end_points_nearest": _shares(agreed, ends.sum(1), inverse),
        "end_points_judge": _shares(right, judged.sum(1), inverse),
        "labels": _histograms(series.label, inverse, count).tolist(),
        "entropy": mean(series.entropy.mean(1)),
    }
    if not judged.any():
        del pairs["end_points_judge"]
    return pairs


def _medians(values: np.ndarray, inverse: np.ndarray, number: np.ndarray) -> np.ndarray:
    """Median of the values of each set, float64 [P]; none of them is empty."""
    ordered = values[np.lexsort((values, inverse))]
    start = number.cumsum() - number
    middle: np.ndarray = ordered[start + (number - 1) // 2] + ordered[start + number // 2]
    return middle / 2


def _shares(hits: np.ndarray, of: np.ndarray, inverse: np.ndarray) -> list[float | None]:
    """Share of hits in each set; None for an empty set."""
    summed = (np.bincount(inverse, weights=part).tolist() for part in (hits, of))
    return [hit / total if total else None for hit, total in zip(*summed, strict=True)]


def _histograms(label: np.ndarray, inverse: np.ndarray, count: int) -> np.ndarray:
    """Counts of labels [G, A] in each set and bin, int64 [P, LABEL_BINS]."""
    bins = (label * LABEL_BINS).astype(np.int64).clip(0, LABEL_BINS - 1)
    cells = inverse[:, None] * LABEL_BINS + bins
    return np.bincount(cells.ravel(), minlength=count * LABEL_BINS).reshape(count, LABEL_BINS)
