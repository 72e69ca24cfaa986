"""Conditionings of classes, and their mixtures."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Conditioning:
    """The conditioning of a denoiser, N rows.

    Attributes:
        tokens: [N, T, D] for text; [N, D] for class-conditional models.
        pooled: [N, P], in families that use it (SDXL).
    """

    tokens: Tensor
    pooled: Tensor | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, rows: slice | Tensor | Sequence[int]) -> "Conditioning":
        """Select several rows; a single index would lose the first dimension."""
        return self.map(lambda tensor: tensor[rows])

    def map(self, change: Callable[[Tensor], Tensor]) -> "Conditioning":
        return Conditioning(
            change(self.tokens), None if self.pooled is None else change(self.pooled)
        )

    def expand(self, rows: int) -> "Conditioning":
        """One row repeated, without copying."""
        return self.map(lambda tensor: tensor.expand(rows, *tensor.shape[1:]))


def concatenate(parts: Iterable[Conditioning]) -> Conditioning:
    """All rows of several conditionings, in order."""
    parts = list(parts)
    pooled = [part.pooled for part in parts if part.pooled is not None]
    return Conditioning(
        torch.cat([part.tokens for part in parts]), torch.cat(pooled) if pooled else None
    )


def template_mean(encoded: Sequence[Conditioning]) -> Conditioning:
    """The mean over the encodings of several templates, N rows each."""
    if len(encoded) == 1:
        return encoded[0]
    pooled = [template.pooled for template in encoded if template.pooled is not None]
    return Conditioning(
        torch.stack([template.tokens for template in encoded]).mean(dim=0),
        torch.stack(pooled).mean(dim=0) if pooled else None,
    )


def interpolate(first: Tensor, second: Tensor, alphas: Tensor, mode: str = "linear") -> Tensor:
    """Mix two conditionings.

    Args:
        first, second: [..., T, D].
        alphas: [A], the weight of `first`.
        mode: linear: alpha first + (1 - alpha) second; spherical: along the great circle between
            the D-vectors of each token (Shoemake 1985), linear where they are parallel.
    Returns:
        [A, ..., T, D]; exactly `first` where alpha is 1 and `second` where it is 0.
    Raises:
        ValueError: another mode, or shapes that differ.
    """
    if mode not in ("linear", "spherical"):
        raise ValueError(f"mode = {mode}: use linear or spherical")
    if first.shape != second.shape:
        raise ValueError(f"shapes {tuple(first.shape)} and {tuple(second.shape)} must be equal")
    weights = alphas.to(first).view(-1, *[1] * first.dim())
    line = torch.lerp(second.unsqueeze(0), first.unsqueeze(0), weights)
    return line if mode == "linear" else _arc(first, second, weights, line)


def _arc(first: Tensor, second: Tensor, weights: Tensor, line: Tensor) -> Tensor:
    cosine = torch.cosine_similarity(first.float(), second.float(), dim=-1).clamp(-1, 1)
    angle = cosine.acos().unsqueeze(-1)  # [..., T, 1]
    sine = angle.sin()
    # Equal, opposite and zero vectors have no arc. At alphas 0 and 1 the arc gives the ends only up
    # to rounding, the line exactly.
    has_no_arc = (sine < 1e-4) | (weights == 0) | (weights == 1)
    by_first, by_second = ((w * angle).sin() / sine for w in (weights, 1 - weights))
    return torch.where(has_no_arc, line, (by_first * first + by_second * second).to(line.dtype))


def mix(
    embeddings: Conditioning, classes: Sequence[int], mixture: Tensor, mode: str = "linear"
) -> Conditioning:
    """The conditionings of one series.

    Args:
        embeddings: one row per class of the dataset.
        classes: the k classes of the series.
        mixture: [A, k], their weights, on the device of the embeddings; rows sum to 1.
    Returns:
        A rows; exactly the row of a class where its weight is 1.
    """
    if len(classes) == 2:
        first, second = classes
        return Conditioning(
            interpolate(embeddings.tokens[first], embeddings.tokens[second], mixture[:, 0], mode),
            None
            if embeddings.pooled is None
            else interpolate(
                embeddings.pooled[first], embeddings.pooled[second], mixture[:, 0], mode
            ),
        )

    def mixed(tensor: Tensor) -> Tensor:
        ends = torch.stack([tensor[k] for k in classes])  # a list as index is copied to the device
        rows: Tensor = torch.tensordot(mixture.to(tensor), ends, dims=1)
        return rows

    return embeddings.map(mixed)
