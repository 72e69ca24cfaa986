"""Over- and underconfidence error: gaps weighted by confidence; they do not add up to ECE."""

from calib.metrics.bins import ReliabilityBins


def overconfidence_error(bins: ReliabilityBins) -> float:
    """OE = sum over bins of share * confidence * max(0, confidence - accuracy), in [0, 1].

    Source: Thulasidasan et al. 2019, eq. (3); the OE that CSM and RankMixup print.
    """
    return (bins.share * bins.confidence * bins.gap.clamp(min=0)).sum().item()


def underconfidence_error(bins: ReliabilityBins) -> float:
    """UE = sum over bins of share * confidence * max(0, accuracy - confidence), in [0, 1].

    Source: the UE that CSM and RankMixup print, the counterpart of OE.
    """
    return (bins.share * bins.confidence * (-bins.gap).clamp(min=0)).sum().item()
