"""How a VAE's latents relate to those that the denoiser works on."""

from typing import Any

import torch
from torch import Tensor


def unscaled(latents: Tensor, config: Any) -> Tensor:
    """Latents [B, C, h, w] as the VAE reads them.

    Args:
        config: of the VAE; `scaling_factor`, and where it has them `latents_mean` and
            `latents_std` (of each channel) or `shift_factor`.
    """
    scaled = latents / config.scaling_factor
    mean, deviation = config.get("latents_mean"), config.get("latents_std")
    if mean is not None and deviation is not None:
        scaled = scaled * _channels(deviation, latents) + _channels(mean, latents)
    return scaled + (config.get("shift_factor") or 0.0)


def upcast(vae: Any) -> Any:
    """The VAE, in float32 where its float16 would overflow into black images."""
    forced = vae.config.get("force_upcast", False)
    return vae.float() if forced and vae.dtype == torch.float16 else vae


def _channels(values: Any, like: Tensor) -> Tensor:
    return torch.as_tensor(values).to(like).view(1, -1, 1, 1)
