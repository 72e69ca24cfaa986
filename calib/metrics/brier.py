"""Brier score in Murphy's parts: reliability, resolution, uncertainty, and what bins hide."""

from dataclasses import dataclass

from calib.metrics.class_bins import ClassBins


@dataclass(frozen=True)
class BrierParts:
    """brier = reliability - resolution + uncertainty + within, to the last digits."""

    reliability: float  # mean squared gap of the bins, from 0: what calibration can repair
    resolution: float  # how far frequencies differ between bins, from 0: more is better
    uncertainty: float  # sum_k f_k (1 - f_k) of the class frequencies: of the data alone
    within: float  # what the spread inside bins adds; 0 if each bin holds one value; any sign


def brier_parts(brier: float, bins: ClassBins) -> BrierParts:
    """Split the mean Brier score of several classes, class by class over bins of p_k.

    `within` is the variance of p_k inside bins less twice its covariance with "the target is k"
    there, summed over classes.

    Source: Murphy 1973; the two parts inside bins are Stephenson et al. 2008, eq. (6).
    """
    share, positives = bins.count.double() / bins.samples, bins.positives.double()  # [K, M]
    safe = bins.count.clamp(min=1)
    mean, frequency = bins.mass / safe, positives / safe
    overall = positives.sum(1, keepdim=True) / bins.samples  # [K, 1]
    reliability = (share * (mean - frequency).square()).sum().item()
    resolution = (share * (frequency - overall).square()).sum().item()
    uncertainty = (overall * (1 - overall)).sum().item()
    within = brier - (reliability - resolution + uncertainty)
    return BrierParts(reliability, resolution, uncertainty, within)
