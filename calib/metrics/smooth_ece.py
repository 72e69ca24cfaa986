"""Smooth ECE: a kernel instead of bins, as wide as the error that it finds."""

import numpy as np
from torch import Tensor

POINTS = 1 << 14  # cells of the grid on [0, 1]; at bandwidths from 0.001 the error is below 1e-6


def smooth_error(confidence: Tensor, correct: Tensor) -> float:
    """smECE: the bandwidth s at which the smoothed error of bandwidth s equals s, in [0, 1].

    The smoothed error is the integral over t in [0, 1] of |mean_n (c_n - correct_n) K_s(t, c_n)|
    with the reflected Gaussian kernel K_s. It falls as s grows, so there is one such s.

    Args:
        confidence, correct: [N] float64.

    Source: Blasiok and Nakkiran 2024, definition 2 and section 4.
    """
    from scipy.optimize import brentq

    found = spectrum(confidence, correct)
    return float(brentq(lambda width: smoothed_error(found, width) - width, 0.0, 1.0, xtol=1e-10))


def spectrum(confidence: Tensor, correct: Tensor) -> np.ndarray:
    """Cosine coefficients of the residuals, each shared between its two nearest grid points."""
    from scipy.fft import dct

    place = confidence.numpy() * POINTS
    left = np.minimum(place.astype(np.int64), POINTS - 1)
    part, residual = place - left, (confidence - correct).numpy() / len(place)
    grid: np.ndarray = np.bincount(left, (1 - part) * residual, minlength=POINTS + 1)
    grid += np.bincount(left + 1, part * residual, minlength=POINTS + 1)
    grid[1:-1] *= 0.5  # scipy counts the points between the ends twice
    return np.asarray(dct(grid, type=1))


def smoothed_error(coefficients: np.ndarray, bandwidth: float) -> float:
    """The smoothed error at one bandwidth.

    Reflecting a Gaussian at 0 and 1 without end is the same as damping cosines, so the kernel is
    exact; cos(pi k t) becomes exp(-(pi k s)^2 / 2) cos(pi k t).
    """
    from scipy.fft import dct

    frequency = np.pi * np.arange(len(coefficients))
    damped = coefficients * np.exp(-((frequency * bandwidth) ** 2) / 2)
    damped[-1] *= 2  # as the points above
    heights = np.abs(dct(damped, type=1))
    return float(np.trapezoid(heights, dx=1 / POINTS))
