"""Post-hoc calibration, fitted on validation logits."""

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
from semix.calib.parameters import one_of

__all__ = ["Isotonic", "VectorScaling", "fit_isotonic", "fit_temperature", "fit_vector"]


# If every prediction is right, the NLL falls for ever as T goes to 0; if every one is wrong, as
# T grows. Measured temperatures of networks lie between about 0.5 and 5.
LOWEST, HIGHEST = 0.01, 100.0
# The grid over which the official code of focal loss, MbLS, ACLS and FeDLaS minimises ECE.
GRID, BINS = [step / 10 for step in range(1, 101)], 15

MAX_NAMED = 5  # classes that a warning names

log = logging.getLogger("semix.calib")


def fit_temperature(
    logits: Tensor, targets: Tensor, criterion: Literal["nll", "ece"] = "nll"
) -> float:
    """The temperature T that minimises the NLL, or the ECE, of softmax(logits / T).

    The NLL is convex in 1/T, so LBFGS in 1/T finds the one minimum whatever the scale of the
    logits. Fit on validation data, never on the data that is measured afterwards.

    Args:
        logits: [N, K] float, before softmax.
        targets: [N] int, class numbers.
        criterion: "nll", to convergence; or "ece" with 15 bins of equal width, over the grid
            0.1, 0.2 .. 10 and with the least T on a tie, as many official repositories choose.
    Returns:
        By the NLL, T in [0.01, 100]. It is one of the bounds, with a line in the log, if the NLL
        has no minimum in between: 0.01 if every prediction is right, 100 if the logits carry no
        information. It is 1 if every row of logits is constant, as T then changes nothing. By the
        ECE, a T of the grid.
    Raises:
        ValueError: see `semix.calib.metrics.one_pass.validated_float64`.
        InputError: an unknown criterion.

    Source: Guo et al. 2017, section 4.2.
    """
    one_of("criterion", criterion, ("nll", "ece"))
    logits, targets = validated_float64(logits, targets)
    if criterion == "ece":
        return _ece_temperature(logits, targets)
    temperature = nll_temperature(logits, targets)
    if temperature in (LOWEST, HIGHEST):
        text = "the NLL has no minimum for T in [%g, %g]: T = %g"
        log.warning(text, LOWEST, HIGHEST, temperature)
    return temperature


def nll_temperature(logits: Tensor, targets: Tensor) -> float:
    """As `fit_temperature` by the NLL, without logging, from validated logits and targets."""
    # Softmax ignores a shift of its row; subtracting the maximum keeps digits of large logits.
    logits = logits - logits.amax(1, keepdim=True)
    spread = -logits.mean().item()
    if spread == 0:
        return 1.0
    if _slope(logits, targets, 1 / LOWEST) <= 0:
        return LOWEST
    if _slope(logits, targets, 1 / HIGHEST) >= 0:
        return HIGHEST
    # With logits of unit spread one step size and one tolerance suit all.
    return spread / _best_inverse(logits / spread, targets)


def _ece_temperature(logits: Tensor, targets: Tensor) -> float:
    highest, predicted = logits.max(1)
    below, correct = logits - highest[:, None], (predicted == targets).double()

    def error(temperature: float) -> float:
        confidence = 1 / (below / temperature).exp().sum(1)
        return expected_error(equal_width(confidence, correct, BINS))

    return min(GRID, key=error)


def _slope(logits: Tensor, targets: Tensor, inverse: float) -> float:
    """Derivative of the NLL by 1/T: mean of E_p[z] - z_y."""
    expected = ((logits * inverse).softmax(1) * logits).sum(1)
    return (expected - logits.gather(1, targets[:, None])[:, 0]).mean().item()


def _best_inverse(logits: Tensor, targets: Tensor) -> float:
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


# Weight of the squared distance from temperature scaling, in units of each class's spread. It
# matters only where the data decide nothing: a class without images, or one always right.
PENALTY = 1e-8


def require_same_classes(logits: Tensor, classes: int) -> None:
    """Raise ValueError for logits that are not [N, classes]."""
    if logits.ndim != 2 or logits.shape[1] != classes:
        text = f"logits have shape {tuple(logits.shape)}"
        raise ValueError(f"{text}: fitted on [N, {classes}]")


@dataclass(frozen=True)
class VectorScaling:
    """z_k w_k + b_k."""

    weight: Tensor  # w, [K] float64
    bias: Tensor  # b, [K] float64, of mean 0, as a common shift changes nothing

    def apply(self, logits: Tensor) -> Tensor:
        """Scaled logits, [N, K] float64 on the CPU, of logits [N, K].

        Raises:
            ValueError: the logits have another number of classes.
        """
        require_same_classes(logits, len(self.weight))
        return logits.detach().cpu().double() * self.weight + self.bias


def fit_vector(logits: Tensor, targets: Tensor) -> VectorScaling:
    """The w and b that minimise the NLL of softmax(w z + b), to convergence.

    The NLL is convex, but need not have a minimum: a class without an image sends its b to minus
    infinity, separable data send w to infinity. So a penalty of 1e-8 pulls towards temperature
    scaling, too weak to matter elsewhere; the log names the classes that only the penalty fixes.
    Fit on validation data, never on the data that is measured afterwards.

    Args:
        logits: [N, K] float, before softmax.
        targets: [N] int, class numbers.
    Raises:
        ValueError: see `semix.calib.metrics.one_pass.validated_float64`.

    Source: Guo et al. 2017, section 4.2.
    """
    logits, targets = validated_float64(logits, targets)
    # Columns of mean 0 and deviation 1: one step size and one penalty suit all.
    centre, spread = logits.mean(0), logits.std(0, correction=0)
    spread = torch.where(spread > 0, spread, 1.0)
    standard = (logits - centre) / spread
    start = torch.stack([spread, centre]) / nll_temperature(logits, targets)
    scale, offset = _minimise(standard, targets, start)
    _report_undetermined(standard * scale + offset)
    weight = scale / spread
    bias = offset - weight * centre
    return VectorScaling(weight=weight, bias=bias - bias.mean())


def _minimise(logits: Tensor, targets: Tensor, start: Tensor) -> Tensor:
    """Scale and offset, [2, K], from `start`, which the penalty pulls towards."""

    def loss(factors: Tensor) -> Tensor:
        nll = functional.cross_entropy(logits * factors[0] + factors[1], targets)
        return nll + PENALTY / 2 * (factors - start).square().sum()

    return minimise(loss, start, gradient=1e-11, change=1e-14)


def minimise(
    loss: Callable[[Tensor], Tensor], start: Tensor, *, gradient: float, change: float
) -> Tensor:
    """The minimum of a smooth convex function, by LBFGS from `start`.

    Args:
        gradient: stop when its largest entry is below this; change: or the step is.
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


def _report_undetermined(logits: Tensor) -> None:
    """Log the classes whose bias hardly changes the NLL: its curvature is below the penalty's."""
    p = logits.softmax(1)
    curvature = (p * (1 - p)).mean(0)  # of the NLL, by b
    classes = (curvature < 100 * PENALTY).nonzero()[:, 0].tolist()
    if classes:
        text = "the data do not determine the vector scaling of class %s: kept near temperature"
        more = f" and {len(classes) - MAX_NAMED} more" if len(classes) > MAX_NAMED else ""
        log.warning(text, ", ".join(map(str, classes[:MAX_NAMED])) + more)


@dataclass(frozen=True)
class Isotonic:
    """A rising, piecewise linear map of p_k for each class, then rows that sum to 1.

    Attributes:
        knots: for each class its x and y, float64 arrays of equal length, x rising from within
            [0, 1], y not falling in [0, 1]; before the first and behind the last x, y is level.
        floor: the minimum of every entry before the rows are normalised.
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
        raised = torch.from_numpy(np.stack(mapped, axis=1)).clamp(min=self.floor)
        return (raised / raised.sum(1, keepdim=True)).log()


def fit_isotonic(logits: Tensor, targets: Tensor) -> Isotonic:
    """For each class the rising map of p_k that is closest to 1[y = k] in least squares.

    The maps are 0 below the least p_k that an image of class k had, and may be 0 for every class
    of a row. N images cannot prove a zero: it is raised to 1 / (N K) before the rows are
    normalised, so that log probabilities are finite; a row of zeros becomes uniform.
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
        fitted = IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip")
        fitted.fit(p[:, k], (labels == k).astype(float))
        knots.append((fitted.X_thresholds_, fitted.y_thresholds_))
    return Isotonic(tuple(knots), floor=1 / (samples * classes))
