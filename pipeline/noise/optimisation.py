"""Gradient descent on a noise towards inversion stability."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from data.device import float32_precision
from pipeline.conditioning import Conditioning
from pipeline.config import NoiseConfig
from pipeline.noise.scoring import Scorer, per_point, reduced

# A backward pass holds one network call's activations, which a forward alone does not.
ROWS_SHARE = 8  # of the rows that a forward batch may have
NORM = 256.0  # of SDXL's latents, 4 x 128 x 128, for which the learning rate is given


@dataclass(frozen=True)
class Optimised:
    """N noises after gradient descent.

    Attributes:
        noise: the best of each descent, float32 [N, C, h, w] on the CPU.
        scores: its stability, [N]; never below that of the start.
        per_point: [N, P] of the same.
        history: [iterations + 1, N], of the start and after each step; shorter if all stopped.
    """

    noise: Tensor
    scores: Tensor
    per_point: Tensor
    history: Tensor


@float32_precision("ieee")  # backward passes too, which are not within `predict`
def optimise_noise(
    noise: Tensor,
    conditions: Conditioning,
    *,
    scorer: Scorer,
    steps: int,
    points: int,
    settings: NoiseConfig,
    name: str = "noise",
) -> Optimised:
    """Descend 1 - stability with momentum, on the sphere of the start's norm, and keep the best.

    The loss is differentiated through sampling and inversion with every network call
    checkpointed, or with `settings.detach_target` towards a constant. A noise whose score or
    gradient is NaN stops there.

    Args:
        noise: the starts, float32 [N, C, h, w].
        conditions: S x P rows: S sets of classes at P points, the same for all noises.
        steps: T of each pass.
        name: of what the noises are for, for errors.
    Raises:
        FloatingPointError: a start has no score.
    Source: Qi et al. 2024, arXiv 2407.14041: 100 steps, rate 100, momentum 0.5. The sphere keeps
        the noise where the model expects it; the rate follows the norm, as the gradient does.
    """
    with torch.inference_mode(False):
        # Tensors that were made in inference mode cannot take part in a graph; copies can.
        look = _Look(
            conditions.map(torch.clone), _with_gradient(scorer, settings), steps, points, settings
        )
        current = noise.to(look.conditions.tokens.device, copy=True)
        found = _descend(current, look, settings)
    if not found.scores.isfinite().all():
        raise FloatingPointError(f"{name}: a start has no stability; the network gave NaN")
    return found


@dataclass(frozen=True)
class _Look:
    """Stability of the noises as they are, and which way it falls."""

    conditions: Conditioning
    scorer: Scorer
    steps: int
    points: int
    settings: NoiseConfig

    def __call__(self, noise: Tensor, *, slope: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        """Scores [N] and [N, P], and the gradient of the loss [N, C, h, w] if asked for."""
        with torch.set_grad_enabled(slope):
            noise = noise.detach().requires_grad_(slope)
            each = self.scorer(noise.unsqueeze(0), self.conditions, steps=self.steps)[0]
            each = per_point(each, self.points)
            scores = reduced(each, self.settings.reduce)
            gradient = torch.autograd.grad((1 - scores).sum(), noise)[0] if slope else None
        return scores.detach(), each.detach(), gradient


def _descend(current: Tensor, look: _Look, settings: NoiseConfig) -> Optimised:
    norm = _norm(current)
    rate = settings.learning_rate * norm / NORM
    velocity = torch.zeros_like(current)
    best, history = current, []
    best_scores = current.new_full((len(current),), -torch.inf)
    best_each = current.new_full((len(current), look.points), torch.nan)
    going = torch.ones_like(best_scores, dtype=torch.bool)
    for step in range(settings.iterations + 1):
        scores, each, gradient = look(current, slope=step < settings.iterations)
        history.append(scores.cpu())
        better = scores > best_scores  # never for NaN, from which no noise comes back
        best = torch.where(_wide(better), current, best)
        best_scores = torch.where(better, scores, best_scores)
        best_each = torch.where(better[:, None], each, best_each)
        if gradient is None:
            break
        going = going & scores.isfinite() & gradient.flatten(1).isfinite().all(1)
        if not going.any():
            break
        velocity = settings.momentum * velocity + gradient
        moved = current - rate * velocity
        current = moved * (norm / _norm(moved))
    return Optimised(best.cpu(), best_scores.cpu(), best_each.cpu(), torch.stack(history))


def _with_gradient(scorer: Scorer, settings: NoiseConfig) -> Scorer:
    """The same scores, with little memory for the way back."""

    def predict(*inputs: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return scorer.predict(*inputs)
        return checkpoint(scorer.predict, *inputs, use_reentrant=False)

    return replace(
        scorer,
        predict=predict,
        most_rows=max(1, scorer.most_rows // ROWS_SHARE),
        detach_target=settings.detach_target,
    )


def _norm(noise: Tensor) -> Tensor:
    return _wide(noise.flatten(1).norm(dim=1))  # [N, 1, 1, 1]


def _wide(values: Tensor) -> Tensor:
    return values[:, None, None, None]
