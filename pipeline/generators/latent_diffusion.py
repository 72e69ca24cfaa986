"""Sampling and decoding that all families share, around the family's own denoiser."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from data.device import float32_precision
from pipeline.conditioning import Conditioning, concatenate
from pipeline.config import GeneratorConfig
from pipeline.generators.approximate.cache import CachedDenoiser, cache_setting
from pipeline.generators.approximate.shallow import check_unet
from pipeline.generators.approximate.tiny_decoder import load_tiny_decoder
from pipeline.generators.compilation import compile_network, room_for_programs
from pipeline.generators.latents import decoded_at_once, unscaled, upcast
from pipeline.generators.schedulers import sampler
from pipeline.rows import step_plan

Denoise = Callable[[Tensor, Tensor, Conditioning], Tensor]


class Denoiser(Protocol):
    """What a family brings.

    Attributes:
        pipeline: the diffusers pipeline it was loaded with; has `vae` and `scheduler`.
        network: the U-Net or transformer.
        latent_shape: (channels, height, width) of one image's latents.
        unconditional: one row, the same for every class.
    """

    pipeline: Any
    network: nn.Module
    latent_shape: tuple[int, ...]
    unconditional: Conditioning

    def encode(self, names: Sequence[str]) -> Conditioning:
        """One row for each class name. Raises InputError for a name the model cannot take."""

    def __call__(self, latents: Tensor, timestep: Tensor, condition: Conditioning) -> Tensor:
        """The network's prediction [B, C, h, w], B rows."""


class LatentDiffusion:
    """A model that turns noise and conditioning into images, always the same ones.

    Latents stay float32 whatever the network's precision; a float32 network is not run in TF32.

    Raises:
        InputError: the model's scheduler cannot sample deterministically; an approximation that
            does not suit the model.
    """

    def __init__(self, denoiser: Denoiser, config: GeneratorConfig) -> None:
        self.denoiser = denoiser
        self.config = config
        self.latent_shape = denoiser.latent_shape
        approximate = config.approximate
        self.vae = denoiser.pipeline.vae
        if approximate.tiny_decoder is not None:
            self.vae = load_tiny_decoder(approximate, self.vae)
        self.vae = upcast(self.vae)
        levels = len(denoiser.pipeline.vae.config.block_out_channels)
        pixels = math.prod(denoiser.latent_shape[1:]) * 4 ** (levels - 1)  # of an image
        self.decode_batch = config.decode_batch or decoded_at_once(pixels)
        cache = cache_setting(approximate)
        if cache is not None:
            check_unet(denoiser.network, cache)
        self.steps = approximate.steps or config.steps
        self.device: torch.device = denoiser.pipeline.device
        self.dtype: torch.dtype = next(denoiser.network.parameters()).dtype
        self.scheduler = sampler(
            denoiser.pipeline.scheduler,
            name=approximate.scheduler or config.scheduler,
            spacing=config.timestep_spacing,
        )
        compile_network(denoiser.network, config.compile)

    @torch.no_grad()  # not inference mode: gradients of the noise may pass the conditioning
    @float32_precision("ieee")
    def encode(self, names: Sequence[str]) -> Conditioning:
        """What the model is told for each class name, one row each."""
        return self.denoiser.encode(names)

    @torch.inference_mode()
    def sample(
        self, noise: Tensor, condition: Conditioning, alphas: Tensor | None = None
    ) -> Tensor:
        """Noise of variance 1, float32 [B, C, h, w], to clean latents of the same shape.

        Args:
            alphas: [G, A] of the rows, series by series; B = G A. Only caching along alpha
                reads them.
        """
        scheduler, config = self.scheduler, self.config
        scheduler.set_timesteps(self.steps)
        latents = noise.to(self.device) * scheduler.init_noise_sigma
        cached = self._cached(alphas)
        plan = step_plan(config, len(scheduler.timesteps))
        for step, timestep in zip(plan, scheduler.timesteps, strict=True):
            scaled = scheduler.scale_model_input(latents, timestep)
            guidance_scale = config.guidance_scale if step.guided else 1.0
            denoise = partial(cached, fresh=step.fresh) if cached else None
            output = self.predict(scaled, timestep, condition, guidance_scale, denoise=denoise)
            latents = scheduler.step(output, timestep, latents, return_dict=False)[0]
        return latents

    def _cached(self, alphas: Tensor | None) -> CachedDenoiser | None:
        settings = self.config.approximate
        if cache_setting(settings) is None:
            return None
        return CachedDenoiser(self.denoiser, alphas=alphas, anchors=settings.cache_anchors)

    @float32_precision("ieee")
    def predict(
        self,
        latents: Tensor,
        timestep: Tensor,
        condition: Conditioning,
        guidance_scale: float,
        *,
        denoise: Denoise | None = None,
    ) -> Tensor:
        """The guided prediction, float32: uncond + w (cond - uncond), w at most 1 is cond alone.

        Args:
            latents: [B, C, h, w], scaled as the scheduler wants them.
            denoise: a cheaper way to what the denoiser predicts.
        """
        denoise = denoise or self.denoiser
        inputs, timestep = latents.to(self.dtype), timestep.to(self.device)
        with room_for_programs(self.config.compile):
            if guidance_scale <= 1:
                return denoise(inputs, timestep, condition).float()
            empty = self.denoiser.unconditional.expand(len(latents))
            both = concatenate([empty, condition])
            without, given = denoise(inputs.repeat(2, 1, 1, 1), timestep, both).chunk(2)
            return without.float() + guidance_scale * (given.float() - without.float())

    @torch.inference_mode()
    @float32_precision("ieee")
    def decode(self, latents: Tensor) -> Tensor:
        """Clean latents [B, C, h, w] to pixels uint8 [B, H, W, 3] on the device."""
        parts = latents.split(self.decode_batch)
        return torch.cat([self._decode(part) for part in parts])

    def _decode(self, latents: Tensor) -> Tensor:
        scaled = unscaled(latents, self.vae.config)
        pixels = self.vae.decode(scaled.to(self.vae.dtype), return_dict=False)[0].float()
        values = (pixels / 2 + 0.5).clamp(0, 1) * 255
        return values.round().to(torch.uint8).permute(0, 2, 3, 1)
