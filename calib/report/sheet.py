"""The contact sheet: mixed series with alpha, weight and soft label under each image."""

import base64
import io
from dataclasses import dataclass

import torch
from PIL import Image

from data.mixed import MixedDataset
from data.quality import spearman

THUMB = 128  # pixels; larger images are shrunk for the page
PIXEL_ART = 64  # pixels; up to here enlarging shows the pixels themselves


@dataclass(frozen=True)
class Frame:
    """One image of a series."""

    source: str  # data URI
    alpha: float  # conditioning weight of the first class
    weight: float  # raw CLIP projection on the first class
    first: float  # soft label of the first class, in [0, 1]
    second: float  # of all others


@dataclass(frozen=True)
class Series:
    """One group, from its other classes (alpha 0) to its first (alpha 1)."""

    group: int
    first: str
    second: str
    rho: float  # Spearman's rank correlation of alpha and weight
    worst: bool  # the lowest rho of the whole dataset
    pixelated: bool
    frames: tuple[Frame, ...]


def contact_sheet(mixed: MixedDataset, count: int = 12) -> list[Series]:
    """Series spread evenly over the class pairs, then the one that follows alpha least.

    Chosen by position, never by looks, so that the sheet shows what the dataset holds.
    """
    rho = spearman(mixed.alphas, mixed.weights)
    worst = int(rho.argmin())
    chosen = [group for group in spread_over_pairs(mixed.classes, count - 1) if group != worst]
    return [
        _series(mixed, group, rho=float(rho[group]), worst=group == worst)
        for group in [*chosen, worst]
    ]


def spread_over_pairs(classes: torch.Tensor, count: int) -> list[int]:
    """Up to `count` groups of classes [G, 2]: distinct pairs first, evenly spaced among them."""
    seen: dict[tuple[int, ...], int] = {}
    rounds: list[tuple[int, int]] = []  # (how often the pair came before, group)
    for group, pair in enumerate(map(tuple, classes.tolist())):
        rounds.append((seen.get(pair, 0), group))
        seen[pair] = seen.get(pair, 0) + 1
    distinct = [group for before, group in rounds if before == 0]
    if len(distinct) >= count:
        return [distinct[i * len(distinct) // count] for i in range(count)]
    return [group for _, group in sorted(rounds)[:count]]


def _series(mixed: MixedDataset, group: int, *, rho: float, worst: bool) -> Series:
    first, *others = mixed.classes[group].tolist()
    series = mixed[group]
    labels = series["labels"]
    frames = tuple(
        Frame(
            source=_data_uri(series["images"][position]),
            alpha=float(mixed.alphas[group, position]),
            weight=float(mixed.weights[group, position]),
            first=float(labels[position, first]),
            second=float(labels[position, others].sum()),
        )
        for position in mixed.alphas[group].argsort().tolist()
    )
    return Series(
        group=group,
        first=mixed.class_names[first],
        second=" + ".join(mixed.class_names[k] for k in others),
        rho=rho,
        worst=worst,
        pixelated=max(mixed.images.shape[2:4]) <= PIXEL_ART,
        frames=frames,
    )


def _data_uri(image: torch.Tensor) -> str:
    """uint8 [H, W, 3] as a WebP data URI: lossless at its own size, lossy where it is shrunk."""
    picture = Image.fromarray(image.numpy())
    shrunk = max(picture.size) > THUMB
    if shrunk:
        picture.thumbnail((THUMB, THUMB), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    picture.save(buffer, "WEBP", lossless=not shrunk, quality=85)
    return "data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode()
