"""Model families behind one small protocol, chosen by `generator.family`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from data.device import float32_precision
from pipeline.conditioning import Conditioning
from pipeline.config import GeneratorConfig

if TYPE_CHECKING:
    from pipeline.generators.latent_diffusion import Denoiser, LatentDiffusion


class Generator(Protocol):
    """What mixing needs of a model: a pure function from noise and conditioning to images."""

    latent_shape: tuple[int, ...]  # of one image's initial noise
    device: torch.device

    def encode(self, names: Sequence[str]) -> Conditioning:
        """What the model is told for each class name, one row each."""

    def sample(
        self, noise: Tensor, condition: Conditioning, alphas: Tensor | None = None
    ) -> Tensor:
        """Noise float32 [B, *latent_shape] to clean latents of the same shape.

        `alphas` [G, A] say which series the rows are: B = G A, series by series.
        """

    def decode(self, latents: Tensor) -> Tensor:
        """Latents to pixels uint8 [B, H, W, 3] on the device."""


@float32_precision("ieee")  # the empty prompt is encoded once and for all
def load_generator(config: GeneratorConfig, *, device: str) -> "LatentDiffusion":
    """Load the configured model.

    Raises:
        InputError: no such model, a directory of another kind, an unsuitable scheduler.
    """
    from pipeline.generators.latent_diffusion import LatentDiffusion

    return LatentDiffusion(_denoiser(config, device), config)


def _denoiser(config: GeneratorConfig, device: str) -> "Denoiser":
    match config.family:
        case "stable_diffusion":
            from pipeline.generators.stable_diffusion import StableDiffusion

            return StableDiffusion(config, device=device)
        case "sdxl":
            from pipeline.generators.sdxl import StableDiffusionXL

            return StableDiffusionXL(config, device=device)
        case "dit":
            from pipeline.generators.dit import DiT

            return DiT(config, device=device)
