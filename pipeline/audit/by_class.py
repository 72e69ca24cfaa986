"""The figures of each class and of each pair of classes, however many there are."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from pipeline.audit.flagging import Findings
from pipeline.audit.series import Series
from pipeline.audit.stream import Facts

LABEL_BINS = 10
Columns = dict[str, list[Any]]


def class_figures(facts: Facts, findings: Findings, names: Sequence[str]) -> list[dict[str, Any]]:
    """One record a class: its images, label mass, correlation and end points.

    `share` is of all label mass; `correlation` the mean over its series, None without one.
    """
    series, count = facts.series, len(names)
    of_series = np.bincount(series.classes.ravel(), minlength=count)
    rho = findings.correlation.numpy()
    sums = np.bincount(series.classes.ravel(), weights=rho.ravel(), minlength=count)
    ends = series.intended >= 0
    made = np.bincount(series.intended[ends], minlength=count)
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
            "end_points": int(made[k]),
            "end_points_agreed": int(agreed[k]),
        }
        for k, name in enumerate(names)
    ]


def pair_figures(series: Series, findings: Findings) -> Columns:
    """One list a column, one entry for each set of classes that has series.

    `labels` is the histogram of the first class's probability in LABEL_BINS equal bins.
    """
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
    found = {
        "classes": classes.tolist(),
        "series": number.tolist(),
        "correlation_median": _medians(rho, inverse, number).tolist(),
        "correlation_mean": mean(rho),
        "negative": mean(rho < 0),
        "not_monotone": mean(findings.flags["not_monotone"]),
        "end_points_nearest": _shares(agreed, ends.sum(1), inverse),
        "end_points_judge": _shares(right, judged.sum(1), inverse) if judged.any() else [],
        "labels": _histograms(series.label, inverse, count).tolist(),
        "entropy": mean(series.entropy.mean(1)),
    }
    return {key: column for key, column in found.items() if column}


def _medians(values: np.ndarray, inverse: np.ndarray, number: np.ndarray) -> np.ndarray:
    """Median of the values of each set, float64 [P]; none of them is empty."""
    ordered = values[np.lexsort((values, inverse))]
    start = number.cumsum() - number
    middle: np.ndarray = ordered[start + (number - 1) // 2] + ordered[start + number // 2]
    return middle / 2


def _shares(hits: np.ndarray, of: np.ndarray, inverse: np.ndarray) -> list[float | None]:
    """Share of hits in each set; None where there is nothing to hit."""
    summed = (np.bincount(inverse, weights=part).tolist() for part in (hits, of))
    return [hit / total if total else None for hit, total in zip(*summed, strict=True)]


def _histograms(label: np.ndarray, inverse: np.ndarray, count: int) -> np.ndarray:
    """Counts of labels [G, A] in each set and bin, int64 [P, LABEL_BINS]."""
    bins = (label * LABEL_BINS).astype(np.int64).clip(0, LABEL_BINS - 1)
    cells = inverse[:, None] * LABEL_BINS + bins
    return np.bincount(cells.ravel(), minlength=count * LABEL_BINS).reshape(count, LABEL_BINS)
