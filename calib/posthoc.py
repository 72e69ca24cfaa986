"""Post-hoc calibration, fitted on validation logits: temperature, vector, isotonic."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from semix.calib.metrics.measures import expected_error
from semix.calib.metrics.one_pass import equal_width, validated_float64
from semix.calib.parameters import require_one_of

__all__ = ["Isotonic", "VectorScaling", "fit_isotonic", "fit_temperature", "fit_vector"]


# If every prediction is correct, the NLL has no minimum, as it falls with T down to 0; if every
# prediction is wrong, it falls as T grows. Networks have temperatures between about 0.5 and 5.
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 100.0
# The grid over which the official code of focal loss, MbLS, ACLS and FeDLaS minimises ECE.
TEMPERATURE_GRID, ECE_BINS = [step / 10 for step in range(1, 101)], 15

MAX_NAMED_CLASSES = 5  # in one warning

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
    require_one_of("criterion", criterion, ("nll", "ece"))
    logits, targets = validated_float64(logits, targets)
    if criterion == "ece":
        return _ece_temperature(logits, targets)
    temperature = nll_temperature(logits, targets)
    if temperature in (MIN_TEMPERATURE, MAX_TEMPERATURE):
        text = "the NLL has no minimum for T in [%g, %g]: T = %g"
        log.warning(text, MIN_TEMPERATURE, MAX_TEMPERATURE, temperature)
    return temperature


def nll_temperature(logits: Tensor, targets: Tensor) -> float:
    """As `fit_temperature` with "nll", of validated logits and targets, and without a warning."""
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
    """Derivative of the NLL with respect to 1/T: the mean of E_p[z] - z_y."""
    expected_logit = ((logits * inverse).softmax(1) * logits).sum(1)
    return (expected_logit - logits.gather(1, targets[:, None])[:, 0]).mean().item()


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


# Weight of the squared distance from temperature scaling, in standardised logits. It matters only
# where the data do not determine a class: it has no images, or its predictions are all correct.
PENALTY = 1e-8


def require_same_classes(logits: Tensor, classes: int) -> None:
    """Raise ValueError for logits that are not [N, classes]."""
    if logits.ndim != 2 or logits.shape[1] != classes:
        text = f"logits have shape {tuple(logits.shape)}"
        raise ValueError(f"{text}: fitted on [N, {classes}]")


@dataclass(frozen=True)
class VectorScaling:
    """Scaled logits z_k w_k + b_k, of logits z."""

    weight: Tensor  # w, [K] float64
    bias: Tensor  # b, [K] float64; its mean is 0, because a common shift has no effect

    def apply(self, logits: Tensor) -> Tensor:
        """The scaled logits, [N, K] float64 on the CPU, of logits [N, K].

        Raises:
            ValueError: the logits have another number of classes.
        """
        require_same_classes(logits, len(self.weight))
        return logits.detach().cpu().double() * self.weight + self.bias


def fit_vector(logits: Tensor, targets: Tensor) -> VectorScaling:
    """The w and b that minimise the NLL of softmax(w z + b), to convergence.

    The NLL is convex but may have no minimum: for a class without images b goes to minus infinity,
    for separable data w goes to infinity. So a penalty of weight 1e-8 pulls towards temperature
    scaling. It is too weak to matter otherwise; a warning names the classes that it determines.
    Fit on validation data, never on the data that is measured afterwards.

    Args:
        logits: [N, K] float, before softmax.
        targets: [N] int, class numbers.
    Raises:
        ValueError: see `semix.calib.metrics.one_pass.validated_float64`.

    Source: Guo et al. 2017, section 4.2.
    """
    logits, targets = validated_float64(logits, targets)
    # Standardised columns: the same step size and penalty suit logits of any scale.
    centre, spread = logits.mean(0), logits.std(0, correction=0)
    spread = torch.where(spread > 0, spread, 1.0)
    standard = (logits - centre) / spread
    start = torch.stack([spread, centre]) / nll_temperature(logits, targets)
    scale, offset = _minimise(standard, targets, start)
    _warn_of_undetermined_classes(standard * scale + offset)
    weight = scale / spread
    bias = offset - weight * centre
    return VectorScaling(weight=weight, bias=bias - bias.mean())


def _minimise(logits: Tensor, targets: Tensor, start: Tensor) -> Tensor:
    """Scale and offset, [2, K], with a penalty on the distance from `start`."""

    def loss(factors: Tensor) -> Tensor:
        nll = functional.cross_entropy(logits * factors[0] + factors[1], targets)
        return nll + PENALTY / 2 * (factors - start).square().sum()

    return minimise(loss, start, gradient=1e-11, change=1e-14)


def minimise(
    loss: Callable[[Tensor], Tensor], start: Tensor, *, gradient: float, change: float
) -> Tensor:
    """Minimise a smooth convex function by LBFGS from `start`; returns where the minimum is.

    Args:
        gradient: stop when the largest entry of the gradient is below this.
        change: stop when a step changes the loss or the position by less than this.
    """
    factors = start.clone().requires_grad_()
    optimiser = torch.optim.LBFGS(
        [factors],
        max_iter=2000,
        history_size=50,
        tolerance_grad=gradient,
        tolerance_change=change,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimiser.zero_grad()
        value = loss(factors)
        value.backward()
        return value

    optimiser.step(closure)
    return factors.detach()


def _warn_of_undetermined_classes(logits: Tensor) -> None:
    """Warn of classes for which the penalty is not small against the NLL's curvature."""
    p = logits.softmax(1)
    curvature = (p * (1 - p)).mean(0)  # second derivative of the NLL with respect to b
    classes = (curvature < 100 * PENALTY).nonzero()[:, 0].tolist()
    if classes:
        text = "the data do not determine the vector scaling of class %s: near temperature scaling"
        others = len(classes) - MAX_NAMED_CLASSES
        more = f" and {others} more" if others > 0 else ""
        log.warning(text, ", ".join(map(str, classes[:MAX_NAMED_CLASSES])) + more)


@dataclass(frozen=True)
class Isotonic:
    """A non-decreasing, piecewise linear map of p_k for each class; rows are then normalised.

    Attributes:
        knots: for each class the x and y of its map, float64 arrays of equal length in [0, 1]; x
            increases, y does not decrease. Outside the range of x the map is constant.
        floor: least value of an entry before rows are normalised.
    """

    knots: tuple[tuple[np.ndarray, np.ndarray], ...]
    floor: float

    def apply(self, logits: Tensor) -> Tensor:
        """Log probabilities, [N, K] float64 on the CPU, all finite, of logits [N, K].

        Raises:
            ValueError: the logits have another number of classes.
        """
        require_same_classes(logits, len(self.knots))
        p = logits.detach().cpu().double().softmax(1).numpy()
        mapped = [np.interp(p[:, k], x, y) for k, (x, y) in enumerate(self.knots)]
        probabilities = torch.from_numpy(np.stack(mapped, axis=1)).clamp(min=self.floor)
        return (probabilities / probabilities.sum(1, keepdim=True)).log()


def fit_isotonic(logits: Tensor, targets: Tensor) -> Isotonic:
    """For each class, fit the non-decreasing map of p_k to 1[y = k] by least squares.

    A map is 0 below the smallest p_k of an image of class k, and all maps may be 0 in a row. N
    images cannot prove a probability of 0: entries are at least 1 / (N K) before rows are
    normalised, so that log probabilities are finite. A row of zeros becomes uniform.
    Fit on validation data, never on the data that is measured afterwards.

    Args:
        logits: [N, K] float, before softmax.
        targets: [N] int, class numbers.
    Raises:
        ValueError: see `semix.calib.metrics.one_pass.validated_float64`.

    Source: Zadrozny and Elkan 2002, one against the rest, normalised.
    """
    from sklearn.isotonic import IsotonicRegression  # takes a second to import

    logits, targets = validated_float64(logits, targets)
    samples, classes = logits.shape
    p, labels = logits.softmax(1).numpy(), targets.numpy()
    knots = []
    for k in range(classes):
        regression = IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip")
        regression.fit(p[:, k], (labels == k).astype(float))
        knots.append((regression.X_thresholds_, regression.y_thresholds_))
    return Isotonic(tuple(knots), floor=1 / (samples * classes))
