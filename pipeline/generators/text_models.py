"""The Stable Diffusion families: U-Nets that read one text encoder, or two."""

from collections.abc import Sequence

import torch
from torch import Tensor

from semix.pipeline.conditioning import Conditioning, concatenate, template_mean
from semix.pipeline.config import GeneratorConfig
from semix.pipeline.generators.guidance import GuidedDenoiser
from semix.pipeline.generators.loading import load_pipeline, native_shape
from semix.pipeline.prompts import checked_prompts


class StableDiffusion(GuidedDenoiser):
    """Stable Diffusion 1.x and 2.x, and SD-Turbo: the denoiser of a StableDiffusionPipeline; see
    `Denoiser`.

    The pipeline's safety checker is not loaded: it would blacken images, which would still
    carry a class's label.

    Raises:
        InputError: the model cannot be loaded.
    """

    def __init__(self, config: GeneratorConfig, *, device: str) -> None:
        self.config, self.device = config, device
        unchecked = {"safety_checker": None, "requires_safety_checker": False}
        self.pipeline = load_pipeline(config, device=device, **unchecked)
        self.network = self.pipeline.unet
        self.scheduler = self.pipeline.scheduler
        self.latent_shape: tuple[int, ...] = native_shape(self.network)
        self.unconditional = self._encode_texts([""])

    def encode(self, names: Sequence[str]) -> Conditioning:
        """Embeddings [N, T, D] of the text encoder's last layer, averaged over the templates.

        Raises:
            InputError: a prompt is longer than the text encoder reads.
        """
        template_prompts = checked_prompts(self.config, names, [self.pipeline.tokenizer])
        return template_mean([self._encode_texts(texts) for texts in template_prompts])

    def __call__(self, latents: Tensor, timestep: Tensor, condition: Conditioning) -> Tensor:
        tokens = condition.tokens.to(latents.dtype)
        return self.network(latents, timestep, encoder_hidden_states=tokens, return_dict=False)[0]

    @torch.no_grad()
    def _encode_texts(self, texts: Sequence[str]) -> Conditioning:
        # One prompt per call, so that an embedding does not depend on the other classes.
        encode, device = self.pipeline.encode_prompt, self.device
        encoded = (encode(text, device, 1, False)[0] for text in texts)
        return concatenate(Conditioning(tokens.float()) for tokens in encoded)


class StableDiffusionXL(GuidedDenoiser):
    """SDXL and SDXL-Turbo: the denoiser of a StableDiffusionXLPipeline; see `Denoiser`.

    The U-Net also takes the size and crop of its training images. They are fixed: the native
    size, nothing cropped. No watermark is put into the images.

    Raises:
        InputError: the model cannot be loaded.
    """

    def __init__(self, config: GeneratorConfig, *, device: str) -> None:
        self.config, self.device = config, device
        self.pipeline = load_pipeline(config, device=device, add_watermarker=False)
        self.network = self.pipeline.unet
        self.scheduler = self.pipeline.scheduler
        self.latent_shape: tuple[int, ...] = native_shape(self.network)
        height, width = (side * self.pipeline.vae_scale_factor for side in self.latent_shape[1:])
        # Original size, crop from top and left, target size, in pixels.
        self.time_ids = torch.tensor(
            [[height, width, 0, 0, height, width]], dtype=torch.float32, device=device
        )
        empty = self._encode_texts([""])
        forced = self.pipeline.config.force_zeros_for_empty_prompt
        self.unconditional = empty.map(torch.zeros_like) if forced else empty

    def encode(self, names: Sequence[str]) -> Conditioning:
        """Embeddings, averaged over the templates.

        Returns:
            Tokens [N, T, D1 + D2] of the layers before the last, pooled [N, D2].
        Raises:
            InputError: a prompt is longer than a text encoder reads.
        """
        tokenizers = [self.pipeline.tokenizer, self.pipeline.tokenizer_2]
        template_prompts = checked_prompts(self.config, names, tokenizers)
        return template_mean([self._encode_texts(texts) for texts in template_prompts])

    def __call__(self, latents: Tensor, timestep: Tensor, condition: Conditioning) -> Tensor:
        assert condition.pooled is not None, "this family's conditioning has a pooled part"
        added = {
            "text_embeds": condition.pooled.to(latents.dtype),
            "time_ids": self.time_ids.expand(len(latents), -1),
        }
        return self.network(
            latents,
            timestep,
            encoder_hidden_states=condition.tokens.to(latents.dtype),
            added_cond_kwargs=added,
            return_dict=False,
        )[0]

    @torch.no_grad()
    def _encode_texts(self, texts: Sequence[str]) -> Conditioning:
        device = self.device
        encoded = (  # one prompt per call, as above
            self.pipeline.encode_prompt(text, device=device, do_classifier_free_guidance=False)
            for text in texts
        )
        return concatenate(
            Conditioning(tokens.float(), pooled.float()) for tokens, _, pooled, _ in encoded
        )
