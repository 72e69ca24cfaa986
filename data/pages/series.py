"""A mixed series as a figure of a page: images with alpha, weight and soft label below each."""

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

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
    note: str  # stands behind its number
    pixelated: bool
    frames: tuple[Frame, ...]


def series_figure(record: Mapping[str, Any], images: Sequence[np.ndarray], *, note: str) -> Series:
    """What series.html.j2 draws.

    Args:
        record: group, classes, names, alphas, weights, labels, as in a shard's KEY.json.
        images: uint8 [H, W, 3] each, in the order of the record's alphas.
    """
    first = record["classes"][0]
    shares = [dict(label) for label in record["labels"]]
    frames = tuple(
        Frame(
            source=_data_uri(images[position]),
            alpha=record["alphas"][position],
            weight=record["weights"][position],
            first=shares[position].pop(first, 0.0),
            second=sum(shares[position].values()),
        )
        for position in np.argsort(record["alphas"], kind="stable").tolist()
    )
    name, *others = record["names"]
    pixelated = max(images[0].shape[:2]) <= PIXEL_ART
    return Series(record["group"], name, " + ".join(others), note, pixelated, frames)


def _data_uri(image: np.ndarray) -> str:
    """As WebP: lossless at its own size, lossy where it is shrunk."""
    picture = Image.fromarray(image)
    shrunk = max(picture.size) > THUMB
    if shrunk:
        picture.thumbnail((THUMB, THUMB), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    picture.save(buffer, "WEBP", lossless=not shrunk, quality=85)
    return "data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode()
