"""Model families behind one small protocol, chosen by `generator.family`."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from torch import Tensor

from pipeline.config import GeneratorConfig


class Generator(Protocol):
    """What mixing needs of a model."""

    latent_shape: tuple[int, ...]  # of one image's initial noise

    def encode(self, prompts: Sequence[str]) -> Tensor:
        """Prompt embeddings [N, T, D]."""

    def sample(self, noise: Tensor, condition: Tensor) -> np.ndarray:
        """Deterministic: noise [B, *latent_shape], condition [B, T, D] -> uint8 [B, H, W, 3]."""


def load_generator(config: GeneratorConfig, *, device: str) -> Generator:
    """Load the configured model.

    Raises:
        InputError: no such model, a directory of another kind, an unsuitable scheduler.
    """
    from pipeline.generators.stable_diffusion import StableDiffusion

    return StableDiffusion(config, device=device)
