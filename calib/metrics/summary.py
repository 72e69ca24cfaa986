"""All calibration measures of one set of logits."""

from dataclasses import asdict, dataclass

from torch import Tensor

from calib.metrics.aurc import risk_coverage_area
from calib.metrics.bins import Adaptive, equal_mass, equal_width
from calib.metrics.brier import brier_parts
from calib.metrics.classwise_ece import classwise_error
from calib.metrics.ece import expected_error, over_error, under_error
from calib.metrics.inputs import as_given, check_bins
from calib.metrics.mce import maximum_error
from calib.metrics.predictions import Predictions, read_predictions
from calib.metrics.smooth_ece import smooth_error


@dataclass(frozen=True)
class CalibrationMetrics:
    """Fractions in [0, 1], save nll (nats, from 0), brier and its parts (in [-2, 2])."""

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
        adaptive: which bins of equal size: see `calib.metrics.bins.equal_mass`.
    Raises:
        ValueError: see `calib.metrics.inputs.as_given`; or bins below 1.
    """
    check_bins(bins)
    found = read_predictions(*as_given(logits, targets), bins)
    return summarise(found, bins, adaptive=adaptive)


def summarise(found: Predictions, bins: int, *, adaptive: Adaptive = "split") -> CalibrationMetrics:
    """The measures of what one pass found; `bins` as in that pass."""
    confidence, correct = found.confidence, found.correct
    width = equal_width(confidence, correct, bins, precision=found.precision)
    mass = equal_mass(confidence, correct, bins, variant=adaptive, precision=found.precision)
    brier = found.brier.mean().item()
    parts = brier_parts(brier, found.classes)
    return CalibrationMetrics(
        accuracy=correct.mean().item(),
        ece=expected_error(width),
        adaptive_ece=expected_error(mass),
        classwise_ece=classwise_error(found.classes),
        smooth_ece=smooth_error(confidence, correct),
        mce=maximum_error(width),
        over_ece=over_error(width),
        under_ece=under_error(width),
        nll=found.nll.mean().item(),
        brier=brier,
        brier_reliability=parts.reliability,
        brier_resolution=parts.resolution,
        brier_uncertainty=parts.uncertainty,
        brier_within=parts.within,
        aurc=risk_coverage_area(confidence, correct),
    )
