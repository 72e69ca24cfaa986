"""Class names to prompts, and the path between two prompt embeddings."""

import unicodedata
from collections.abc import Sequence

import torch
from torch import Tensor

from pipeline.config import PLACEHOLDER


def prompts(template: str, names: Sequence[str]) -> list[str]:
    """The template with each class name put in; underscores of folder names become spaces."""
    readable = (unicodedata.normalize("NFC", name).replace("_", " ") for name in names)
    return [template.replace(PLACEHOLDER, name) for name in readable]


def interpolate(first: Tensor, second: Tensor, alphas: Tensor, mode: str = "linear") -> Tensor:
    """Mix two conditionings.

    Args:
        first, second: [..., T, D].
        alphas: [A], the weight of `first`.
    Returns:
        [A, ..., T, D]: alpha first + (1 - alpha) second; exactly `first` where alpha is 1 and
        `second` where it is 0.
    Raises:
        ValueError: a mode other than linear, or shapes that differ.
    """
    if mode != "linear":
        raise ValueError(f"mode = {mode}: use linear")
    if first.shape != second.shape:
        raise ValueError(f"shapes {tuple(first.shape)} and {tuple(second.shape)} must be equal")
    weights = alphas.to(first).view(-1, *[1] * first.dim())
    return torch.lerp(second.unsqueeze(0), first.unsqueeze(0), weights)
