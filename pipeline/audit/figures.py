"""The figures of the whole dataset: correlation, end points, labels, degenerate images."""

from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from data.quality import Agreement, endpoint_agreement, series_quality, weight_curve
from pipeline.audit.flagging import Findings
from pipeline.audit.pictures import FAULTS
from pipeline.audit.series import Series
from pipeline.audit.stream import Facts

BINS = 20
Figures = dict[str, Any]


def figures(facts: Facts, findings: Findings) -> Figures:
    """Everything over all series, as plain values; a figure that does not apply is None."""
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
            "images": int((series.faults > 0).sum()),
            **{
                name.replace(" ", "_"): int((series.faults >> bit & 1).sum())
                for bit, name in enumerate(FAULTS)
            },
        },
        "disagreement": _spread(series.disagreement),
        "stability": _spread(series.stability),
    }


def end_point_figures(series: Series) -> dict[str, Agreement | None]:
    """How often unmixed images are of the class they were made for, by whom it was asked."""
    ends = series.intended >= 0
    return {
        "nearest_prototype": _agreement(series.intended, series.nearest, ends),
        "nearest_of_series": _agreement(series.intended, series.of_series, ends),
        "judge": _agreement(series.intended, series.judged, ends & (series.judged >= 0)),
    }


def histogram(values: np.ndarray, low: float, high: float, bins: int = BINS) -> Figures:
    """Counts in equal bins; what lies outside is in the outermost ones."""
    kept = values.astype(np.float64).clip(low, high)
    counts, edges = np.histogram(kept, bins=bins, range=(low, high))
    return {"edges": edges.round(6).tolist(), "counts": counts.tolist()}


def _correlation(series: Series, findings: Findings) -> Figures:
    rho = findings.rho
    pairs = series.classes.shape[1] == 2
    found = {
        "median": float(rho.quantile(0.5)),
        "mean": float(rho.mean()),
        "not_monotone": None,
        "negative": float((rho < 0).double().mean()),
    }
    if pairs:
        alphas, weights = torch.from_numpy(series.alphas), torch.from_numpy(series.weights)
        found = asdict(series_quality(alphas, weights))
        del found["series"]
    return {**found, "histogram": histogram(rho.numpy(), -1, 1)}


def _curve(series: Series) -> Figures | None:
    if series.classes.shape[1] > 2:
        return None
    curve = weight_curve(torch.from_numpy(series.alphas), torch.from_numpy(series.weights))
    return {
        "alphas": curve.alphas.tolist(),
        "mean": curve.mean.tolist(),
        "levels": list(curve.levels),
        "quantiles": curve.quantiles.tolist(),
    }


def _agreement(intended: np.ndarray, seen: np.ndarray, where: np.ndarray) -> Agreement | None:
    if not where.any():
        return None
    return endpoint_agreement(torch.from_numpy(seen[where]), torch.from_numpy(intended[where]))


def _spread(values: np.ndarray) -> Figures | None:
    """Mean, median and extremes of what was recorded; None if nothing was."""
    known = values[np.isfinite(values)].astype(np.float64)
    if not known.size:
        return None
    return {
        "recorded": len(known),
        "mean": float(known.mean()),
        "median": float(np.median(known)),
        "least": float(known.min()),
        "most": float(known.max()),
    }
