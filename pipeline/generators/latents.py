"""How a VAE's latents relate to those that the denoiser works on."""

from typing import Any

import torch
from torch import Tensor

BYTES_PER_PIXEL = (30 << 30) // (16 * 1024 * 1024)
DECODING_BYTES = 8 << 30
MOST_DECODED = 16  # more are hardly faster


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


def decoded_at_once(pixels: int) -> int:
    """How many images a VAE decodes at a time, by the pixels of one.

    Of the images alone, whatever memory the device has free: the batch moves their last bits, and
    a shard is the same wherever it is made.

    16 images of 1024 x 1024 took Stable Diffusion's VAE 30 GiB in float32, so a pixel takes 1920
    bytes (half in bfloat16). 8 GiB hold 4 of these, and 17 of 512 x 512.
    """
    return max(1, min(MOST_DECODED, DECODING_BYTES // (BYTES_PER_PIXEL * pixels)))


def upcast(vae: Any) -> Any:
    """The VAE, in float32 where its float16 would overflow into black images."""
    forced = vae.config.get("force_upcast", False)
    return vae.float() if forced and vae.dtype == torch.float16 else vae


def _channels(values: Any, like: Tensor) -> Tensor:
    return torch.as_tensor(values).to(like).view(1, -1, 1, 1)
