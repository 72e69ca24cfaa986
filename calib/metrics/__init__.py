"""Measures of calibration and uncertainty; fractions, not percentages."""

from semix.calib.metrics.bootstrap import bootstrap_intervals
from semix.calib.metrics.measures import (
    CalibrationMetrics,
    calibration_metrics,
    overconfidence_error,
    underconfidence_error,
)
from semix.calib.metrics.one_pass import ReliabilityBins, reliability_bins
from semix.calib.metrics.ood import OodMetrics, max_probability, negative_entropy, ood_metrics

__all__ = [
    "CalibrationMetrics",
    "OodMetrics",
    "ReliabilityBins",
    "bootstrap_intervals",
    "calibration_metrics",
    "max_probability",
    "negative_entropy",
    "ood_metrics",
    "overconfidence_error",
    "reliability_bins",
    "underconfidence_error",
]
