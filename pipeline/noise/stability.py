"""Inversion stability: how well a noise survives sampling and inversion."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pipeline.conditioning import Conditioning

# (latents [B, C, h, w], timestep, condition of B rows, guidance scale) to the model's prediction.
Predict = Callable[[Tensor, Tensor, Conditioning, float], Tensor]


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
    """Cosine of each noise and what inverting its sample gives back, both flattened.

    Deterministic DDIM to x_0, then DDIM inversion under the same condition and guidance, all on
    latents. Inversion takes the prediction at the less noisy latents, told the time step of the
    noisier ones, as diffusers does. Differentiable with respect to the noise.

    Args:
        noise: [N, C, h, w] on the device of the condition, which has N rows.
        schedulers: DDIM and its inverse, with equal settings.
        steps: T of each of the two passes; a row costs 2T predictions.
        detach_target: take the inverted noise as a constant, so that no gradient runs through
            the network.
    Returns:
        float32 [N] in [-1, 1]; NaN where the network gave NaN.
    Source: Qi et al. 2024, arXiv 2407.14041.
    """
    inverted = noise
    with torch.set_grad_enabled(torch.is_grad_enabled() and not detach_target):
        for scheduler in schedulers:
            scheduler.set_timesteps(steps)
            for timestep in scheduler.timesteps:
                output = predict(inverted, timestep, condition, guidance_scale)
                inverted = scheduler.step(output, timestep, inverted, return_dict=False)[0]
    return _cosine(noise, inverted)


def _cosine(first: Tensor, second: Tensor) -> Tensor:
    flat, other = first.float().flatten(1), second.float().flatten(1)
    return torch.cosine_similarity(flat, other).clamp(-1, 1)  # [N]; rounding may leave the range
