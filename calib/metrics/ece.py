"""Expected calibration error, and its over- and underconfident parts."""

from calib.metrics.bins import ReliabilityBins


def expected_error(bins: ReliabilityBins) -> float:
    """ECE = sum over bins of share * |confidence - accuracy|, in [0, 1].

    With bins of equal width this is ECE, with bins of equal size adaptive ECE.

    Source: Guo et al. 2017, eq. (3); Nguyen and O'Connor 2015 for equal size.
    """
    return (bins.share * bins.gap.abs()).sum().item()


def over_error(bins: ReliabilityBins) -> float:
    """O-ECE: the part of ECE from bins with confidence above accuracy.

    Not `overconfidence_error`, which weights each bin by its confidence once more.
    """
    return (bins.share * bins.gap.clamp(min=0)).sum().item()


def under_error(bins: ReliabilityBins) -> float:
    """U-ECE: the part of ECE from bins with confidence below accuracy. O-ECE + U-ECE = ECE."""
    return (bins.share * (-bins.gap).clamp(min=0)).sum().item()
