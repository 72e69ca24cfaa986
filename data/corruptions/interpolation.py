"""Images between their pixels: enlarged about the centre, or read at any place."""

import math
from collections.abc import Callable

import numpy as np

from data.corruptions.pixels import Images

Border = Callable[[np.ndarray, int], np.ndarray]


def enlarged(images: Images, factor: float) -> Images:
    """The centre enlarged linearly, cut to the old size; [N, S, S, ...].

    The part that is enlarged has whole pixels, ceil(S / factor) a side; its corner pixels
    become the corner pixels of the enlargement.
    """
    size = images.shape[1]
    part = math.ceil(size / factor)
    large, start = round(part * factor), (size - part) // 2
    shown = (large - size) // 2 + np.arange(size)
    place = start + shown * ((part - 1) / (large - 1))
    for axis in (1, 2):
        images = _between(images, place, axis=axis)
    return images


def _between(images: Images, place: np.ndarray, *, axis: int) -> Images:
    low = np.minimum(np.floor(place).astype(int), images.shape[axis] - 2)
    shape = [-1 if other == axis else 1 for other in range(images.ndim)]
    share = (place - low).astype(np.float32).reshape(shape)
    below, above = images.take(low, axis=axis), images.take(low + 1, axis=axis)
    found: Images = below + share * (above - below)
    return found


def read_at(images: Images, rows: np.ndarray, columns: np.ndarray, *, border: Border) -> Images:
    """Linear interpolation of [N, S, S, C] at real places [N, S, S]."""
    size = images.shape[1]
    flat = images.reshape(-1, images.shape[-1])
    own = np.arange(len(images))[:, None, None] * size * size
    found = np.zeros_like(images)
    for row, row_share in _neighbours(rows, border, size):
        for column, column_share in _neighbours(columns, border, size):
            weight = (row_share * column_share).astype(np.float32)[..., None]
            found += weight * flat.take(own + row * size + column, axis=0)
    return found


def mirrored(index: np.ndarray, size: int) -> np.ndarray:
    """Pixels beyond the edge mirror those within; the outermost one is the mirror."""
    index = np.abs(index) % (2 * size - 2)
    return np.minimum(index, 2 * size - 2 - index)


def reflected(index: np.ndarray, size: int) -> np.ndarray:
    """Pixels beyond the edge mirror those within; the mirror is the edge."""
    index = index % (2 * size)
    return np.minimum(index, 2 * size - 1 - index)


def _neighbours(
    place: np.ndarray, border: Border, size: int
) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    low = np.floor(place)
    share, index = place - low, low.astype(int)
    return (border(index, size), 1 - share), (border(index + 1, size), share)
