"""Post-hoc calibrators, fitted on validation logits: one list, one way to fit, apply and store.

A further calibrator needs its class, a function that fits it, and a line in `CALIBRATORS`. The list
itself loads no torch, so that settings and tables can read it at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from semix.calib.calibrators.base import Calibrator

PLAIN: Literal["plain"] = "plain"  # the kind of what no calibrator has changed


@dataclass(frozen=True)
class CalibratorKind:
    """A calibrator by name: how it is shown, fitted and restored.

    Attributes:
        label: follows a method's name in tables.
        module: below this package.
        type: its class there.
        fitter: the function there that fits it.
        with_mixed: whether it is fitted on validation and mixed images together, and so exists for
            runs on mixed images only. Its targets are then labels, [N + M, K].
    """

    label: str
    module: str
    type: str
    fitter: str
    with_mixed: bool = False

    def fit(self, logits: "Tensor", targets: "Tensor", temperature: float | None) -> "Calibrator":
        """Fit on validation images.

        Args:
            logits, targets: [N, K] and [N].
            temperature: of temperature scaling on them; None fits it, too.
        """
        calibrator: Calibrator = self._named(self.fitter)(logits, targets, temperature)
        return calibrator

    def from_state(self, state: Mapping[str, Any]) -> "Calibrator":
        """What was fitted, from its `state`; raises as `Calibrator.from_state`."""
        calibrator: Calibrator = self._named(self.type).from_state(state)
        return calibrator

    def _named(self, name: str) -> Any:
        return resolve_name(f"{__name__}.{self.module}:{name}")


CALIBRATORS = {
    "scaled": CalibratorKind(
        "+ temperature scaling", "scaling", "TemperatureScaling", "fit_temperature_scaling"
    ),
    "ets": CalibratorKind("+ ETS", "probabilities", "EnsembleTemperature", "fit_ensemble"),
    "vector": CalibratorKind("+ vector scaling", "scaling", "VectorScaling", "fit_vector"),
    "svs": CalibratorKind("+ SVS", "scaling", "Structured", "fit_svs"),
    "sms": CalibratorKind("+ SMS", "scaling", "Structured", "fit_sms"),
    "isotonic": CalibratorKind(
        "+ isotonic regression", "probabilities", "Isotonic", "fit_isotonic"
    ),
    "smart": CalibratorKind("+ SMART", "margin", "MarginScaling", "fit_margin_scaling"),
    "scaled_mixed": CalibratorKind(
        "+ temperature scaling with mixed images",
        "scaling",
        "TemperatureScaling",
        "fit_with_mixed",
        with_mixed=True,
    ),
}
if TYPE_CHECKING:
    CalibratorName = str
else:
    CalibratorName = Literal[tuple(CALIBRATORS)]
STANDARD: tuple[CalibratorName, ...] = ("ets", "vector", "svs", "sms", "isotonic")


def split_kind(key: str) -> tuple[str, str]:
    """The kind and the measure in a key such as `scaled_ece`; "plain" for `ece`."""
    prefixes = sorted((f"{kind}_" for kind in CALIBRATORS), key=len, reverse=True)
    for prefix in prefixes:
        if key.startswith(prefix):
            return prefix[:-1], key.removeprefix(prefix)
    return PLAIN, key
