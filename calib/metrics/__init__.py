"""How calibrated a classifier is, one measure a file; every figure is a fraction, not percent."""

from calib.metrics.bins import ReliabilityBins, reliability_bins
from calib.metrics.bootstrap import bootstrap_intervals
from calib.metrics.ood import OodMetrics, max_probability, negative_entropy, ood_metrics
from calib.metrics.overconfidence import overconfidence_error, underconfidence_error
from calib.metrics.summary import CalibrationMetrics, calibration_metrics

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
