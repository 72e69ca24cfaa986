"""Post-hoc calibrators, fitted on validation logits: one list, one way to fit, apply and store.

A further calibrator needs a class, a function that fits it, a line in `CALIBRATORS`, and its label
in `semix.calib.run_folder`.
"""

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor
from torch.nn import functional

from semix.calib.metrics.one_pass import validated_float64
from semix.calib.temperature import nll_temperature

MAX_NAMED_CLASSES = 5  # in one warning
# Weight of the squared distance from temperature scaling, in standardised logits. It matters only
# where the data do not determine a class: it has no images, or its predictions are all correct.
PENALTY = 1e-8
TOLERANCE = {"gradient": 1e-6, "change": 1e-10}  # enough for four digits of the NLL
MIN_WEIGHT = 1e-12  # of a component of the ensemble, so that its logarithm is finite
log = logging.getLogger("semix.calib")


class Calibrator(ABC):
    """A map of logits, fitted on validation images; a frozen dataclass of numbers and tensors."""

    @abstractmethod
    def __call__(self, logits: Tensor) -> Tensor:
        """Calibrated logits or log probabilities, [N, K], of logits [N, K].

        Raises:
            ValueError: the logits have another number of classes than those of the fit.
        """

    def state(self) -> dict[str, Any]:
        """The fields as values for JSON, from which `from_state` makes the same calibrator."""
        return {each.name: _plain(getattr(self, each.name)) for each in fields(self)}  # type: ignore[arg-type]

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """The calibrator with this state; lists become float64 tensors.

        Raises:
            TypeError, ValueError: the state is that of another calibrator, or damaged.
        """
        return cls(**{name: _restored(value) for name, value in state.items()})


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return value.tolist() if isinstance(value, Tensor | np.ndarray) else value


def _restored(value: Any) -> Any:
    return torch.tensor(value, dtype=torch.float64) if isinstance(value, list) else value


@dataclass(frozen=True)
class TemperatureScaling(Calibrator):
    """Logits z / T, in the precision of the logits. See `semix.calib.temperature`."""

    temperature: float

    def __call__(self, logits: Tensor) -> Tensor:
        return logits / self.temperature


def fit_temperature_scaling(
    logits: Tensor, targets: Tensor, temperature: float | None = None
) -> TemperatureScaling:
    """The temperature that minimises the NLL. Args, Raises, Source: see `fit_vector`."""
    return TemperatureScaling(_temperature_of(logits, targets, temperature))


def _temperature_of(logits: Tensor, targets: Tensor, temperature: float | None) -> float:
    if temperature is not None:
        return temperature
    return nll_temperature(*validated_float64(logits, targets))


def require_same_classes(logits: Tensor, classes: int) -> None:
    """Raise ValueError for logits that are not [N, classes]."""
    if logits.ndim != 2 or logits.shape[1] != classes:
        text = f"logits have shape {tuple(logits.shape)}"
        raise ValueError(f"{text}: fitted on [N, {classes}]")


# Vector scaling


@dataclass(frozen=True)
class VectorScaling(Calibrator):
    """Scaled logits z_k w_k + b_k, of logits z; float64 on the CPU."""

    weight: Tensor  # w, [K] float64
    bias: Tensor  # b, [K] float64; its mean is 0, because a common shift has no effect

    def __call__(self, logits: Tensor) -> Tensor:
        require_same_classes(logits, len(self.weight))
        return logits.detach().cpu().double() * self.weight + self.bias


def fit_vector(logits: Tensor, targets: Tensor, temperature: float | None = None) -> VectorScaling:
    """The w and b that minimise the NLL of softmax(w z + b), to convergence.

    The NLL is convex but may have no minimum: for a class without images b goes to minus infinity,
    for separable data w goes to infinity. So a penalty of weight 1e-8 pulls towards temperature
    scaling. It is too weak to matter otherwise; a warning names the classes that it determines.
    Fit on validation data, never on the data that is measured afterwards.

    Args:
        logits: [N, K] float, before softmax.
        targets: [N] int, class numbers.
        temperature: that of `fit_temperature` by the NLL, if it is known already.
    Raises:
        ValueError: see `semix.calib.metrics.one_pass.validated_float64`.

    Source: Guo et al. 2017, section 4.2.
    """
    logits, targets = validated_float64(logits, targets)
    # Standardised columns: the same step size and penalty suit logits of any scale.
    centre, spread = logits.mean(0), logits.std(0, correction=0)
    spread = torch.where(spread > 0, spread, 1.0)
    standard = (logits - centre) / spread
    start = torch.stack([spread, centre]) / _temperature_of(logits, targets, temperature)
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


# Structured scaling


@dataclass(frozen=True)
class Structured(Calibrator):
    """Logits W z + b, with z the logits after temperature scaling and mixing with uniform.

    Float64 on the CPU.

    Attributes:
        temperature: of the original logits.
        uniform: weight of the uniform distribution, 1 / (N + 1) when fitted on N images, so that no
            probability is 1 where every prediction is correct.
        weight: W, [K, K] float64; for SVS only its diagonal, [K].
        bias: b, [K] float64.
    """

    temperature: float
    uniform: float
    weight: Tensor
    bias: Tensor

    def __call__(self, logits: Tensor) -> Tensor:
        require_same_classes(logits, len(self.bias))
        scores = mix_with_uniform(logits.detach().cpu().double(), self.temperature, self.uniform)
        if self.weight.ndim == 1:
            return scores * self.weight + self.bias
        return scores @ self.weight.T + self.bias


def fit_svs(logits: Tensor, targets: Tensor, temperature: float | None = None) -> Structured:
    """Structured vector scaling: minimises NLL + K/N (|b|^2 + |v|^2), where W = diag(1 + v).

    Args, Raises: see `fit_vector`.

    Source: Berta, Holzmuller, Jordan and Bach 2026, arXiv 2511.03685, with ridge penalties.
    """
    scaled_logits, targets, mixing = _scale_and_mix(logits, targets, temperature)
    samples, classes = scaled_logits.shape
    ridge = classes / samples

    def loss(parameters: Tensor) -> Tensor:
        v, b = parameters
        nll = functional.cross_entropy(scaled_logits * (1 + v) + b, targets)
        return nll + ridge * parameters.square().sum()

    v, b = minimise(loss, torch.zeros(2, classes, dtype=torch.float64), **TOLERANCE)
    return Structured(*mixing, weight=1 + v, bias=b)


def fit_sms(logits: Tensor, targets: Tensor, temperature: float | None = None) -> Structured:
    """Structured matrix scaling: SVS with a full matrix W, and K (K - 1)/N |off-diagonal W|^2.

    With fewer images than classes SVS is fitted instead, with a warning in the log.

    Args, Raises: see `fit_vector`. Source: see `fit_svs`.
    """
    scaled_logits, targets, mixing = _scale_and_mix(logits, targets, temperature)
    samples, classes = scaled_logits.shape
    if samples < classes:
        text = "%d validation images are too few for the matrix of %d classes: SVS in place of SMS"
        log.warning(text, samples, classes)
        return fit_svs(logits, targets, mixing[0])
    ridge, off_diagonal_ridge = classes / samples, classes * (classes - 1) / samples

    def loss(parameters: Tensor) -> Tensor:
        matrix, b = parameters[:-1], parameters[-1]
        nll = functional.cross_entropy(scaled_logits + scaled_logits @ matrix.T + b, targets)
        diagonal = matrix.diagonal().square().sum()
        off_diagonal = matrix.square().sum() - diagonal
        return nll + ridge * (b.square().sum() + diagonal) + off_diagonal_ridge * off_diagonal

    solution = minimise(loss, torch.zeros(classes + 1, classes, dtype=torch.float64), **TOLERANCE)
    identity = torch.eye(classes, dtype=torch.float64)
    return Structured(*mixing, weight=identity + solution[:-1], bias=solution[-1])


def mix_with_uniform(logits: Tensor, temperature: float, uniform: float) -> Tensor:
    """log((1 - u) softmax(z / T) + u / K), [N, K]."""
    scaled = (logits / temperature).log_softmax(1) + math.log1p(-uniform)
    floor = torch.full_like(scaled, math.log(uniform / logits.shape[1]))
    return torch.logaddexp(scaled, floor)


def _scale_and_mix(
    logits: Tensor, targets: Tensor, temperature: float | None
) -> tuple[Tensor, Tensor, tuple[float, float]]:
    """Logits after temperature scaling and mixing; targets; temperature and weight of uniform."""
    logits, targets = validated_float64(logits, targets)
    mixing = _temperature_of(logits, targets, temperature), 1 / (len(logits) + 1)
    return mix_with_uniform(logits, *mixing), targets, mixing


# Ensemble temperature scaling


@dataclass(frozen=True)
class Ensemble(Calibrator):
    """Log of w0 softmax(z / T) + w1 softmax(z) + w2 / K, of logits z; float64 on the CPU.

    Attributes:
        weights: w0, w1 and w2, [3] float64; they sum to 1 and are not negative.
    """

    temperature: float
    weights: Tensor

    def __call__(self, logits: Tensor) -> Tensor:
        components = _components(logits.detach().cpu().double(), self.temperature)
        log_weights = self.weights.log()  # minus infinity for a weight of 0
        return torch.logsumexp(components + log_weights.view(3, 1, 1), dim=0)


def fit_ensemble(logits: Tensor, targets: Tensor, temperature: float | None = None) -> Ensemble:
    """Ensemble temperature scaling: T, then the weights that minimise the NLL.

    The NLL is convex in the weights, so sequential quadratic programming finds its only minimum.

    Args, Raises: see `fit_vector`.

    Source: Zhang, Kailkhura and Han 2020, section 3.2, with the NLL in both steps.
    """
    logits, targets = validated_float64(logits, targets)
    temperature = _temperature_of(logits, targets, temperature)
    components = _components(logits, temperature)
    of_target = components.gather(2, targets.expand(3, -1)[..., None])[..., 0]  # [3, N]
    target_probabilities = of_target.T.exp().numpy()

    def nll(weights: np.ndarray) -> tuple[float, np.ndarray]:
        likelihood = target_probabilities @ weights
        return -np.log(likelihood).mean(), -(target_probabilities / likelihood[:, None]).mean(0)

    solution = minimize(
        nll,
        np.full(3, 1 / 3),
        method="SLSQP",
        jac=True,
        bounds=[(MIN_WEIGHT, 1.0)] * 3,
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1, "jac": lambda w: np.ones(3)},
        options={"ftol": 1e-14, "maxiter": 500},
    )
    return Ensemble(temperature, torch.from_numpy(solution.x / solution.x.sum()))


def _components(logits: Tensor, temperature: float) -> Tensor:
    """Log probabilities of the three components, [3, N, K]."""
    uniform = torch.full_like(logits, -math.log(logits.shape[1]))
    return torch.stack([(logits / temperature).log_softmax(1), logits.log_softmax(1), uniform])


# Isotonic regression


@dataclass(frozen=True)
class Isotonic(Calibrator):
    """A non-decreasing, piecewise linear map of p_k for each class; rows are then normalised.

    Its result is log probabilities, float64 on the CPU, all finite.

    Attributes:
        knots: for each class the x and y of its map, float64 arrays of equal length in [0, 1]; x
            increases, y does not decrease. Outside the range of x the map is constant.
        floor: least value of an entry before rows are normalised.
    """

    knots: tuple[tuple[np.ndarray, np.ndarray], ...]
    floor: float

    def __call__(self, logits: Tensor) -> Tensor:
        require_same_classes(logits, len(self.knots))
        p = logits.detach().cpu().double().softmax(1).numpy()
        mapped = [np.interp(p[:, k], x, y) for k, (x, y) in enumerate(self.knots)]
        probabilities = torch.from_numpy(np.stack(mapped, axis=1)).clamp(min=self.floor)
        return (probabilities / probabilities.sum(1, keepdim=True)).log()

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        knots = tuple((np.array(x, float), np.array(y, float)) for x, y in state["knots"])
        return cls(knots, state["floor"])


def fit_isotonic(logits: Tensor, targets: Tensor, temperature: float | None = None) -> Isotonic:
    """For each class, fit the non-decreasing map of p_k to 1[y = k] by least squares.

    A map is 0 below the smallest p_k of an image of class k, and all maps may be 0 in a row. N
    images cannot prove a probability of 0: entries are at least 1 / (N K) before rows are
    normalised, so that log probabilities are finite. A row of zeros becomes uniform.

    Args, Raises: see `fit_vector`; the temperature has no effect.

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


class CalibratorKind(NamedTuple):
    """How a calibrator is fitted and restored; `CALIBRATOR_LABELS` says how it is shown.

    Attributes:
        fit: from validation logits, targets, and their temperature, or None to fit it, too.
        type: its class, whose `from_state` restores what was fitted.
    """

    fit: Callable[[Tensor, Tensor, float | None], Calibrator]
    type: type[Calibrator]


CALIBRATORS: dict[str, CalibratorKind] = {
    "scaled": CalibratorKind(fit_temperature_scaling, TemperatureScaling),
    "ets": CalibratorKind(fit_ensemble, Ensemble),
    "vector": CalibratorKind(fit_vector, VectorScaling),
    "svs": CalibratorKind(fit_svs, Structured),
    "sms": CalibratorKind(fit_sms, Structured),
    "isotonic": CalibratorKind(fit_isotonic, Isotonic),
}
