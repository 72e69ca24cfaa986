"""Stable Diffusion 1.x/2.x through diffusers' own pipeline."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from diffusers import StableDiffusionPipeline
from torch import Tensor

from data.errors import InputError
from pipeline.config import GeneratorConfig

# With eta 0, which is the pipeline's default, these map one noise to one image.
DETERMINISTIC = (
    "DDIMScheduler",
    "PNDMScheduler",
    "DPMSolverMultistepScheduler",
    "UniPCMultistepScheduler",
    "EulerDiscreteScheduler",
    "HeunDiscreteScheduler",
)


class StableDiffusion:
    """A StableDiffusionPipeline that samples given noise under given embeddings.

    The unconditional branch is the embedding of the empty prompt, the same for every image.

    Raises:
        InputError: the model cannot be loaded, or its scheduler adds noise of its own.
    """

    def __init__(self, config: GeneratorConfig, *, device: str) -> None:
        self.config = config
        self.device = device
        self.pipeline = _load(config).to(device)
        self.pipeline.set_progress_bar_config(disable=True)
        _refuse_stochastic(self.pipeline.scheduler)
        unet = self.pipeline.unet.config
        self.latent_shape: tuple[int, ...] = (unet.in_channels, unet.sample_size, unet.sample_size)
        self._unconditional = self.encode([""])

    @torch.inference_mode()
    def encode(self, prompts: Sequence[str]) -> Tensor:
        """Embeddings [N, T, D] of the text encoder's last layer.

        Raises:
            InputError: a prompt is longer than the text encoder reads.
        """
        tokenizer = self.pipeline.tokenizer
        longest = tokenizer.model_max_length
        for prompt in prompts:
            length = len(tokenizer(prompt).input_ids)
            if length > longest:
                raise InputError(
                    "generator.prompt",
                    repr(prompt),
                    f"has {length} tokens, the model reads {longest}",
                )
        # One prompt a call: the embedding then never depends on which other classes there are.
        embeddings = [
            self.pipeline.encode_prompt(prompt, self.device, 1, False)[0] for prompt in prompts
        ]
        return torch.cat(embeddings)

    @torch.inference_mode()
    def sample(self, noise: Tensor, condition: Tensor) -> np.ndarray:
        """noise float32 [B, C, h, w], condition [B, T, D] -> uint8 [B, H, W, 3].

        Raises:
            FloatingPointError: the model produced values that are not numbers.
        """
        guided = self.config.guidance_scale > 1
        images = self.pipeline(
            prompt_embeds=condition,
            negative_prompt_embeds=self._unconditional.expand_as(condition) if guided else None,
            # The pipeline scales unit noise itself, as its scheduler wants it.
            latents=noise.to(self.device, self.pipeline.unet.dtype),
            num_inference_steps=self.config.steps,
            guidance_scale=self.config.guidance_scale,
            output_type="pt",
        ).images
        if not torch.isfinite(images).all():
            raise FloatingPointError("the generator returned NaN or infinite pixels")
        pixels = (images.float() * 255).round().to(torch.uint8)
        return pixels.permute(0, 2, 3, 1).cpu().numpy()


def _load(config: GeneratorConfig) -> Any:
    try:
        return StableDiffusionPipeline.from_pretrained(
            config.model,
            revision=config.revision,
            dtype=getattr(torch, config.dtype),
            use_safetensors=True,
            # A checker would blacken images, which would then carry a class's label.
            safety_checker=None,
            requires_safety_checker=False,
        )
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError("generator.model", config.model, f"cannot be loaded: {reason}") from error


def _refuse_stochastic(scheduler: Any) -> None:
    name = type(scheduler).__name__
    noisy = str(scheduler.config.get("algorithm_type", "")).startswith("sde")
    if name not in DETERMINISTIC or noisy:
        remedy = f"draws noise of its own or is unknown; use one of {', '.join(DETERMINISTIC)}"
        raise InputError("generator.model scheduler", name, remedy)
