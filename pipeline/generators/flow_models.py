"""Flow transformers: Stable Diffusion 3 and FLUX.1, which predict velocities of latents."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from diffusers import SD3Transformer2DModel
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from torch import Tensor

from semix.data.errors import InputError
from semix.pipeline.conditioning import Conditioning
from semix.pipeline.config import GeneratorConfig
from semix.pipeline.generators.guidance import GuidedDenoiser
from semix.pipeline.generators.loading import load_pipeline, native_shape
from semix.pipeline.generators.prompt_encoder import ENCODERS, PromptEncoder
from semix.pipeline.generators.schedulers import FlowEuler
from semix.pipeline.model_paths import local_path

PATCH = 2  # side, in latents, of the square that FLUX packs into one token
NATIVE = 128  # side of the latents of images of 1024 pixels


class FlowModel:
    """The common part of the denoisers of flow transformers; see `Denoiser`.

    Args:
        names: of classes to encode; their prompts are encoded before the transformer is loaded,
            while there is memory.
    Raises:
        InputError: the model cannot be loaded; an unsupported image size; a prompt that is longer
            than a text encoder reads.
    """

    latent_shape: tuple[int, ...]

    def __init__(self, config: GeneratorConfig, *, device: str, names: Sequence[str] = ()) -> None:
        self.config = config
        self.prompt_encoder = PromptEncoder(
            config, device=device, encode_prompt=self._encode_prompt
        )
        self.prompt_encoder.prefetch(names)
        self.unconditional = self.prompt_encoder.rows([""])
        self.pipeline = load_pipeline(
            config, device=device, **self.prompt_encoder.arguments_without(*ENCODERS)
        )
        self.network = self.pipeline.transformer
        self.latent_shape = self._shape()
        self.scheduler = FlowEuler(self.pipeline.scheduler, self._schedule)

    def encode(self, names: Sequence[str]) -> Conditioning:
        """Embeddings, averaged over the templates, one row per name; see `_encode_prompt`.

        Raises:
            InputError: a prompt is longer than a text encoder reads.
        """
        return self.prompt_encoder.encode(names)

    def _encode_prompt(self, pipeline: Any, text: str) -> Conditioning:
        """Encode one prompt to one row."""
        raise NotImplementedError

    def _shape(self) -> tuple[int, ...]:
        """(channels, height, width) of the latents."""
        raise NotImplementedError

    def _schedule(self, steps: int) -> Mapping[str, Any]:
        """Arguments of the scheduler beside the steps."""
        raise NotImplementedError

    def _square(self, channels: int, native: int, *, pixels: int, patch: int) -> tuple[int, ...]:
        """Shape of the latents at the configured image size.

        Args:
            native: side of the latents in training.
            pixels: width of a latent in pixels.
            patch: side of a token in latents.
        """
        size = self.config.image_size
        if size is None:
            return channels, native, native
        if size % (pixels * patch):
            remedy = f"this model makes images of multiples of {pixels * patch} pixels"
            raise InputError("generator.image_size", size, remedy)
        return channels, size // pixels, size // pixels


class StableDiffusion3(GuidedDenoiser, FlowModel):
    """Stable Diffusion 3 and 3.5: the denoiser of a StableDiffusion3Pipeline; see `FlowModel`.

    A model that was saved without T5 gets zeros in its place, as in diffusers.
    """

    def __init__(self, config: GeneratorConfig, *, device: str, names: Sequence[str] = ()) -> None:
        super().__init__(config, device=device, names=names)
        # Needed by compile_repeated_blocks; diffusers does not declare it for this class.
        self.network._repeated_blocks = ["JointTransformerBlock"]

    def __call__(self, latents: Tensor, timestep: Tensor, condition: Conditioning) -> Tensor:
        assert condition.pooled is not None, "this family's conditioning has a pooled part"
        return self.network(
            latents,
            timestep=timestep.expand(len(latents)),
            encoder_hidden_states=condition.tokens.to(latents.dtype),
            pooled_projections=condition.pooled.to(latents.dtype),
            return_dict=False,
        )[0]

    def _shape(self) -> tuple[int, ...]:
        channels, native, _ = native_shape(self.network)
        pixels, patch = self.pipeline.vae_scale_factor, self.network.config.patch_size
        return self._square(channels, native, pixels=pixels, patch=patch)

    def _schedule(self, steps: int) -> Mapping[str, Any]:
        config = self.pipeline.scheduler.config
        shifted = config.get("use_dynamic_shifting")
        patch = self.network.config.patch_size
        return {"mu": shift(config, self.latent_shape, patch)} if shifted else {}

    def _encode_prompt(self, pipeline: Any, text: str) -> Conditioning:
        """Tokens of both CLIP encoders, then of T5; pooled of both CLIP encoders."""
        if pipeline.text_encoder_3 is None:
            # diffusers takes the width of the zeros in T5's place from the transformer.
            network = SD3Transformer2DModel.load_config(
                local_path(self.config.model) or self.config.model,
                subfolder="transformer",
                revision=self.config.revision,
            )
            object.__setattr__(
                pipeline, "transformer", SimpleNamespace(config=SimpleNamespace(**network))
            )
        tokens, _, pooled, _ = pipeline.encode_prompt(
            text,
            None,
            None,
            device=self.prompt_encoder.device,
            do_classifier_free_guidance=False,
            max_sequence_length=self.config.prompt_length,
        )
        return Conditioning(tokens.float(), pooled.float())


class Flux(FlowModel):
    """FLUX.1 dev and schnell: the denoiser of a FluxPipeline; see `FlowModel`.

    dev takes the guidance scale as an input, so that an image needs no unconditional row; schnell
    takes none.
    """

    def guided(
        self, latents: Tensor, timestep: Tensor, condition: Conditioning, guidance_scale: float
    ) -> Tensor:
        """The velocity [B, C, h, w], float32, with the guidance as an input of the network."""
        assert condition.pooled is not None, "this family's conditioning has a pooled part"
        rows, _, height, width = latents.shape
        guidance = None
        if self.network.config.guidance_embeds:
            guidance = torch.full([rows], max(1.0, guidance_scale), device=latents.device)
        positions = _positions(height // PATCH, width // PATCH, latents)
        output = self.network(
            hidden_states=packed(latents),
            timestep=timestep.expand(rows).to(latents.dtype) / 1000,
            guidance=guidance,
            pooled_projections=condition.pooled.to(latents.dtype),
            encoder_hidden_states=condition.tokens.to(latents.dtype),
            txt_ids=positions.new_zeros(condition.tokens.shape[1], 3),
            img_ids=positions,
            return_dict=False,
        )[0]
        return unpacked(output, height, width).float()

    def _shape(self) -> tuple[int, ...]:
        channels = self.network.config.in_channels // PATCH**2
        return self._square(channels, NATIVE, pixels=self.pipeline.vae_scale_factor, patch=PATCH)

    def _schedule(self, steps: int) -> Mapping[str, Any]:
        config = self.pipeline.scheduler.config
        mu = shift(config, self.latent_shape, PATCH)
        flow_sigmas = config.get("use_flow_sigmas")
        return {"mu": mu, "sigmas": None if flow_sigmas else np.linspace(1.0, 1 / steps, steps)}

    def _encode_prompt(self, pipeline: Any, text: str) -> Conditioning:
        """Tokens of T5, pooled of CLIP."""
        tokens, pooled, _ = pipeline.encode_prompt(
            text,
            None,
            device=self.prompt_encoder.device,
            max_sequence_length=self.config.prompt_length,
        )
        return Conditioning(tokens.float(), pooled.float())


def packed(latents: Tensor) -> Tensor:
    """[B, C, h, w] to tokens [B, h/2 w/2, 4 C], one per square of latents."""
    return torch.nn.functional.pixel_unshuffle(latents, PATCH).flatten(2).transpose(1, 2)


def unpacked(tokens: Tensor, height: int, width: int) -> Tensor:
    """The inverse of `packed`."""
    squares = tokens.transpose(1, 2).unflatten(2, (height // PATCH, width // PATCH))
    return torch.nn.functional.pixel_shuffle(squares, PATCH)


def _positions(height: int, width: int, like: Tensor) -> Tensor:
    """Row and column of each token, [height width, 3]; the first number is 0."""
    rows, columns = (torch.arange(n, device=like.device).to(like) for n in (height, width))
    grid = torch.cartesian_prod(rows, columns)
    return torch.cat([grid.new_zeros(len(grid), 1), grid], dim=1)


def shift(config: Mapping[str, Any], shape: Sequence[int], patch: int) -> float:
    """mu of the time shift, from the number of tokens of an image."""
    names = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
    renamed = {"base_image_seq_len": "base_seq_len", "max_image_seq_len": "max_seq_len"}
    settings = {renamed.get(name, name): config[name] for name in names if name in config}
    return calculate_shift(shape[1] // patch * (shape[2] // patch), **settings)
