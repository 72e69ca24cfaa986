"""Temperature scaling, fitted on validation logits."""

import logging
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from semix.calib.metrics.measures import expected_error
from semix.calib.metrics.one_pass import equal_width, validated_float64
from semix.data.errors import InputError, choices

# If every prediction is correct, the NLL has no minimum, as it falls with T down to 0; if every
# prediction is wrong, it falls as T grows. Networks have temperatures between about 0.5 and 5.
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 100.0
# The grid over which the official code of focal loss, MbLS, ACLS and FeDLaS minimises ECE.
TEMPERATURE_GRID, ECE_BINS = [step / 10 for step in range(1, 101)], 15

log = logging.getLogger("semix.calib")


def fit_temperature(
    logits: Tensor, targets: Tensor, criterion: Literal["nll", "ece"] = "nll"
) -> float:
    """The temperature T that minimises the NLL, or the ECE, of softmax(logits / T).

    The NLL is convex in 1/T, so LBFGS in 1/T finds its only minimum, for any scale of the logits.
    Fit on validation data, never on the data that is measured afterwards.

    Args:
        logits: [N, K] float, before softmax.
        targets: [N] int, class numbers.
        criterion: "nll", to convergence; or "ece" with 15 bins of equal width, over the grid
            0.1, 0.2 .. 10, as in many official repositories; the smallest T on a tie.
    Returns:
        With "nll", T in [0.01, 100]. If the NLL has no minimum in this interval, T is one of its
        bounds, with a warning in the log: 0.01 if every prediction is correct, 100 if the logits
        have no information. If every row of logits is constant, T changes nothing and is 1. With
        "ece", a T of the grid.
    Raises:
        ValueError: see `semix.calib.metrics.one_pass.validated_float64`.
        InputError: the criterion is unknown.

    Source: Guo et al. 2017, section 4.2.
    """
    if criterion not in ("nll", "ece"):
        raise InputError("criterion", criterion, choices(criterion, ("nll", "ece")))
    logits, targets = validated_float64(logits, targets)
    if criterion == "ece":
        return _ece_temperature(logits, targets)
    temperature = nll_temperature(logits, targets)
    if temperature in (MIN_TEMPERATURE, MAX_TEMPERATURE):
        text = "the NLL has no minimum for T in [%g, %g]: T = %g"
        log.warning(text, MIN_TEMPERATURE, MAX_TEMPERATURE, temperature)
    return temperature


def nll_temperature(logits: Tensor, targets: Tensor) -> float:
    """As `fit_temperature` with "nll", of validated logits and targets, and without a warning.

    Args:
        targets: [N] int, or soft labels [N, K] float64.
    """
    # A shift of a row does not change its softmax; without it, large logits would lose digits.
    logits = logits - logits.amax(1, keepdim=True)
    unit = -logits.mean().item()
    if unit == 0:
        return 1.0
    if _slope(logits, targets, 1 / MIN_TEMPERATURE) <= 0:
        return MIN_TEMPERATURE
    if _slope(logits, targets, 1 / MAX_TEMPERATURE) >= 0:
        return MAX_TEMPERATURE
    # In this unit, the same step size and tolerance suit logits of any scale.
    return unit / _minimise_over_inverse(logits / unit, targets)


def _ece_temperature(logits: Tensor, targets: Tensor) -> float:
    largest, predicted = logits.max(1)
    relative_logits, correct = logits - largest[:, None], (predicted == targets).double()

    def error(temperature: float) -> float:
        confidence = 1 / (relative_logits / temperature).exp().sum(1)
        return expected_error(equal_width(confidence, correct, ECE_BINS))

    return min(TEMPERATURE_GRID, key=error)


def _slope(logits: Tensor, targets: Tensor, inverse: float) -> float:
    """Derivative of the NLL with respect to 1/T: the mean of E_p[z] - E_y[z]."""
    expected_logit = ((logits * inverse).softmax(1) * logits).sum(1)
    if targets.ndim == 2:
        label_logit = (logits * targets).sum(1)
    else:
        label_logit = logits.gather(1, targets[:, None])[:, 0]
    return (expected_logit - label_logit).mean().item()


def _minimise_over_inverse(logits: Tensor, targets: Tensor) -> float:
    inverse = torch.ones((), dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.LBFGS(
        [inverse],
        max_iter=500,
        tolerance_grad=1e-12,
        tolerance_change=1e-14,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = functional.cross_entropy(logits * inverse, targets)
        loss.backward()
        return loss

    optimiser.step(closure)
    return inverse.item()
