"""All calibration measures of one set of logits."""

from dataclasses import asdict, dataclass

from torch import Tensor

from calib.metrics.bins import equal_mass, equal_width, top_label
from calib.metrics.brier import brier_score
from calib.metrics.classwise_ece import classwise_error
from calib.metrics.ece import expected_error, over_error, under_error
from calib.metrics.inputs import checked
from calib.metrics.mce import maximum_error
from calib.metrics.nll import negative_log_likelihood


@dataclass(frozen=True)
class CalibrationMetrics:
    """Fractions in [0, 1], save nll (nats, from 0) and brier (in [0, 2])."""

    accuracy: float
    ece: float  # bins of equal width, top label
    adaptive_ece: float  # bins of equal size, top label
    classwise_ece: float  # mean over classes
    mce: float
    over_ece: float  # over_ece + under_ece = ece
    under_ece: float
    nll: float
    brier: float

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def calibration_metrics(logits: Tensor, targets: Tensor, bins: int = 15) -> CalibrationMetrics:
    """Measure one set of predictions.

    Args:
        logits: [N, K] float, before softmax.
        targets: [N] int, class numbers in 0..K-1.
        bins: for every binned measure; bins of equal width are (l, u].
    Raises:
        ValueError: see `checked`; or bins below 1.
    """
    logits, targets = checked(logits, targets)
    confidence, correct = top_label(logits, targets)
    width = equal_width(confidence, correct, bins)
    return CalibrationMetrics(
        accuracy=correct.mean().item(),
        ece=expected_error(width),
        adaptive_ece=expected_error(equal_mass(confidence, correct, bins)),
        classwise_ece=classwise_error(logits, targets, bins),
        mce=maximum_error(width),
        over_ece=over_error(width),
        under_ece=under_error(width),
        nll=negative_log_likelihood(logits, targets),
        brier=brier_score(logits, targets),
    )
