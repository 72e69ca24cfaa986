"""How calibrated a classifier is, one measure a file; every figure is a fraction, not percent."""

from calib.metrics.bins import ReliabilityBins, reliability_bins
from calib.metrics.ood import OodMetrics, ood_metrics
from calib.metrics.summary import CalibrationMetrics, calibration_metrics

__all__ = [
    "CalibrationMetrics",
    "OodMetrics",
    "ReliabilityBins",
    "calibration_metrics",
    "ood_metrics",
    "reliability_bins",
]
