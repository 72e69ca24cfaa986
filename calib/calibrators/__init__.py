"""Post-hoc calibrators, fitted on validation logits: one list, one way to fit, apply and store.

A further calibrator needs a class, a function that fits it, a line in `CALIBRATORS`, and its label
in `semix.calib.kinds`.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from semix.calib.calibrators.base import Calibrator
from semix.calib.calibrators.margin import MarginScaling, fit_margin_scaling
from semix.calib.calibrators.probabilities import (
    EnsembleTemperature,
    Isotonic,
    fit_ensemble,
    fit_isotonic,
)
from semix.calib.calibrators.scaling import (
    Structured,
    TemperatureScaling,
    VectorScaling,
    fit_sms,
    fit_svs,
    fit_temperature_scaling,
    fit_vector,
    fit_with_mixed,
)


class CalibratorKind(NamedTuple):
    """How a calibrator is fitted and restored; `CALIBRATOR_LABELS` says how it is shown.

    Attributes:
        fit: from validation logits, targets, and their temperature, or None to fit it, too.
        type: its class, whose `from_state` restores what was fitted.
        with_mixed: whether it is fitted on validation and mixed images together, and so exists for
            runs on mixed images only. Its targets are then labels, [N + M, K].
    """

    fit: Callable[[Tensor, Tensor, float | None], Calibrator]
    type: type[Calibrator]
    with_mixed: bool = False


CALIBRATORS: dict[str, CalibratorKind] = {
    "scaled": CalibratorKind(fit_temperature_scaling, TemperatureScaling),
    "ets": CalibratorKind(fit_ensemble, EnsembleTemperature),
    "vector": CalibratorKind(fit_vector, VectorScaling),
    "svs": CalibratorKind(fit_svs, Structured),
    "sms": CalibratorKind(fit_sms, Structured),
    "isotonic": CalibratorKind(fit_isotonic, Isotonic),
    "smart": CalibratorKind(fit_margin_scaling, MarginScaling),
    "scaled_mixed": CalibratorKind(fit_with_mixed, TemperatureScaling, with_mixed=True),
}
