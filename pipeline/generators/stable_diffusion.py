"""Stable Diffusion 1.x and 2.x, and SD-Turbo: a U-Net that reads one text encoder."""

from collections.abc import Sequence

import torch
from diffusers import StableDiffusionPipeline
from torch import Tensor

from pipeline.conditioning import Conditioning, concatenate, template_mean
from pipeline.config import GeneratorConfig
from pipeline.generators.loading import load_pipeline, native_shape
from pipeline.prompts import checked_prompts


class StableDiffusion:
    """The denoiser of a StableDiffusionPipeline; see `Denoiser`.

    The pipeline's safety checker is never loaded: it would blacken images, which would then
    carry a class's label.

    Raises:
        InputError: the model cannot be loaded.
    """

    def __init__(self, config: GeneratorConfig, *, device: str) -> None:
        self.config = config
        self.pipeline = load_pipeline(
            StableDiffusionPipeline,
            config,
            device=device,
            safety_checker=None,
            requires_safety_checker=False,
        )
        self.network = self.pipeline.unet
        self.latent_shape: tuple[int, ...] = native_shape(self.network)
        self.unconditional = self._encode_texts([""])

    def encode(self, names: Sequence[str]) -> Conditioning:
        """Embeddings [N, T, D] of the text encoder's last layer, averaged over the templates.

        Raises:
            InputError: a prompt is longer than the text encoder reads.
        """
        versions = checked_prompts(self.config, names, [self.pipeline.tokenizer])
        return template_mean([self._encode_texts(texts) for texts in versions])

    def __call__(self, latents: Tensor, timestep: Tensor, condition: Conditioning) -> Tensor:
        tokens = condition.tokens.to(latents.dtype)
        return self.network(latents, timestep, encoder_hidden_states=tokens, return_dict=False)[0]

    @torch.no_grad()
    def _encode_texts(self, texts: Sequence[str]) -> Conditioning:
        # One prompt a call: the embedding then never depends on which other classes there are.
        device = self.pipeline.device
        encoded = (self.pipeline.encode_prompt(text, device, 1, False)[0] for text in texts)
        return concatenate(Conditioning(tokens.float()) for tokens in encoded)
