"""A Stable Diffusion pipeline with random weights and the quickstart's text model, of any size."""

from pathlib import Path

import torch
from diffusers import AutoencoderKL, StableDiffusionPipeline, UNet2DConditionModel


def save_tiny_pipeline(folder: Path, standin: Path, *, image_size: int) -> None:
    """Save a pipeline of `image_size` pixels whose latents are 8 times smaller.

    Random weights serve to measure time; their images mean nothing.
    """
    pipeline = StableDiffusionPipeline.from_pretrained(
        standin, use_safetensors=True, safety_checker=None, requires_safety_checker=False
    )
    torch.manual_seed(0)
    unet = pipeline.unet.config
    pipeline.unet = UNet2DConditionModel.from_config({**unet, "sample_size": image_size // 8})
    pipeline.vae = AutoencoderKL(
        sample_size=image_size,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(4, 4, 4, 4),
        layers_per_block=1,
        latent_channels=unet["in_channels"],
        norm_num_groups=4,
        mid_block_add_attention=False,
        scaling_factor=1.0,
    )
    pipeline.register_modules(unet=pipeline.unet, vae=pipeline.vae)
    pipeline.save_pretrained(folder, safe_serialization=True)
