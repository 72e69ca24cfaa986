"""What is fitted on a seed's validation images, in calibration.json, for use with new images."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional

from semix.calib.calibrators import CALIBRATORS, STANDARD, CalibratorName
from semix.calib.calibrators.base import Calibrator
from semix.calib.calibrators.scaling import TemperatureScaling
from semix.calib.metrics.conformal import SCORES, nonconformity, threshold
from semix.calib.run_folder import StageName, report_damage, seed_folder
from semix.calib.temperature import fit_temperature
from semix.data.errors import InputError
from semix.data.files import read_json, write_json

CALIBRATION = "calibration.json"  # of a seed
SCHEMA = 1
MISCOVERAGES = (0.1, 0.05, 0.01)  # fractions of conformal sets that may lack the true class


@dataclass(frozen=True)
class Calibration:
    """What was fitted on validation images for one stage of one seed.

    Attributes:
        calibrators: by name, see `CALIBRATORS`; all share one temperature.
        thresholds: of conformal sets of the scaled logits, by score and miscoverage; infinite where
            the validation images are too few.
    """

    calibrators: Mapping[str, Calibrator]
    thresholds: Mapping[str, Mapping[float, float]]

    @property
    def temperature(self) -> float:
        """The temperature that minimises the NLL."""
        scaling = self.calibrators["scaled"]
        assert isinstance(scaling, TemperatureScaling)
        return scaling.temperature

    @classmethod
    def fit(
        cls,
        logits: Tensor,
        targets: Tensor,
        names: Iterable[CalibratorName] = STANDARD,
        *,
        mixed: tuple[Tensor, Tensor] | None = None,
    ) -> Self:
        """Fit temperature scaling, these calibrators and every threshold.

        Args:
            logits, targets: [N, K] and [N], of validation images.
            mixed: logits and soft labels of mixed images, each [M, K], for the calibrators that
                are fitted on these, too; None leaves those calibrators out.
        """
        temperature = fit_temperature(logits, targets)
        calibrators: dict[str, Calibrator] = {}
        for name in dict.fromkeys(("scaled", *names)):
            kind = CALIBRATORS[name]
            if not kind.with_mixed:
                calibrators[name] = kind.fit(logits, targets, temperature)
            elif mixed is not None:
                one_hot = functional.one_hot(targets, logits.shape[1])
                both = torch.cat([logits, mixed[0]]), torch.cat([one_hot, mixed[1]])
                calibrators[name] = kind.fit(*both, None)
        probabilities = (logits / temperature).double().softmax(1)
        thresholds: dict[str, dict[float, float]] = {}
        for score in SCORES:
            scores = nonconformity(probabilities, score)
            thresholds[score] = {rate: threshold(scores, targets, rate) for rate in MISCOVERAGES}
        return cls(calibrators, thresholds)

    def state(self) -> dict[str, Any]:
        """As JSON; an infinite threshold is null."""
        return {
            "calibrators": {name: each.state() for name, each in self.calibrators.items()},
            "thresholds": {
                score: {str(rate): _finite(limit) for rate, limit in limits.items()}
                for score, limits in self.thresholds.items()
            },
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """The calibration with this state.

        Raises:
            KeyError, TypeError, ValueError: the state is damaged.
        """
        calibrators = {
            name: CALIBRATORS[name].from_state(each) for name, each in state["calibrators"].items()
        }
        thresholds = {
            score: {
                float(rate): math.inf if limit is None else limit for rate, limit in row.items()
            }
            for score, row in state["thresholds"].items()
        }
        return cls(calibrators, thresholds)


def _finite(limit: float) -> float | None:
    return None if math.isinf(limit) else limit


def write_calibrations(
    run: Path,
    seed: int,
    calibrations: Mapping[StageName, Calibration],
    sources: Mapping[StageName, str],
) -> None:
    """Write a seed's `calibration.json`.

    Args:
        sources: by stage, the digest of what its logits came from, as in `evaluation.json`.
    """
    stages = {
        stage: {"source": sources[stage], **each.state()} for stage, each in calibrations.items()
    }
    write_json(seed_folder(run, seed) / CALIBRATION, {"schema": SCHEMA, "stages": stages})


def read_calibration(run: Path, seed: int, stage: StageName) -> Calibration:
    """Read what was fitted for one stage of a seed.

    Raises:
        InputError: the seed is not measured, or its `calibration.json` is damaged.
    """
    path = seed_folder(run, seed) / CALIBRATION
    if not path.is_file():
        raise InputError("run", path, f"is missing; run `semix evaluate {run}` first")
    with report_damage(path):
        content = read_json(path)
        if content["schema"] != SCHEMA:
            raise ValueError(f"schema {content['schema']} where {SCHEMA} is needed")
        return Calibration.from_state(content["stages"][stage])
