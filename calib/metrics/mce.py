"""Maximum calibration error."""

from calib.metrics.bins import ReliabilityBins


def maximum_error(bins: ReliabilityBins) -> float:
    """MCE: the widest gap of any bin that holds samples, in [0, 1]. A tiny bin can decide it.

    Source: Guo et al. 2017, eq. (5).
    """
    return bins.gap.abs().max().item()  # an empty bin has gap 0
