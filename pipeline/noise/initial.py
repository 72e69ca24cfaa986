"""Standard normal noise from seeds."""

from collections.abc import Sequence

import torch
from torch import Tensor


def initial_noise(seeds: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Standard normal noise, one CPU generator a seed: the same on every device and batch size.

    Returns:
        float32 [N, *shape] on the CPU.
    """
    noises = [
        torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed)) for seed in seeds
    ]
    return torch.stack(noises)
