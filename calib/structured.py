"""Structured calibrators: more parameters than a temperature, regularised for few images."""

import logging
import math
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor
from torch.nn import functional

from semix.calib.metrics.one_pass import validated_float64
from semix.calib.posthoc import minimise, nll_temperature, require_same_classes

__all__ = ["Ensemble", "Structured", "fit_ensemble", "fit_sms", "fit_svs"]

TOLERANCE = {"gradient": 1e-6, "change": 1e-10}  # for an NLL that is printed to four digits
MIN_WEIGHT = 1e-12  # of a part of the ensemble: its logarithm stays finite
log = logging.getLogger("semix.calib")


@dataclass(frozen=True)
class Structured:
    """W z + b of logits z, after temperature scaling and mixing with the uniform distribution.

    Attributes:
        temperature: of the original logits.
        uniform: share of the uniform distribution, 1 / (N + 1) when fitted on N images; it avoids
            certainty where every image is predicted right.
        weight: W, [K, K] float64; of SVS its diagonal alone, [K].
        bias: b, [K] float64.
    """

    temperature: float
    uniform: float
    weight: Tensor
    bias: Tensor

    def apply(self, logits: Tensor) -> Tensor:
        """Scaled logits, [N, K] float64 on the CPU, of logits [N, K].

        Raises:
            ValueError: the logits have another number of classes.
        """
        require_same_classes(logits, len(self.bias))
        scores = mixed_logits(logits.detach().cpu().double(), self.temperature, self.uniform)
        if self.weight.ndim == 1:
            return scores * self.weight + self.bias
        return scores @ self.weight.T + self.bias


def fit_svs(logits: Tensor, targets: Tensor) -> Structured:
    """Structured vector scaling: the NLL with K/N (|b|^2 + |v|^2), v the diagonal minus 1.

    Fit on validation data, never on the data that is measured afterwards.

    Args:
        logits: [N, K] float, before softmax.
        targets: [N] int, class numbers.
    Raises:
        ValueError: see `semix.calib.metrics.one_pass.validated_float64`.

    Source: Berta, Holzmuller, Jordan and Bach 2026, arXiv 2511.03685, with ridge penalties.
    """
    start_logits, targets, start = _mixed_start(logits, targets)
    samples, classes = start_logits.shape
    strength = classes / samples

    def loss(free: Tensor) -> Tensor:
        v, b = free
        nll = functional.cross_entropy(start_logits * (1 + v) + b, targets)
        return nll + strength * free.square().sum()

    v, b = minimise(loss, torch.zeros(2, classes, dtype=torch.float64), **TOLERANCE)
    return Structured(*start, weight=1 + v, bias=b)


def fit_sms(logits: Tensor, targets: Tensor) -> Structured:
    """Structured matrix scaling: SVS with a full matrix, K (K - 1)/N |off-diagonal|^2.

    With fewer images than classes SVS is fitted instead, and the log says so.

    Args, Raises, Source: as of `fit_svs`.
    """
    start_logits, targets, start = _mixed_start(logits, targets)
    samples, classes = start_logits.shape
    if samples < classes:
        text = "%d validation images are too few for the matrix of %d classes: SVS in place of SMS"
        log.warning(text, samples, classes)
        return fit_svs(logits, targets)
    near, far = classes / samples, classes * (classes - 1) / samples

    def loss(free: Tensor) -> Tensor:
        matrix, b = free[:-1], free[-1]
        nll = functional.cross_entropy(start_logits + start_logits @ matrix.T + b, targets)
        diagonal = matrix.diagonal().square().sum()
        outside = matrix.square().sum() - diagonal
        return nll + near * (b.square().sum() + diagonal) + far * outside

    solution = minimise(loss, torch.zeros(classes + 1, classes, dtype=torch.float64), **TOLERANCE)
    identity = torch.eye(classes, dtype=torch.float64)
    return Structured(*start, weight=identity + solution[:-1], bias=solution[-1])


def mixed_logits(logits: Tensor, temperature: float, uniform: float) -> Tensor:
    """log((1 - u) softmax(z / T) + u / K), [N, K]."""
    scaled = (logits / temperature).log_softmax(1) + math.log1p(-uniform)
    floor = torch.full_like(scaled, math.log(uniform / logits.shape[1]))
    return torch.logaddexp(scaled, floor)


def _mixed_start(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, tuple[float, float]]:
    """Mixed logits, targets, and (temperature, uniform share)."""
    logits, targets = validated_float64(logits, targets)
    start = nll_temperature(logits, targets), 1 / (len(logits) + 1)
    return mixed_logits(logits, *start), targets, start


@dataclass(frozen=True)
class Ensemble:
    """w0 softmax(z / T) + w1 softmax(z) + w2 / K.

    Attributes:
        weights: w, three that sum to 1, none negative.
    """

    temperature: float
    weights: tuple[float, float, float]

    def apply(self, logits: Tensor) -> Tensor:
        """Log probabilities, [N, K] float64 on the CPU, of logits [N, K]."""
        parts = _components(logits.detach().cpu().double(), self.temperature)
        shares = torch.tensor(self.weights, dtype=torch.float64).log()  # weight 0: minus infinity
        return torch.logsumexp(parts + shares.view(3, 1, 1), dim=0)


def fit_ensemble(logits: Tensor, targets: Tensor) -> Ensemble:
    """Ensemble temperature scaling: T, then the weights that minimise the NLL.

    The NLL is convex in the weights, so sequential quadratic programming finds its one minimum.
    Fit on validation data, never on the data that is measured afterwards.

    Args, Raises: as of `fit_svs`.

    Source: Zhang, Kailkhura and Han 2020, section 3.2, by likelihood in both steps.
    """
    logits, targets = validated_float64(logits, targets)
    temperature = nll_temperature(logits, targets)
    parts = _components(logits, temperature)
    of_target = parts.gather(2, targets.expand(3, -1)[..., None])[..., 0].T.exp().numpy()  # [N, 3]

    def nll(weights: np.ndarray) -> tuple[float, np.ndarray]:
        likelihood = of_target @ weights
        return -np.log(likelihood).mean(), -(of_target / likelihood[:, None]).mean(0)

    solution = minimize(
        nll,
        np.full(3, 1 / 3),
        method="SLSQP",
        jac=True,
        bounds=[(MIN_WEIGHT, 1.0)] * 3,
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1, "jac": lambda w: np.ones(3)},
        options={"ftol": 1e-14, "maxiter": 500},
    )
    weights = solution.x / solution.x.sum()
    first, second, third = weights.tolist()
    return Ensemble(temperature, (first, second, third))


def _components(logits: Tensor, temperature: float) -> Tensor:
    """Log probabilities of the three parts, [3, N, K]."""
    even = torch.full_like(logits, -math.log(logits.shape[1]))
    return torch.stack([(logits / temperature).log_softmax(1), logits.log_softmax(1), even])
