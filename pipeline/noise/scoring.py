"""Stability of many noises under many conditions, in batches of one size."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline.conditioning import Conditioning, concatenate, mix
from pipeline.config import BuildConfig
from pipeline.noise.rungs import rows_per_forward
from pipeline.noise.stability import Predict, inversion_stability


@dataclass(frozen=True)
class Scorer:
    """How noises are scored.

    Attributes:
        predict, schedulers, guidance_scale, detach_target: see `inversion_stability`.
        most_rows: in one forward batch.
        beat: called after each batch, for whoever watches that work goes on.
    """

    predict: Predict
    schedulers: tuple[Any, Any]
    guidance_scale: float
    most_rows: int
    beat: Callable[[], None] = lambda: None
    detach_target: bool = False

    def __call__(self, noise: Tensor, conditions: Conditioning, *, steps: int) -> Tensor:
        """Score G sets of n noises, each set under its own A conditions.

        The last batch is padded, never shrunk: the layout moves the last bits of a score.

        Args:
            noise: float32 [G, n, C, h, w].
            conditions: G x A rows, set by set.
        Returns:
            float32 [G, n, A] on the conditions' device.
        """
        sets, count = noise.shape[:2]
        each = len(conditions) // sets
        total = sets * count * each
        size = rows_per_forward(total, most=self.most_rows)
        flat, device = noise.flatten(0, 1), conditions.tokens.device
        scores = []
        for start in range(0, total, size):
            row = torch.arange(start, start + size).clamp(max=total - 1)
            told = row // (count * each) * each + row % each
            score = inversion_stability(
                flat[(row // each).to(flat.device)].to(device),
                conditions[told.to(device)],
                predict=self.predict,
                schedulers=self.schedulers,
                steps=steps,
                guidance_scale=self.guidance_scale,
                detach_target=self.detach_target,
            )
            scores.append(score)
            self.beat()
        return torch.cat(scores)[:total].view(sets, count, each)


def scoring_points(config: BuildConfig) -> Tensor:
    """Where a series is scored: weights of its k classes, [P, k].

    For pairs at the alphas of the config; for more classes pure, then at their centroid.
    """
    classes = config.mixing.classes
    if classes == 2:
        return torch.tensor([[alpha, 1 - alpha] for alpha in config.noise.alphas])
    return torch.cat([torch.eye(classes), torch.full((1, classes), 1 / classes)])


def scoring_conditions(
    sets: Sequence[tuple[int, ...]], config: BuildConfig, embeddings: Conditioning
) -> Conditioning:
    """What noises are scored under: P rows for each set of classes."""
    points, mode = scoring_points(config), config.mixing.interpolation
    return concatenate(mix(embeddings, classes, points, mode) for classes in sets)


def per_point(scores: Tensor, points: int) -> Tensor:
    """[..., S x P] over S sets of classes to their mean at each of the P points, [..., P]."""
    return scores.unflatten(-1, (-1, points)).mean(-2)


def reduced(scores: Tensor, how: str) -> Tensor:
    """[..., P] to the one score that noises are compared by; NaN if any is."""
    return scores.mean(-1) if how == "mean" else scores.amin(-1)
