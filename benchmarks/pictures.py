"""Pictures that cost nothing to make, so that roots of any size can be written for reading."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor

from semix.data.features import FEATURES
from semix.data.formats import PROTOTYPES
from semix.data.root import Root
from semix.pipeline.annotate import build_annotator
from semix.pipeline.conditioning import Conditioning
from semix.pipeline.noise.source import random_noise
from semix.pipeline.plan import BuildPlan, build_of
from semix.pipeline.shard import Models, generate_shard


class Blends:
    """A fake diffusion model: two handwritten digits, blended in proportion.

    Args:
        size: side of the images, a multiple of 8.
        seconds: time that every batch sleeps.
    """

    def __init__(self, size: int, *, seconds: float = 0.0) -> None:
        self.device = torch.device("cpu")
        self.latent_shape = (1, 8, 8)
        self._size, self._seconds = size, seconds
        digits = load_digits()
        means = [digits.images[digits.target == k].mean(0) for k in range(10)]
        self._digits = torch.from_numpy(np.stack(means)).float() / 16  # [10, 8, 8]

    def encode(self, names: Sequence[str]) -> Conditioning:
        """Each class as its digit: [K, 1, 64]."""
        return Conditioning(self._digits[: len(names)].reshape(len(names), 1, 64))

    def sample(self, noise: Tensor, condition: Conditioning) -> Tensor:
        time.sleep(self._seconds)
        return condition.tokens.reshape(-1, *self.latent_shape) + 0.1 * noise

    def decode(self, latents: Tensor) -> Tensor:
        grey = (latents.clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1)
        factor = self._size // grey.shape[1]
        large = grey.repeat_interleave(factor, 1).repeat_interleave(factor, 2)
        return large.expand(-1, -1, -1, 3).contiguous()


class Guesses:
    """A fake CLIP: random features, from which labels follow as usual."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._rng = torch.Generator().manual_seed(0)

    def encode(self, images: Tensor) -> dict[str, Tensor]:
        return {FEATURES: torch.randn(len(images), self._width, generator=self._rng)}


def blending_models(
    plan: BuildPlan, prototypes: bytes, *, size: int, seconds: float = 0.0
) -> Models:
    """Fake models of a root: blends of digits, and random features.

    Args:
        prototypes: of the root, encoded.
        size, seconds: as for `Blends`.
    """
    blends: Any = Blends(size, seconds=seconds)
    annotator = build_annotator(plan.config.annotation, prototypes, device="cpu")
    width = annotator.measurements[FEATURES].prototypes.shape[1]
    guesses: Any = Guesses(width)
    embeddings = blends.encode(plan.class_names)
    return Models(
        blends,
        replace(annotator, encoders=guesses),
        embeddings,
        random_noise(blends.latent_shape),
        "",
    )


def fill(root: Root, *, size: int) -> None:
    """Make all missing shards of a root from blends of digits, with random features."""
    plan = build_of(root).plan
    models = blending_models(plan, root.store.get(PROTOTYPES), size=size)
    for shard in root.missing():
        generate_shard(plan.shard(shard), plan, models=models, root=root).publish()
