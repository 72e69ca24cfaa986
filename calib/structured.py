"""Post-hoc calibration by structured vector and matrix scaling, and by an ensemble (ETS)."""

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

TOLERANCE = {"gradient": 1e-6, "change": 1e-10}  # enough for four digits of the NLL
MIN_WEIGHT = 1e-12  # of a component of the ensemble, so that its logarithm is finite
log = logging.getLogger("semix.calib")


@dataclass(frozen=True)
class Structured:
    """Logits W z + b, with z the logits after temperature scaling and mixing with uniform.

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

    def apply(self, logits: Tensor) -> Tensor:
        """The scaled logits, [N, K] float64 on the CPU, of logits [N, K].

        Raises:
            ValueError: the logits have another number of classes.
        """
        require_same_classes(logits, len(self.bias))
        scores = mix_with_uniform(logits.detach().cpu().double(), self.temperature, self.uniform)
        if self.weight.ndim == 1:
            return scores * self.weight + self.bias
        return scores @ self.weight.T + self.bias


def fit_svs(logits: Tensor, targets: Tensor) -> Structured:
    """Structured vector scaling: minimises NLL + K/N (|b|^2 + |v|^2), where W = diag(1 + v).

    Fit on validation data, never on the data that is measured afterwards.

    Args:
        logits: [N, K] float, before softmax.
        targets: [N] int, class numbers.
    Raises:
        ValueError: see `semix.calib.metrics.one_pass.validated_float64`.

    Source: Berta, Holzmuller, Jordan and Bach 2026, arXiv 2511.03685, with ridge penalties.
    """
    scaled_logits, targets, mixing = _scale_and_mix(logits, targets)
    samples, classes = scaled_logits.shape
    ridge = classes / samples

    def loss(parameters: Tensor) -> Tensor:
        v, b = parameters
        nll = functional.cross_entropy(scaled_logits * (1 + v) + b, targets)
        return nll + ridge * parameters.square().sum()

    v, b = minimise(loss, torch.zeros(2, classes, dtype=torch.float64), **TOLERANCE)
    return Structured(*mixing, weight=1 + v, bias=b)


def fit_sms(logits: Tensor, targets: Tensor) -> Structured:
    """Structured matrix scaling: SVS with a full matrix W, and K (K - 1)/N |off-diagonal W|^2.

    With fewer images than classes SVS is fitted instead, with a warning in the log.

    Args, Raises, Source: see `fit_svs`.
    """
    scaled_logits, targets, mixing = _scale_and_mix(logits, targets)
    samples, classes = scaled_logits.shape
    if samples < classes:
        text = "%d validation images are too few for the matrix of %d classes: SVS in place of SMS"
        log.warning(text, samples, classes)
        return fit_svs(logits, targets)
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


def _scale_and_mix(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, tuple[float, float]]:
    """Logits after temperature scaling and mixing; targets; temperature and weight of uniform."""
    logits, targets = validated_float64(logits, targets)
    mixing = nll_temperature(logits, targets), 1 / (len(logits) + 1)
    return mix_with_uniform(logits, *mixing), targets, mixing


@dataclass(frozen=True)
class Ensemble:
    """Probabilities w0 softmax(z / T) + w1 softmax(z) + w2 / K, of logits z.

    Attributes:
        weights: w0, w1 and w2; they sum to 1 and are not negative.
    """

    temperature: float
    weights: tuple[float, float, float]

    def apply(self, logits: Tensor) -> Tensor:
        """Log probabilities, [N, K] float64 on the CPU, of logits [N, K]."""
        components = _components(logits.detach().cpu().double(), self.temperature)
        log_weights = torch.tensor(
            self.weights, dtype=torch.float64
        ).log()  # minus infinity for a weight of 0
        return torch.logsumexp(components + log_weights.view(3, 1, 1), dim=0)


def fit_ensemble(logits: Tensor, targets: Tensor) -> Ensemble:
    """Ensemble temperature scaling: T, then the weights that minimise the NLL.

    The NLL is convex in the weights, so sequential quadratic programming finds its only minimum.
    Fit on validation data, never on the data that is measured afterwards.

    Args, Raises: see `fit_svs`.

    Source: Zhang, Kailkhura and Han 2020, section 3.2, with the NLL in both steps.
    """
    logits, targets = validated_float64(logits, targets)
    temperature = nll_temperature(logits, targets)
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
    weights = solution.x / solution.x.sum()
    first, second, third = weights.tolist()
    return Ensemble(temperature, (first, second, third))


def _components(logits: Tensor, temperature: float) -> Tensor:
    """Log probabilities of the three components, [3, N, K]."""
    uniform = torch.full_like(logits, -math.log(logits.shape[1]))
    return torch.stack([(logits / temperature).log_softmax(1), logits.log_softmax(1), uniform])
