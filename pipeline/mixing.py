"""A batch of MixGroups to images: exactly one noise a group."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pipeline.conditioning import interpolate
from pipeline.generators import Generator
from pipeline.noise import initial_noise
from pipeline.plan import MixGroup


def mix_groups(
    groups: Sequence[MixGroup],
    *,
    alphas: Sequence[float],
    embeddings: Tensor,
    generator: Generator,
    batch_groups: int,
) -> np.ndarray:
    """Generate all series of some groups in one forward batch.

    Args:
        groups: at most `batch_groups`; fewer are padded with the last one and cut off again,
            because the batch layout moves the last bits of an image.
        embeddings: prompt embeddings of the classes, [K, T, D].
    Returns:
        uint8 [G, A, H, W, 3].
    """
    padded = [*groups, *[groups[-1]] * (batch_groups - len(groups))]
    noise = initial_noise([group.seed for group in padded], generator.latent_shape)
    weights = torch.tensor(alphas, dtype=torch.float32)
    condition = torch.cat(
        [interpolate(embeddings[g.first], embeddings[g.second], weights) for g in padded]
    )
    images = generator.sample(noise.repeat_interleave(len(alphas), dim=0), condition)
    series = images.reshape(batch_groups, len(alphas), *images.shape[1:])
    return series[: len(groups)]
