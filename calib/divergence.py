"""A training that has diverged, and how that is noticed."""

from collections.abc import Mapping

import torch
from torch import Tensor


class Diverged(RuntimeError):
    """A loss or a weight is NaN or infinite; no checkpoint with it has been written."""


def divergence_remedy(mixed_precision: str) -> str:
    """The remedy for a divergence, as the end of a sentence."""
    change = "lower optimiser.learning_rate"
    if mixed_precision != "no":
        change += f" or leave mixed_precision {mixed_precision}"
    return f"{change}, and train in a fresh run folder"


def check_finite(tensors: Mapping[str, Tensor]) -> None:
    """Raise Diverged, which names the first tensor that has a NaN or infinite value."""
    floating = {name: t for name, t in tensors.items() if t.is_floating_point()}
    # One tensor, so that the host waits for the device only once.
    finite = torch.stack([tensor.isfinite().all() for tensor in floating.values()])
    for name, is_finite in zip(floating, finite.tolist(), strict=True):
        if not is_finite:
            raise Diverged(f"after the epoch's last step {name} is NaN or infinite")
