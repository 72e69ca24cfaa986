"""Calibrators of probabilities: ensemble temperature scaling and isotonic regression."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from semix.calib.calibrators.base import (
    Calibrator,
    as_tensor,
    require_same_classes,
    temperature_of,
)
from semix.calib.metrics.one_pass import validated_float64

MIN_WEIGHT = 1e-12  # of a component of the ensemble, so that its logarithm is finite


@dataclass(frozen=True)
class EnsembleTemperature(Calibrator):
    """Log of w0 softmax(z / T) + w1 softmax(z) + w2 / K, of logits z; float64 on the CPU.

    Attributes:
        weights: w0, w1 and w2, [3] float64; they sum to 1 and are not negative.
    """

    temperature: float
    weights: Tensor

    def transform(self, logits: Tensor) -> Tensor:
        components = _components(logits, self.temperature)
        log_weights = self.weights.log()  # minus infinity for a weight of 0
        return torch.logsumexp(components + log_weights.view(3, 1, 1), dim=0)


def fit_ensemble(
    logits: Tensor, targets: Tensor, temperature: float | None = None
) -> EnsembleTemperature:
    """EnsembleTemperature temperature scaling: T, then the weights that minimise the NLL.

    The NLL is convex in the weights, so sequential quadratic programming finds its only minimum.

    Args, Raises: see `fit_vector`.

    Source: Zhang, Kailkhura and Han 2020, section 3.2, with the NLL in both steps.
    """
    logits, targets = validated_float64(logits, targets)
    temperature = temperature_of(logits, targets, temperature)
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
    return EnsembleTemperature(temperature, torch.from_numpy(solution.x / solution.x.sum()))


def _components(logits: Tensor, temperature: float) -> Tensor:
    """Log probabilities of the three components, [3, N, K]."""
    uniform = torch.full_like(logits, -math.log(logits.shape[1]))
    return torch.stack([(logits / temperature).log_softmax(1), logits.log_softmax(1), uniform])


@dataclass(frozen=True)
class Isotonic(Calibrator):
    """A non-decreasing, piecewise linear map of p_k for each class; rows are then normalised.

    Its result is log probabilities, float64 on the CPU, all finite.

    Attributes:
        knots: for each class the x and y of its map, float64 of equal length in [0, 1]; x
            increases, y does not decrease. Outside the range of x the map is constant.
        floor: least value of an entry before rows are normalised.
    """

    knots: tuple[tuple[Tensor, Tensor], ...]
    floor: float

    @property
    def num_classes(self) -> int:
        return len(self.knots)

    def __call__(self, logits: Tensor) -> Tensor:
        require_same_classes(logits, self.num_classes)
        p = logits.detach().cpu().double().softmax(1).numpy()
        mapped = [np.interp(p[:, k], x, y) for k, (x, y) in enumerate(self.knots)]
        return self._log_normalised(torch.from_numpy(np.stack(mapped, axis=1)))

    def transform(self, logits: Tensor) -> Tensor:
        p = logits.softmax(1)
        mapped = [_without_search(p[:, k], x, y) for k, (x, y) in enumerate(self.knots)]
        return self._log_normalised(torch.stack(mapped, dim=1))

    def _log_normalised(self, mapped: Tensor) -> Tensor:
        probabilities = mapped.clamp(min=self.floor)
        return (probabilities / probabilities.sum(1, keepdim=True)).log()

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        knots = tuple((as_tensor(x), as_tensor(y)) for x, y in state["knots"])
        return cls(knots, state["floor"])


def _without_search(values: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The piecewise linear map through the points (x, y), [N] of [N]; constant outside.

    ONNX has no binary search. This takes time and memory of N by the number of points, so only
    graphs, whose batches are small, compute it so.
    """
    if len(x) == 1:
        return y.expand(len(values))
    slopes = y.diff() / x.diff()
    # What of each segment lies below the value.
    covered = torch.minimum(values[:, None], x[1:]) - torch.minimum(values[:, None], x[:-1])
    return y[0] + (covered * slopes).sum(1)


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
        x, y = regression.X_thresholds_, regression.y_thresholds_
        knots.append((torch.from_numpy(x.copy()), torch.from_numpy(y.copy())))
    return Isotonic(tuple(knots), floor=1 / (samples * classes))
