"""Calibrators that scale and shift logits: temperature, vector and structured scaling."""

import logging
import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from semix.calib.calibrators.base import Calibrator, minimise, temperature_of
from semix.calib.metrics.one_pass import validated_float64
from semix.calib.temperature import nll_temperature

MAX_NAMED_CLASSES = 5  # in one warning
# Weight of the squared distance from temperature scaling, in standardised logits. It matters only
# where the data do not determine a class: it has no images, or its predictions are all correct.
PENALTY = 1e-8
TOLERANCE = {"gradient": 1e-6, "change": 1e-10}  # enough for four digits of the NLL
log = logging.getLogger("semix.calib")


@dataclass(frozen=True)
class TemperatureScaling(Calibrator):
    """Logits z / T, in the precision of the logits. See `semix.calib.temperature`."""

    temperature: float

    def __call__(self, logits: Tensor) -> Tensor:
        return self.transform(logits)

    def transform(self, logits: Tensor) -> Tensor:
        return logits / self.temperature


def fit_temperature_scaling(
    logits: Tensor, targets: Tensor, temperature: float | None = None
) -> TemperatureScaling:
    """The temperature that minimises the NLL. Args, Raises, Source: see `fit_vector`."""
    return TemperatureScaling(temperature_of(logits, targets, temperature))


def fit_with_mixed(
    logits: Tensor, labels: Tensor, temperature: float | None = None
) -> TemperatureScaling:
    """The temperature that minimises the cross-entropy of validation and mixed images together.

    Args:
        logits: [N + M, K] float, of N validation images and M mixed images.
        labels: [N + M, K] float, one-hot and soft labels.
        temperature: without effect.
    Raises:
        ValueError: the shapes differ, or a value is not finite.

    Source: Roschewitz et al. 2025 (arXiv 2507.07780): calibrators that have seen images beside the
    training distribution are more robust under shift. Here these images are the mixed ones.
    """
    if logits.shape != labels.shape or not (logits.isfinite().all() and labels.isfinite().all()):
        shapes = f"{tuple(logits.shape)} and {tuple(labels.shape)}"
        raise ValueError(f"logits and labels have shapes {shapes}: give finite ones, both [N, K]")
    return TemperatureScaling(nll_temperature(logits.detach().cpu().double(), labels.double()))


# Vector scaling


@dataclass(frozen=True)
class VectorScaling(Calibrator):
    """Scaled logits z_k w_k + b_k, of logits z; float64 on the CPU."""

    weight: Tensor  # w, [K] float64
    bias: Tensor  # b, [K] float64; its mean is 0, because a common shift has no effect

    @property
    def num_classes(self) -> int:
        return len(self.weight)

    def transform(self, logits: Tensor) -> Tensor:
        return logits * self.weight + self.bias


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
    start = torch.stack([spread, centre]) / temperature_of(logits, targets, temperature)
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

    @property
    def num_classes(self) -> int:
        return len(self.bias)

    def transform(self, logits: Tensor) -> Tensor:
        scores = mix_with_uniform(logits, self.temperature, self.uniform)
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
    mixing = temperature_of(logits, targets, temperature), 1 / (len(logits) + 1)
    return mix_with_uniform(logits, *mixing), targets, mixing
