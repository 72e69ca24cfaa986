"""Training that has diverged: a loss or a weight that is NaN or infinite."""

from collections.abc import Mapping

import torch
from torch import Tensor


class Diverged(RuntimeError):
    """A loss or a weight is NaN or infinite; no checkpoint holds it."""


def remedy(mixed_precision: str) -> str:
    """What to change, as the end of a sentence."""
    change = "lower optimiser.learning_rate"
    if mixed_precision != "no":
        change += f" or leave mixed_precision {mixed_precision}"
    return f"{change}, and train in a fresh run folder"


def refuse_not_finite(tensors: Mapping[str, Tensor]) -> None:
    """Raises Diverged that names the first tensor with a value that is NaN or infinite."""
    floating = {name: t for name, t in tensors.items() if t.is_floating_point()}
    finite = torch.stack([tensor.isfinite().all() for tensor in floating.values()])  # one wait
    for name, good in zip(floating, finite.tolist(), strict=True):
        if not good:
            raise Diverged(f"after its last step {name} is NaN or infinite")
