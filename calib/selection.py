"""Selects the epoch whose weights are kept, and stops early, by measures on validation images."""

import copy
import math
from collections.abc import Mapping
from typing import TypedDict, get_args

from torch import Tensor, nn

from semix.calib.config import Criterion, EarlyStopConfig
from semix.calib.divergence import check_finite
from semix.calib.metrics.measures import measured
from semix.calib.network import Outputs
from semix.calib.temperature import fit_temperature

CRITERIA: tuple[str, ...] = get_args(Criterion)
SCALED_NLL = "scaled_nll"
HIGHER_IS_BETTER = ("accuracy",)


class EpochSelectionState(TypedDict):
    """The state for a checkpoint; values are None before the first epoch, and if not used."""

    best_epoch: int | None
    best_value: float | None
    stop_value: float | None
    waited: int


class EpochSelection:
    """Selects weights and stops early, by the validation measures of each epoch of a stage.

    Stopping early and selecting the best weights are separate settings: a stage that stops early
    with `select: last` keeps the weights of its last epoch.

    Attributes:
        best: state of the network after the best epoch so far; empty with `select: last`. A
            checkpoint has it in addition to `state_dict`.
    """

    def __init__(self, select: str, early_stop: EarlyStopConfig | None) -> None:
        self.select, self.early_stop = select, early_stop
        self.best: dict[str, Tensor] = {}
        self._best_epoch: int | None = None
        self._best_value: float | None = None
        self._stop_value: float | None = None
        self._waited = 0  # epochs since early_stop.measure last improved

    @property
    def needs_validation(self) -> bool:
        """Whether validation measures are needed after each epoch."""
        return self.select != "last" or self.early_stop is not None

    @property
    def needs_temperature(self) -> bool:
        """Whether one of these measures is that after temperature scaling."""
        stop_measure = self.early_stop.measure if self.early_stop else None
        return SCALED_NLL in (self.select, stop_measure)

    @property
    def finished(self) -> bool:
        return self.early_stop is not None and self._waited >= self.early_stop.patience

    def note(self, measures: Mapping[str, float], network: nn.Module, epoch: int) -> None:
        """Record the measures of an epoch, and copy the network's weights if they are the best."""
        if self.select != "last" and is_better(self.select, measures, self._best_value):
            self._best_value, self._best_epoch = measures[self.select], epoch
            self.best = copy.deepcopy(network.state_dict())
        if self.early_stop is not None:
            self._waited += 1
            if is_better(self.early_stop.measure, measures, self._stop_value):
                self._stop_value, self._waited = measures[self.early_stop.measure], 0

    def state_dict(self) -> EpochSelectionState:
        return {
            "best_epoch": self._best_epoch,
            "best_value": self._best_value,
            "stop_value": self._stop_value,
            "waited": self._waited,
        }

    def load_state_dict(self, state: EpochSelectionState, best: dict[str, Tensor]) -> None:
        self._best_epoch, self._best_value = state["best_epoch"], state["best_value"]
        self._stop_value, self._waited = state["stop_value"], state["waited"]
        self.best = best


def is_better(name: str, measures: Mapping[str, float], best: float | None) -> bool:
    """Whether a measure is better than its best value so far; the first value always is."""
    if best is None or math.isnan(best):
        return True
    return measures[name] > best if name in HIGHER_IS_BETTER else measures[name] < best


def validation_measures(outputs: Outputs, *, scaled: bool = False) -> dict[str, float]:
    """The measures that can be a criterion, with 15 bins, also if the evaluation has others.

    Args:
        scaled: also fit a temperature, for the NLL after scaling with it.
    Raises:
        Diverged: a logit is NaN or infinite, which finite weights do not exclude.
    """
    check_finite({"a logit of a validation image": outputs.logits})
    logits, targets = outputs.logits.cpu(), outputs.targets.cpu()
    measures = measured(logits, targets, CRITERIA)
    if scaled:
        temperature = fit_temperature(logits, targets)
        measures[SCALED_NLL] = measured(logits / temperature, targets, ["nll"])["nll"]
    return measures
