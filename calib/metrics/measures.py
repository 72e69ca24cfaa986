"""Calibration measures one by one, and `calibration_metrics` and `measured` of several."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import cached_property

import numpy as np
from scipy.fft import dct
from scipy.optimize import brentq
from torch import Tensor

from semix.calib.metrics.one_pass import (
    Adaptive,
    ClassBins,
    Predictions,
    ReliabilityBins,
    check_bins,
    equal_mass,
    equal_width,
    read_predictions,
    validated_inputs,
)
from semix.calib.metrics.selective import Selective, selective
from semix.calib.metrics.variational import top_label_error


def expected_error(bins: ReliabilityBins) -> float:
    """ECE = sum over bins of fraction * |confidence - accuracy|, in [0, 1].

    With bins of equal width this is ECE, with bins of equal size adaptive ECE.

    Source: Guo et al. 2017, eq. (3); Nguyen and O'Connor 2015 for equal size.
    """
    return (bins.fraction * bins.gap.abs()).sum().item()


def over_error(bins: ReliabilityBins) -> float:
    """O-ECE: the part of ECE from bins with confidence above accuracy.

    Not `overconfidence_error`, which weights each bin by its confidence once more.
    """
    return (bins.fraction * bins.gap.clamp(min=0)).sum().item()


def under_error(bins: ReliabilityBins) -> float:
    """U-ECE: the part of ECE from bins with confidence below accuracy. O-ECE + U-ECE = ECE."""
    return (bins.fraction * (-bins.gap).clamp(min=0)).sum().item()


def maximum_error(bins: ReliabilityBins) -> float:
    """MCE: the widest gap of any bin that holds samples, in [0, 1]. A tiny bin can decide it.

    Source: Guo et al. 2017, eq. (5).
    """
    return bins.gap.abs().max().item()  # an empty bin has gap 0


def classwise_error(bins: ClassBins) -> float:
    """Mean over all K classes of the ECE of p_k against "the target is k", in [0, 1].

    K is the width of the logits, so a class that no target has counts as well.

    Source: Kull et al. 2019, eq. (2) with bins of equal width.
    """
    gaps = (bins.mass - bins.positives).abs()  # fraction * |mean p_k - frequency| is gap / N
    return (gaps.sum() / (len(gaps) * bins.samples)).item()


POINTS = 1 << 14  # cells of the grid on [0, 1]; for bandwidths of 0.001 and more, error < 1e-6


def smooth_error(confidence: Tensor, correct: Tensor) -> float:
    """smECE: the bandwidth s at which the smoothed error of bandwidth s equals s, in [0, 1].

    The smoothed error is the integral over t in [0, 1] of |mean_n (c_n - correct_n) K_s(t, c_n)|
    with the reflected Gaussian kernel K_s. It falls as s grows, so there is one such s.

    Args:
        confidence, correct: [N] float64.

    Source: Blasiok and Nakkiran 2024, definition 2 and section 4.
    """
    coefficients = spectrum(confidence, correct)
    return float(brentq(lambda s: smoothed_error(coefficients, s) - s, 0.0, 1.0, xtol=1e-10))


def spectrum(confidence: Tensor, correct: Tensor) -> np.ndarray:
    """Cosine coefficients of the residuals, each split between its two nearest grid points."""
    position = confidence.numpy() * POINTS
    left = np.minimum(position.astype(np.int64), POINTS - 1)
    weight, residual = position - left, (confidence - correct).numpy() / len(position)
    grid: np.ndarray = np.bincount(left, (1 - weight) * residual, minlength=POINTS + 1)
    grid += np.bincount(left + 1, weight * residual, minlength=POINTS + 1)
    grid[1:-1] *= 0.5  # scipy counts all points but the two ends twice
    return np.asarray(dct(grid, type=1))


def smoothed_error(coefficients: np.ndarray, bandwidth: float) -> float:
    """The smoothed error at one bandwidth.

    Reflecting a Gaussian at 0 and 1 infinitely often equals damping cosines, so the kernel is
    exact: cos(pi k t) becomes exp(-(pi k s)^2 / 2) cos(pi k t).
    """
    frequency = np.pi * np.arange(len(coefficients))
    damped = coefficients * np.exp(-((frequency * bandwidth) ** 2) / 2)
    damped[-1] *= 2  # scipy counts the ends once, as in `spectrum`
    heights = np.abs(dct(damped, type=1))
    return float(np.trapezoid(heights, dx=1 / POINTS))


@dataclass(frozen=True)
class BrierTerms:
    """brier = reliability - resolution + uncertainty + within, exact up to rounding."""

    reliability: float  # mean squared gap of the bins, >= 0: what calibration can repair
    resolution: float  # how far frequencies differ between bins, >= 0: more is better
    uncertainty: float  # sum_k f_k (1 - f_k) of the class frequencies: depends on the data alone
    within: float  # from the spread inside bins; 0 if each bin holds one value; any sign


def decompose_brier(brier: float, bins: ClassBins) -> BrierTerms:
    """Split the mean Brier score of several classes, class by class over bins of p_k.

    `within` is the variance of p_k inside bins minus twice its covariance with "the target is k"
    inside them, summed over classes.

    Source: Murphy 1973; the two terms inside bins are Stephenson et al. 2008, eq. (6).
    """
    fraction, positives = bins.count.double() / bins.samples, bins.positives.double()  # [K, M]
    safe = bins.count.clamp(min=1)
    mean, frequency = bins.mass / safe, positives / safe
    overall = positives.sum(1, keepdim=True) / bins.samples  # [K, 1]
    reliability = (fraction * (mean - frequency).square()).sum().item()
    resolution = (fraction * (frequency - overall).square()).sum().item()
    uncertainty = (overall * (1 - overall)).sum().item()
    within = brier - (reliability - resolution + uncertainty)
    return BrierTerms(reliability, resolution, uncertainty, within)


def overconfidence_error(bins: ReliabilityBins) -> float:
    """OE = sum over bins of fraction * confidence * max(0, confidence - accuracy), in [0, 1].

    Source: Thulasidasan et al. 2019, eq. (3); the OE that CSM and RankMixup print.
    """
    return (bins.fraction * bins.confidence * bins.gap.clamp(min=0)).sum().item()


def underconfidence_error(bins: ReliabilityBins) -> float:
    """UE = sum over bins of fraction * confidence * max(0, accuracy - confidence), in [0, 1].

    Source: the UE that CSM and RankMixup print, the counterpart of OE.
    """
    return (bins.fraction * bins.confidence * (-bins.gap).clamp(min=0)).sum().item()


@dataclass(frozen=True)
class CalibrationMetrics:
    """Fractions in [0, 1], save nll (nats, at least 0), brier and its terms (in [-2, 2])."""

    accuracy: float
    ece: float  # bins of equal width, top label
    adaptive_ece: float  # bins of equal size, top label
    classwise_ece: float  # mean over classes
    smooth_ece: float  # a kernel, no bins, top label
    mce: float
    over_ece: float  # over_ece + under_ece = ece
    under_ece: float
    nll: float
    brier: float  # = brier_reliability - brier_resolution + brier_uncertainty + brier_within
    brier_reliability: float
    brier_resolution: float
    brier_uncertainty: float
    brier_within: float
    aurc: float  # area under the risk-coverage curve
    augrc: float  # the same for the generalised risk
    coverage_at_5_risk: float  # the largest coverage with at most 5 % errors
    risk_at_80_coverage: float
    variational_ece: float  # a lower bound, top label; can fall below 0 by chance

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def calibration_metrics(
    logits: Tensor, targets: Tensor, bins: int = 15, *, adaptive: Adaptive = "split"
) -> CalibrationMetrics:
    """Measure one set of predictions.

    Args:
        logits: [N, K] float, before softmax. Softmax is taken in float32 (of float64 logits in
            float64), sums over samples in float64.
        targets: [N] int, class numbers in 0..K-1.
        bins: for every binned measure; bins of equal width are (l, u].
        adaptive: the kind of equal-size bins, see `semix.calib.metrics.one_pass.equal_mass`.
    Raises:
        ValueError: see `semix.calib.metrics.one_pass.validated_inputs`; or bins below 1.
    """
    return CalibrationMetrics(**measured(logits, targets, bins=bins, adaptive=adaptive))


def measured(
    logits: Tensor,
    targets: Tensor,
    names: Iterable[str] = (),
    *,
    bins: int = 15,
    adaptive: Adaptive = "split",
) -> dict[str, float]:
    """Only these of the MEASURES, all of them by default; otherwise as `calibration_metrics`."""
    check_bins(bins)
    predictions = read_predictions(*validated_inputs(logits, targets), bins)
    return summarise(predictions, bins, names, adaptive=adaptive)


def summarise(
    predictions: Predictions,
    bins: int,
    names: Iterable[str] = (),
    *,
    adaptive: Adaptive = "split",
) -> dict[str, float]:
    """These of the MEASURES, all by default, of predictions; `bins` as for `read_predictions`."""
    parts = _Parts(predictions, bins, adaptive)
    return {name: MEASURES[name](parts) for name in names or MEASURES}


class _Parts:
    """What several measures are computed from, each part when it is first asked for."""

    def __init__(self, predictions: Predictions, bins: int, adaptive: Adaptive) -> None:
        self.predictions, self._bins, self._adaptive = predictions, bins, adaptive
        self.confidence, self.correct = predictions.confidence, predictions.correct
        self.brier = predictions.brier.mean().item()

    @cached_property
    def of_equal_width(self) -> ReliabilityBins:
        precision = self.predictions.precision
        return equal_width(self.confidence, self.correct, self._bins, precision=precision)

    @cached_property
    def of_equal_size(self) -> ReliabilityBins:
        precision, variant = self.predictions.precision, self._adaptive
        return equal_mass(
            self.confidence, self.correct, self._bins, variant=variant, precision=precision
        )

    @cached_property
    def terms(self) -> BrierTerms:
        return decompose_brier(self.brier, self.predictions.classes)

    @cached_property
    def selective(self) -> Selective:
        return selective(self.confidence, self.correct)


MEASURES: dict[str, Callable[[_Parts], float]] = {  # the fields of `CalibrationMetrics`
    "accuracy": lambda parts: parts.correct.mean().item(),
    "ece": lambda parts: expected_error(parts.of_equal_width),
    "adaptive_ece": lambda parts: expected_error(parts.of_equal_size),
    "classwise_ece": lambda parts: classwise_error(parts.predictions.classes),
    "smooth_ece": lambda parts: smooth_error(parts.confidence, parts.correct),
    "mce": lambda parts: maximum_error(parts.of_equal_width),
    "over_ece": lambda parts: over_error(parts.of_equal_width),
    "under_ece": lambda parts: under_error(parts.of_equal_width),
    "nll": lambda parts: parts.predictions.nll.mean().item(),
    "brier": lambda parts: parts.brier,
    "brier_reliability": lambda parts: parts.terms.reliability,
    "brier_resolution": lambda parts: parts.terms.resolution,
    "brier_uncertainty": lambda parts: parts.terms.uncertainty,
    "brier_within": lambda parts: parts.terms.within,
    "aurc": lambda parts: parts.selective.aurc,
    "augrc": lambda parts: parts.selective.augrc,
    "coverage_at_5_risk": lambda parts: parts.selective.coverage_at_5_risk,
    "risk_at_80_coverage": lambda parts: parts.selective.risk_at_80_coverage,
    "variational_ece": lambda parts: top_label_error(parts.confidence, parts.correct),
}
