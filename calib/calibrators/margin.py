"""A temperature for each image, from the margin between its two largest logits (SMART)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional

from semix.calib.calibrators.base import Calibrator, as_tensor
from semix.calib.metrics.one_pass import validated_float64

HIDDEN = 16  # units of each of the two hidden layers
MIN_TEMPERATURE = 0.1
BINS, BANDWIDTH, SMOOTHING = 15, 0.05, 1e-3  # of the objective
LEARNING_RATE, STEPS, PATIENCE, MIN_CHANGE = 0.005, 2000, 200, 1e-4  # full batches
Layers = tuple[tuple[Tensor, Tensor], ...]  # weight [out, in] and bias [out] of each layer


@dataclass(frozen=True)
class MarginScaling(Calibrator):
    """Logits z / T(g), with g the largest logit less the second; float64 on the CPU.

    T(g) = 0.1 + softplus(a network of the standardised margin), so the predicted class stays.

    Attributes:
        classes: K.
        centre, spread: mean and standard deviation of the margins of the fit.
        layers: of the network, from one input to one output, with ReLU between them.
    """

    classes: int
    centre: float
    spread: float
    layers: Layers

    @property
    def num_classes(self) -> int:
        return self.classes

    def transform(self, logits: Tensor) -> Tensor:
        standard = (margins(logits) - self.centre) / self.spread
        return logits / _temperatures(standard, self.layers)[:, None]

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        layers = tuple((as_tensor(weight), as_tensor(bias)) for weight, bias in state["layers"])
        return cls(state["classes"], state["centre"], state["spread"], layers)


def fit_margin_scaling(
    logits: Tensor, targets: Tensor, temperature: float | None = None
) -> MarginScaling:
    """SMART: the network that minimises a smooth ECE, by Adam on all images at once.

    The objective is `soft_error`. As in the official code: two hidden layers of 16, learning rate
    0.005, at most 2,000 steps, and an end after 200 steps without an improvement of 1e-4, whose
    best weights are kept. Initial weights are drawn from a generator of their own.

    Args, Raises: see `fit_vector`; the temperature has no effect.

    Source: Guo et al. 2025 (SMART), arXiv 2506.23492, and its code in calibench: the objective
    with Charbonnier's absolute value.
    """
    logits, targets = validated_float64(logits, targets)
    margin = margins(logits)
    centre, spread = margin.mean().item(), max(margin.std(correction=0).item(), 1e-8)
    standard = (margin - centre) / spread
    largest, predicted = logits.max(1)
    relative, correct = logits - largest[:, None], (predicted == targets).double()
    parameters = [p.requires_grad_() for layer in _initial_layers() for p in layer]
    optimiser = torch.optim.Adam(parameters, lr=LEARNING_RATE)
    best, best_values, steps_since = math.inf, [p.detach().clone() for p in parameters], 0
    for _ in range(STEPS):
        temperatures = _temperatures(standard, _as_layers(parameters))
        confidence = 1 / (relative / temperatures[:, None]).exp().sum(1)
        loss = soft_error(confidence, correct)
        if loss.item() < best - MIN_CHANGE:
            best, steps_since = loss.item(), 0
            best_values = [p.detach().clone() for p in parameters]
        elif (steps_since := steps_since + 1) >= PATIENCE:
            break
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return MarginScaling(logits.shape[1], centre, spread, _as_layers(best_values))


def margins(logits: Tensor) -> Tensor:
    """The largest logit less the second, [N] of [N, K]."""
    largest = logits.topk(2, dim=1).values
    return largest[:, 0] - largest[:, 1]


def soft_error(confidence: Tensor, correct: Tensor) -> Tensor:
    """ECE with soft bins and a smooth absolute value, a scalar with a gradient.

    sum_b f_b (sqrt(r_b^2 + d^2) - d): every image belongs to each of 15 bins by the density of its
    confidence in a Gaussian of deviation 0.05 at the bin's centre, normalised over bins; f_b is
    the bin's share, r_b its mean confidence less its accuracy, d = 0.001.

    Args:
        confidence, correct: [N] float64.

    Source: Karandikar et al. 2021, soft binning; Guo et al. 2025 with Charbonnier's absolute value.
    """
    centres = (torch.arange(BINS, dtype=torch.float64) + 0.5) / BINS
    membership = (-0.5 * ((confidence[:, None] - centres) / BANDWIDTH).square()).softmax(1)
    mass = membership.sum(0)
    residual = membership.T @ (confidence - correct) / mass.clamp(min=1e-12)
    smooth = (residual.square() + SMOOTHING**2).sqrt() - SMOOTHING
    return (mass * smooth).sum() / len(confidence)


def _temperatures(standard: Tensor, layers: Layers) -> Tensor:
    """T of each standardised margin, [N]."""
    values = standard[:, None]
    for weight, bias in layers[:-1]:
        values = functional.linear(values, weight, bias).relu()
    return functional.softplus(functional.linear(values, *layers[-1]))[:, 0] + MIN_TEMPERATURE


def _initial_layers() -> Layers:
    """Layers with torch's initialisation of linear layers: uniform in +-1 / sqrt(inputs)."""
    generator = torch.Generator().manual_seed(0)

    def uniform(*shape: int, inputs: int) -> Tensor:
        drawn = torch.rand(*shape, generator=generator, dtype=torch.float64)
        return (2 * drawn - 1) / math.sqrt(inputs)

    sizes = ((1, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, 1))
    return tuple(
        (uniform(outputs, inputs, inputs=inputs), uniform(outputs, inputs=inputs))
        for inputs, outputs in sizes
    )


def _as_layers(parameters: list[Tensor]) -> Layers:
    return tuple(zip(parameters[::2], parameters[1::2], strict=True))
