"""Flow transformers with Qwen3 as text encoder: FLUX.2 klein and Z-Image."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu
from torch import Tensor

from semix.pipeline.conditioning import Conditioning
from semix.pipeline.generators.flow_models import NATIVE, PATCH, FlowModel, shift
from semix.pipeline.generators.guidance import GuidedDenoiser, guided_sum
from semix.pipeline.generators.loading import META


class Flux2(GuidedDenoiser, FlowModel):
    """FLUX.2 klein, base and distilled: the denoiser of a Flux2KleinPipeline; see `FlowModel`.

    Each of its latents is a square of four latents of the VAE.
    """

    def __call__(self, latents: Tensor, timestep: Tensor, condition: Conditioning) -> Tensor:
        rows, _, height, width = latents.shape
        output = self.network(
            hidden_states=latents.flatten(2).transpose(1, 2),
            timestep=timestep.expand(rows).to(latents.dtype) / 1000,
            encoder_hidden_states=condition.tokens.to(latents.dtype),
            txt_ids=_positions(1, 1, condition.tokens.shape[1], latents.device),
            img_ids=_positions(height, width, 1, latents.device),
            return_dict=False,
        )[0]
        return output.transpose(1, 2).unflatten(2, (height, width))

    def _shape(self) -> tuple[int, ...]:
        pixels = self.pipeline.vae_scale_factor * PATCH
        return self._square(
            self.network.config.in_channels, NATIVE // PATCH, pixels=pixels, patch=1
        )

    def _schedule(self, steps: int) -> Mapping[str, Any]:
        flow_sigmas = self.pipeline.scheduler.config.get("use_flow_sigmas")
        tokens = self.latent_shape[1] * self.latent_shape[2]
        mu = compute_empirical_mu(image_seq_len=tokens, num_steps=steps)
        return {"mu": mu, "sigmas": None if flow_sigmas else np.linspace(1.0, 1 / steps, steps)}

    def _encode_prompt(self, pipeline: Any, text: str) -> Conditioning:
        """Tokens of three layers of Qwen3, side by side."""
        length, device = self.config.prompt_length, self.prompt_encoder.device
        if device == META:  # Qwen3 reads the values of its mask, which meta tensors lack
            width = 3 * pipeline.text_encoder.config.hidden_size
            return Conditioning(torch.empty(1, length, width, device=META))
        tokens, _ = pipeline.encode_prompt(text, device=device, max_sequence_length=length)
        return Conditioning(tokens.float())


class ZImage(FlowModel):
    """Z-Image and its distilled forms: the denoiser of a ZImagePipeline; see `FlowModel`.

    It reads prompts at their own length, so those of all classes must be equally long; its time
    runs from 0 at noise to 1 at the image, and its velocity points from noise to image.
    """

    def guided(
        self, latents: Tensor, timestep: Tensor, condition: Conditioning, guidance_scale: float
    ) -> Tensor:
        """The velocity [B, C, h, w], float32; the empty prompt may be shorter than the others.

        diffusers' own guidance_scale is one less.
        """
        prompts = list(condition.tokens.to(latents.dtype))
        if guidance_scale <= 1:
            return self._velocity(latents, timestep, prompts).float()
        empty = [self.unconditional.tokens[0].to(latents.dtype)] * len(latents)
        both = self._velocity(latents.repeat(2, 1, 1, 1), timestep, [*empty, *prompts])
        return guided_sum(both, guidance_scale)

    def _velocity(self, latents: Tensor, timestep: Tensor, prompts: Sequence[Tensor]) -> Tensor:
        time = (1000 - timestep.expand(len(latents))) / 1000
        images = list(latents.unsqueeze(2))  # a video of one frame each
        output = self.network(images, time, list(prompts), return_dict=False)[0]
        return -torch.stack(output).squeeze(2)

    def _shape(self) -> tuple[int, ...]:
        channels, pixels = self.network.config.in_channels, self.pipeline.vae_scale_factor
        return self._square(channels, NATIVE, pixels=pixels, patch=PATCH)

    def _schedule(self, steps: int) -> Mapping[str, Any]:
        mu = shift(self.pipeline.scheduler.config, self.latent_shape, PATCH)
        return {"mu": mu, "sigmas": np.linspace(1.0, 1 / steps, steps)}

    def _encode_prompt(self, pipeline: Any, text: str) -> Conditioning:
        """Tokens of the last but one layer of Qwen3."""
        ids = self.prompt_encoder.tokenizers[0](text, return_tensors="pt").input_ids
        if self.prompt_encoder.device == META:
            width = pipeline.text_encoder.config.hidden_size
            return Conditioning(torch.empty(*ids.shape, width, device=META))
        # Like encode_prompt, which pads to 512 tokens and removes the padding again.
        output = pipeline.text_encoder(
            input_ids=ids.to(self.prompt_encoder.device), output_hidden_states=True, use_cache=False
        )
        return Conditioning(output.hidden_states[-2].float())


def _positions(height: int, width: int, tokens: int, device: torch.device) -> Tensor:
    """Time, row, column and text position of each token, [N, 4]."""
    axes = [torch.arange(size, device=device) for size in (1, height, width, tokens)]
    return torch.cartesian_prod(*axes)
