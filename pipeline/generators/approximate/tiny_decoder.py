"""A small distilled decoder (TAESD) in the place of the VAE."""

from typing import Any

from diffusers import AutoencoderTiny

from data.errors import InputError
from pipeline.config import ApproximationConfig
from pipeline.generators.loading import load_part

FIELD = "generator.approximate.tiny_decoder"


def load_tiny_decoder(settings: ApproximationConfig, vae: Any) -> Any:
    """An AutoencoderTiny that decodes what `vae` does; its own config scales the latents.

    Args:
        vae: the model's own, whose precision and device it takes over.
    Raises:
        InputError: it cannot be loaded, or decodes latents or images of another shape.
    """
    assert settings.tiny_decoder is not None
    tiny = load_part(
        AutoencoderTiny,
        settings.tiny_decoder,
        field=FIELD,
        revision=settings.tiny_decoder_revision,
    )
    there = _shape(vae.config.latent_channels, vae.config.block_out_channels)
    here = _shape(tiny.config.latent_channels, tiny.config.num_decoder_blocks)
    if here != there:
        raise InputError(FIELD, settings.tiny_decoder, f"decodes {here}; the model has {there}")
    return tiny.to(device=vae.device, dtype=vae.dtype).eval()


def _shape(channels: int, levels: Any) -> str:
    return f"{channels} channels to images {2 ** (len(levels) - 1)} times as wide"
