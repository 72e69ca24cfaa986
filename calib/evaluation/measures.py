"""The measures of one classifier's logits, plain and after each post-hoc method."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from calib.config.evaluation import EvaluationConfig
from calib.metrics.bootstrap import intervals_of
from calib.metrics.inputs import as_given
from calib.metrics.predictions import read_predictions
from calib.metrics.summary import summarise
from calib.posthoc import fit_isotonic, fit_temperature, fit_vector

# As trained, then each of: one temperature, a scale and shift a class, a rising map a class.
KINDS = ("plain", "scaled", "vector", "isotonic")


def measure(found: Mapping[str, Tensor], config: EvaluationConfig | None = None) -> dict[str, Any]:
    """Fit what is fitted on validation, and measure the test logits without and with it.

    Args:
        found: validation_logits, validation_targets, test_logits, test_targets.
        config: how many bins and resamples; by default those of `EvaluationConfig`.
    Returns:
        "bins", "temperature", the measures under each of KINDS, and, where there are resamples,
        "intervals" {measure: [low, high]} of the plain ones and "posthoc_intervals" of the
        others by kind.
    """
    config = config or EvaluationConfig()
    held_out = found["validation_logits"], found["validation_targets"]
    temperature = fit_temperature(*held_out)
    row: dict[str, Any] = {"bins": config.bins, "temperature": temperature}
    intervals = {}
    for kind in KINDS:
        logits = _after(found, kind, temperature)
        row[kind], intervals[kind] = _measured(logits, found["test_targets"], config)
    if config.bootstrap:
        row["intervals"] = intervals.pop("plain")
        row["posthoc_intervals"] = intervals
    return row


def _after(found: Mapping[str, Tensor], kind: str, temperature: float) -> Tensor:
    """The test logits of one of KINDS. What is fitted sees validation images alone."""
    held_out = found["validation_logits"], found["validation_targets"]
    logits = found["test_logits"]
    if kind == "vector":
        return fit_vector(*held_out).apply(logits)
    if kind == "isotonic":
        return fit_isotonic(*held_out).apply(logits)
    return logits / (temperature if kind == "scaled" else 1.0)


def _measured(
    logits: Tensor, targets: Tensor, config: EvaluationConfig
) -> tuple[dict[str, float], dict[str, list[float]]]:
    predictions = read_predictions(*as_given(logits, targets), config.bins)
    measures = summarise(predictions, config.bins).as_dict()
    if not config.bootstrap:
        return measures, {}
    intervals = intervals_of(predictions, config.bins, resamples=config.bootstrap, seed=0)
    return measures, {name: list(interval) for name, interval in intervals.items()}
