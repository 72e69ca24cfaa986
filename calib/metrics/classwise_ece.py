"""Classwise expected calibration error."""

from calib.metrics.class_bins import ClassBins


def classwise_error(bins: ClassBins) -> float:
    """Mean over all K classes of the ECE of p_k against "the target is k", in [0, 1].

    K is the width of the logits, so a class that is missing among the targets counts as well.

    Source: Kull et al. 2019, eq. (2) with bins of equal width.
    """
    gaps = (bins.mass - bins.positives).abs()  # share * |mean p_k - frequency| is gap / N
    return (gaps.sum() / (len(gaps) * bins.samples)).item()
