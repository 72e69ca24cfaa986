"""Calibration after training, fitted on held-out data: temperature, vector, isotonic."""

from calib.posthoc.isotonic import Isotonic, fit_isotonic
from calib.posthoc.temperature import fit_temperature
from calib.posthoc.vector import VectorScaling, fit_vector

__all__ = ["Isotonic", "VectorScaling", "fit_isotonic", "fit_temperature", "fit_vector"]
