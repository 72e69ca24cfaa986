"""Derive flags of series, and metrics of the dataset, its classes and pairs, from audited facts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NotRequired, TypedDict

import numpy as np
import torch
from torch import Tensor

from semix.data.formats import FLAGS, Flag
from semix.data.quality import (
    EndPointAgreement,
    endpoint_agreement,
    has_decrease,
    series_quality,
    spearman,
    weight_curve,
)
from semix.pipeline.audit.pictures import FAULTS, UNCHANGED, Duplicates, find_duplicates
from semix.pipeline.audit.read import AuditFacts, SeriesFacts


@dataclass(frozen=True)
class Findings:
    """Flags and correlations of G series.

    Attributes:
        correlation: float64 [G, k], Spearman correlation of the conditioning weight and the CLIP
            weight of each class; equal for both classes of a pair.
        flags: bool [G] per flag; `concept` only if concepts were asked for.
        duplicates: pairs of similar series.
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
        return {
            flag: sorted(series.group[self.flags[flag]].tolist())
            for flag in FLAGS
            if flag in self.flags
        }


def find(series: SeriesFacts) -> Findings:
    """Compute the correlations, flags and duplicates of all series."""
    pictures = series.pictures
    usable = pictures.faults == 0
    duplicates = find_duplicates(pictures.hashes, pictures.coarse, pictures.exact, usable=usable)
    correlation = class_correlations(series)
    is_duplicate = np.zeros(len(series.group), dtype=bool)
    is_duplicate[duplicates.rows] = True
    flags: dict[Flag, np.ndarray] = {
        "backwards": (correlation.mean(1) < 0).numpy(),
        "not_monotone": _is_not_monotone(series),
        "end_points": (series.intended != series.nearest).any(1),
        "duplicate": is_duplicate,
        # Not between flat images: these are flagged as degenerate.
        "still": ((pictures.steps < UNCHANGED) & usable[:, 1:] & usable[:, :-1]).any(1),
        "degenerate": (~usable).any(1),
    }
    if series.concepts.shape[-1]:
        flags["concept"] = np.any(series.concepts > 0, axis=(1, 2))
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


def _is_not_monotone(series: SeriesFacts) -> np.ndarray:
    """Whether the weight falls, bool [G]; False for a simplex, whose points have no order."""
    if series.classes.shape[1] > 2:
        return np.zeros(len(series.group), dtype=bool)
    falling: np.ndarray = has_decrease(
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


class CurveValues(TypedDict):
    """The fields of `semix.data.quality.WeightCurve`."""

    alphas: list[float]
    mean: list[float]
    levels: list[float]
    quantiles: list[list[float]]


class EndPointMetrics(TypedDict):
    """How often unmixed images are assigned to their class, by three classifiers."""

    nearest_prototype: EndPointAgreement | None
    nearest_of_series: EndPointAgreement | None
    judge: EndPointAgreement | None


class LabelMetrics(TypedDict):
    """Probabilities of the first class of each series, and entropies of labels, nats.

    `over_all_classes`: some label gives a probability to a class that its series does not mix, as
    the rule `similarity` does. `entropy_most` is that of equal labels.
    """

    first_class: Histogram
    entropy_mean: float
    entropy_most: float
    over_all_classes: bool


class DuplicateMetrics(TypedDict):
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
    """Metrics over all series; None where one does not apply."""

    correlation: Correlation
    weight_curve: CurveValues | None
    end_points: EndPointMetrics
    labels: LabelMetrics
    duplicates: DuplicateMetrics
    still: dict[str, float]  # `share`
    degenerate: dict[str, int]  # `images`, and the count of each fault
    disagreement: ScoreSummary | None
    stability: ScoreSummary | None


class ClassMetrics(TypedDict):
    """One class; `share` is its fraction of all label mass, `correlation` the mean over series."""

    name: str
    series: int
    images: int
    mass: float
    share: float
    correlation: float | None
    end_points: int
    end_points_agreed: int


class PairMetrics(TypedDict):
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


def overall_metrics(facts: AuditFacts, findings: Findings) -> Overall:
    """Compute the metrics over all series, as plain values."""
    series = facts.series
    over_all_classes = bool((series.others > 0).any())
    return {
        "correlation": _correlation(series, findings),
        "weight_curve": _curve(series),
        "end_points": end_point_metrics(series),
        "labels": {
            "first_class": histogram(series.label, 0, 1),
            "entropy_mean": float(series.entropy.mean()),
            "entropy_most": float(
                np.log(len(facts.mass) if over_all_classes else series.classes.shape[1])
            ),
            "over_all_classes": over_all_classes,
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
        "disagreement": _score_summary(series.disagreement),
        "stability": _score_summary(series.stability),
    }


def end_point_metrics(series: SeriesFacts) -> EndPointMetrics:
    is_end_point = series.intended >= 0
    return {
        "nearest_prototype": _agreement(series.intended, series.nearest, is_end_point),
        "nearest_of_series": _agreement(series.intended, series.of_series, is_end_point),
        "judge": _agreement(series.intended, series.judged, is_end_point & (series.judged >= 0)),
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


def _curve(series: SeriesFacts) -> CurveValues | None:
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
    intended: np.ndarray, assigned: np.ndarray, mask: np.ndarray
) -> EndPointAgreement | None:
    """Agreement of the assigned and intended classes where `mask` is true; None if nowhere."""
    if not mask.any():
        return None
    return endpoint_agreement(torch.from_numpy(assigned[mask]), torch.from_numpy(intended[mask]))


def _score_summary(values: np.ndarray) -> ScoreSummary | None:
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


def class_metrics(
    facts: AuditFacts, findings: Findings, names: Sequence[str]
) -> list[ClassMetrics]:
    """Images, label mass, correlation and end points of each class."""
    series, count = facts.series, len(names)
    num_series = np.bincount(series.classes.ravel(), minlength=count)
    rho = findings.correlation.numpy()
    sums = np.bincount(series.classes.ravel(), weights=rho.ravel(), minlength=count)
    is_end_point = series.intended >= 0
    end_points = np.bincount(series.intended[is_end_point], minlength=count)
    is_right = is_end_point & (series.intended == series.nearest)
    num_right = np.bincount(series.intended[is_right], minlength=count)
    return [
        {
            "name": name,
            "series": int(num_series[k]),
            "images": int(num_series[k]) * series.alphas.shape[1],
            "mass": float(facts.mass[k]),
            "share": float(facts.mass[k] / facts.mass.sum()),
            "correlation": float(sums[k] / num_series[k]) if num_series[k] else None,
            "end_points": int(end_points[k]),
            "end_points_agreed": int(num_right[k]),
        }
        for k, name in enumerate(names)
    ]


def pair_metrics(series: SeriesFacts, findings: Findings) -> PairMetrics:
    """Compute the metrics of each set of classes (P sets) that has series."""
    classes, inverse = np.unique(series.classes, axis=0, return_inverse=True)
    count, inverse = len(classes), inverse.reshape(-1)
    num_series = np.bincount(inverse, minlength=count)
    rho = findings.rho.numpy()

    def mean(values: np.ndarray) -> list[float]:
        return (np.bincount(inverse, weights=values, minlength=count) / num_series).tolist()

    is_end_point = series.intended >= 0
    agreed = (is_end_point & (series.intended == series.nearest)).sum(1)
    is_judged = is_end_point & (series.judged >= 0)
    agreed_judge = (is_judged & (series.intended == series.judged)).sum(1)
    pairs: PairMetrics = {
        "classes": classes.tolist(),
        "series": num_series.tolist(),
        "correlation_median": _medians(rho, inverse, num_series).tolist(),
        "correlation_mean": mean(rho),
        "negative": mean(rho < 0),
        "not_monotone": mean(findings.flags["not_monotone"]),
        "end_points_nearest": _ratios(agreed, is_end_point.sum(1), inverse),
        "end_points_judge": _ratios(agreed_judge, is_judged.sum(1), inverse),
        "labels": _histograms(series.label, inverse, count).tolist(),
        "entropy": mean(series.entropy.mean(1)),
    }
    if not is_judged.any():
        del pairs["end_points_judge"]
    return pairs


def _medians(values: np.ndarray, inverse: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Median of the values of each set of classes, float64 [P]; no set is empty.

    `inverse` is the set of each series, `counts` the number of series of each set.
    """
    ordered = values[np.lexsort((values, inverse))]
    start = counts.cumsum() - counts
    middle: np.ndarray = ordered[start + (counts - 1) // 2] + ordered[start + counts // 2]
    return middle / 2


def _ratios(hits: np.ndarray, totals: np.ndarray, inverse: np.ndarray) -> list[float | None]:
    """Sum of hits over sum of totals per set of classes; None where the total is 0."""
    sums = (np.bincount(inverse, weights=counts).tolist() for counts in (hits, totals))
    return [hit / total if total else None for hit, total in zip(*sums, strict=True)]


def _histograms(label: np.ndarray, inverse: np.ndarray, count: int) -> np.ndarray:
    """Counts of labels [G, A] per set of classes and bin, int64 [P, LABEL_BINS]."""
    bins = (label * LABEL_BINS).astype(np.int64).clip(0, LABEL_BINS - 1)
    cells = inverse[:, None] * LABEL_BINS + bins
    return np.bincount(cells.ravel(), minlength=count * LABEL_BINS).reshape(count, LABEL_BINS)
