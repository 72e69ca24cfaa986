"""Initial noise, its stability under sampling and inversion, and the search for the most stable."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from semix.data.device import float32_precision
from semix.pipeline.conditioning import Conditioning
from semix.pipeline.config import NoiseConfig
from semix.pipeline.noise.cost import Rung, rows_per_forward

# (latents [B, C, h, w], timestep, condition of B rows, guidance scale) to the model's prediction.
Predict = Callable[[Tensor, Tensor, Conditioning, float], Tensor]
# A backward pass keeps the activations of one network call, a forward pass alone does not.
ROWS_DIVISOR = 8  # a batch with gradients has 1/8 of the rows of a forward batch
NORM = 256.0  # of SDXL's latents, 4 x 128 x 128, on which the learning rate is defined


def initial_noise(seeds: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Standard normal noise, one CPU generator per seed: the same for every device and batch size.

    Returns:
        float32 [N, `*shape`] on the CPU.
    """
    noises = [
        torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed)) for seed in seeds
    ]
    return torch.stack(noises)


def inversion_stability(
    noise: Tensor,
    condition: Conditioning,
    *,
    predict: Predict,
    schedulers: tuple[Any, Any],
    steps: int,
    guidance_scale: float = 1.0,
    detach_target: bool = False,
) -> Tensor:
    """Cosine of each noise and the inversion of its sample, both flattened.

    Deterministic DDIM to x_0, then DDIM inversion under the same condition and guidance, all on
    latents. Inversion evaluates the network at the less noisy latents, but at the time step of the
    noisier ones, like diffusers. Differentiable with respect to the noise.

    Args:
        noise: [N, C, h, w] on the device of the condition, which has N rows.
        schedulers: DDIM and its inverse, with equal settings.
        steps: T of each of the two passes; a row costs 2T predictions.
        detach_target: treat the inverted noise as a constant, so that no gradient passes through
            the network.
    Returns:
        float32 [N] in [-1, 1]; NaN where the network gave NaN.
    Source: Qi et al. 2024, arXiv 2407.14041.
    """
    inverted = noise
    with torch.set_grad_enabled(torch.is_grad_enabled() and not detach_target):
        for scheduler in schedulers:
            scheduler.set_timesteps(steps)
            timesteps = scheduler.timesteps.to(noise.device)  # one copy, as in sampling
            for call, timestep in enumerate(scheduler.timesteps):
                output = predict(inverted, timesteps[call], condition, guidance_scale)
                inverted = scheduler.step(output, timestep, inverted, return_dict=False)[0]
    start, end = noise.float().flatten(1), inverted.float().flatten(1)
    return torch.cosine_similarity(start, end).clamp(-1, 1)  # rounding may exceed the range


@dataclass(frozen=True)
class Scorer:
    """Scores many noises under many conditions, in batches of one size.

    Attributes:
        predict, schedulers, guidance_scale, detach_target: see `inversion_stability`.
        max_rows: in one forward batch.
        heartbeat: called after each batch, to show that there is progress.
    """

    predict: Predict
    schedulers: tuple[Any, Any]
    guidance_scale: float
    max_rows: int
    heartbeat: Callable[[], None] = lambda: None
    detach_target: bool = False

    def __call__(self, noise: Tensor, conditions: Conditioning, *, steps: int) -> Tensor:
        """Score n noises for each of G groups, under the P conditions of the group.

        The last batch is padded, never shrunk: batch layout changes the last bits of a score.

        Args:
            noise: float32 [G, n, C, h, w].
            conditions: G x P rows, group by group.
        Returns:
            float32 [G, n, P] on the conditions' device.
        """
        groups, count = noise.shape[:2]
        points = len(conditions) // groups
        total = groups * count * points
        size = rows_per_forward(total, max_rows=self.max_rows)
        flat, device = noise.flatten(0, 1), conditions.tokens.device
        scores = []
        for start in range(0, total, size):
            row = torch.arange(start, start + size).clamp(max=total - 1)
            condition = row // (count * points) * points + row % points
            score = inversion_stability(
                flat[(row // points).to(flat.device)].to(device),
                conditions[condition.to(device)],
                predict=self.predict,
                schedulers=self.schedulers,
                steps=steps,
                guidance_scale=self.guidance_scale,
                detach_target=self.detach_target,
            )
            scores.append(score)
            self.heartbeat()
        return torch.cat(scores)[:total].view(groups, count, points)


@dataclass(frozen=True)
class NoiseSelection:
    """The scored candidates of one group.

    Attributes:
        seeds: [K].
        scores: [K] over all points, at full steps; None if halving or NaN dropped the candidate.
        per_point: [K][P], the scores at each point.
        best: index of the highest score, the first of equal ones; 0 if there are no scores.
    """

    seeds: tuple[int, ...]
    scores: tuple[float | None, ...]
    per_point: tuple[list[float] | None, ...]
    best: int


Scored = dict[int, tuple[float, list[float]]]  # by candidate: its score, and that at each point


@torch.no_grad()
def select_noise(
    seeds: Sequence[Sequence[int]],
    conditions: Conditioning,
    *,
    scorer: Scorer,
    shape: Sequence[int],
    rungs: Sequence[Rung],
    reduce: str = "mean",
) -> list[NoiseSelection]:
    """Select the most stable candidate of each of G groups, which are scored together.

    Args:
        seeds: [G][K].
        conditions: G x P rows, the P points of each group.
        shape: shape of one noise.
        rungs: how many candidates are scored at how many steps; the first has all K, and the
            last all points.
        reduce: mean or min over the points.
    """
    points = len(conditions) // len(seeds)
    remaining: list[Sequence[int]] = [range(len(group)) for group in seeds]
    ranked: list[Scored] = []
    for rung in rungs:
        remaining = [_pad_candidates(candidates, rung.candidates) for candidates in remaining]
        noises = [
            initial_noise([group[c] for c in candidates], shape)
            for group, candidates in zip(seeds, remaining, strict=True)
        ]
        rows = conditions if rung.point is None else conditions[slice(rung.point, None, points)]
        point_scores = scorer(torch.stack(noises), rows, steps=rung.steps).cpu()  # [G, n, P]
        scores = _reduce_points(point_scores, reduce)
        ranked = [
            _best_first(*group) for group in zip(remaining, scores, point_scores, strict=True)
        ]
        remaining = [list(scored) or old for scored, old in zip(ranked, remaining, strict=True)]
    return [_selection(tuple(group), scored) for group, scored in zip(seeds, ranked, strict=True)]


def _pad_candidates(ranked: Sequence[int], count: int) -> list[int]:
    """The first `count`; if NaN left fewer, the last is repeated, so that no batch shrinks."""
    return [ranked[min(position, len(ranked) - 1)] for position in range(count)]


def _reduce_points(scores: Tensor, reduction: str) -> Tensor:
    """Reduce [..., P] to the score that noises are compared by; NaN if any is NaN."""
    return scores.mean(-1) if reduction == "mean" else scores.amin(-1)


def _best_first(candidates: Sequence[int], scores: Tensor, point_scores: Tensor) -> Scored:
    """Sort by descending score, equal ones by candidate; leave NaN out."""
    rows = zip(candidates, scores.tolist(), point_scores.tolist(), strict=True)
    scored = {c: (score, points) for c, score, points in rows if math.isfinite(score)}
    return dict(sorted(scored.items(), key=lambda item: (-item[1][0], item[0])))


def _selection(seeds: tuple[int, ...], scored: Scored) -> NoiseSelection:
    return NoiseSelection(
        seeds,
        tuple(scored[c][0] if c in scored else None for c in range(len(seeds))),
        tuple(scored[c][1] if c in scored else None for c in range(len(seeds))),
        best=next(iter(scored), 0),
    )


@dataclass(frozen=True)
class Optimised:
    """N noises after gradient descent.

    Attributes:
        noise: the best of each descent, float32 [N, C, h, w] on the CPU.
        scores: stability of `noise`, [N], at least that of the start; -inf if that is NaN.
        per_point: [N, P], the scores at each point.
        history: [iterations + 1, N], scores at the start and after each step; shorter if all stop.
    """

    noise: Tensor
    scores: Tensor
    per_point: Tensor
    history: Tensor


@float32_precision("ieee")  # also for backward passes, which run outside `predict`
def optimise_noise(
    noise: Tensor,
    conditions: Conditioning,
    *,
    scorer: Scorer,
    steps: int,
    settings: NoiseConfig,
) -> Optimised:
    """Minimise 1 - stability by gradient descent with momentum, on the sphere of the start's norm.

    Keeps the best noise of each descent, which ends at a NaN score or gradient. Network calls are
    checkpointed; with `settings.detach_target` the inverted noise is a constant.

    Args:
        noise: the starts, float32 [N, C, h, w].
        conditions: P rows, one per point, the same for all noises.
        steps: T of each pass.
    Source: Qi et al. 2024, arXiv 2407.14041: 100 steps, rate 100, momentum 0.5. The sphere keeps
        the noise where the model expects it; the rate follows the norm, as the gradient does.
    """
    objective = _Objective(conditions, _with_gradient(scorer, settings), steps, settings.reduce)
    return _descend(noise.to(conditions.tokens.device), objective, settings)


@dataclass(frozen=True)
class _Objective:
    """The stability of noises, and the gradient of the loss, 1 - stability."""

    conditions: Conditioning
    scorer: Scorer
    steps: int
    reduce: str

    def __call__(self, noise: Tensor, *, grad: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        """Scores [N] and [N, P], and if `grad` the gradient of the loss [N, C, h, w]."""
        with torch.set_grad_enabled(grad):
            noise = noise.detach().requires_grad_(grad)
            point_scores = self.scorer(noise.unsqueeze(0), self.conditions, steps=self.steps)[0]
            scores = _reduce_points(point_scores, self.reduce)
            gradient = torch.autograd.grad((1 - scores).sum(), noise)[0] if grad else None
        return scores.detach(), point_scores.detach(), gradient


def _descend(current: Tensor, objective: _Objective, settings: NoiseConfig) -> Optimised:
    norm = _norm(current)
    rate = settings.learning_rate * norm / NORM
    velocity = torch.zeros_like(current)
    best, history = current, []
    best_scores = current.new_full((len(current),), -torch.inf)
    best_point_scores = current.new_full((len(current), len(objective.conditions)), torch.nan)
    finite = torch.ones_like(best_scores, dtype=torch.bool)
    for step in range(settings.iterations + 1):
        scores, point_scores, gradient = objective(current, grad=step < settings.iterations)
        history.append(scores.cpu())
        better = scores > best_scores  # never true for NaN
        best = torch.where(_broadcast(better), current, best)
        best_scores = torch.where(better, scores, best_scores)
        best_point_scores = torch.where(better[:, None], point_scores, best_point_scores)
        if gradient is None:
            break
        finite = finite & scores.isfinite() & gradient.flatten(1).isfinite().all(1)
        if not finite.any():
            break
        velocity = settings.momentum * velocity + gradient
        moved = current - rate * velocity
        current = moved * (norm / _norm(moved))
    return Optimised(best.cpu(), best_scores.cpu(), best_point_scores.cpu(), torch.stack(history))


def _with_gradient(scorer: Scorer, settings: NoiseConfig) -> Scorer:
    """The same scorer, with checkpointed network calls and smaller batches for backward passes."""

    def predict(*inputs: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return scorer.predict(*inputs)
        return checkpoint(scorer.predict, *inputs, use_reentrant=False)

    return replace(
        scorer,
        predict=predict,
        max_rows=max(1, scorer.max_rows // ROWS_DIVISOR),
        detach_target=settings.detach_target,
    )


def _norm(noise: Tensor) -> Tensor:
    return _broadcast(noise.flatten(1).norm(dim=1))  # [N, 1, 1, 1]


def _broadcast(values: Tensor) -> Tensor:
    return values[:, None, None, None]
