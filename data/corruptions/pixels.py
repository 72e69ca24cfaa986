"""Pixels in [0, 1], smoothed, and back as bytes."""

from collections.abc import Callable, Sequence

import numpy as np

Images = np.ndarray  # float32 [N, S, S, 3], or [N, S, S] of one channel, in [0, 1]
Draw = Callable[[np.random.Generator], np.ndarray]

ROUNDING = 1e-3  # of a level: a whole number stays whole whatever float32 makes of it


def to_bytes(images: Images) -> np.ndarray:
    """Clipped to [0, 1], then truncated to uint8, as in the published files."""
    levels: np.ndarray = (np.clip(images, 0, 1) * 255 + ROUNDING).astype(np.uint8)
    return levels


def whole_levels(images: Images) -> Images:
    """Rounded to what bytes can hold."""
    return np.rint(np.clip(images, 0, 1) * 255) / np.float32(255)


def draw(generators: Sequence[np.random.Generator], one: Draw) -> np.ndarray:
    """What `one` draws from each image's own generator, stacked, float32."""
    return np.stack([one(generator) for generator in generators]).astype(np.float32)


def smooth(images: Images, sigma: float, *, mode: str = "nearest", truncate: float = 4.0) -> Images:
    """Gaussian blur over rows and columns, in pixels; beyond the edge as scipy's `mode`."""
    from scipy.ndimage import gaussian_filter

    found: Images = gaussian_filter(images, sigma, axes=(1, 2), mode=mode, truncate=truncate)
    return found


def grey(images: Images) -> Images:
    """Luma of BT.601, [N, S, S, 1]."""
    red, green, blue = np.split(images, 3, axis=-1)
    return np.float32(0.299) * red + np.float32(0.587) * green + np.float32(0.114) * blue
