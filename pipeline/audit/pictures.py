"""What pixels alone say of the images of a series: degenerate, unchanging, and their hashes."""

import hashlib
from dataclasses import dataclass
from functools import cache

import numpy as np

CELLS = 8  # cells a side whose brightness the perceptual hash compares
MARGIN = 2.0  # levels of 255; without it the noise of a flat background would decide bits
COARSE = 4  # cells a side of the thumbnail that is kept
FLAT = 1.0  # standard deviation of brightness, in levels of 255
DARK, BRIGHT = 8, 247  # levels; all pixels below or above are a black or a white image
UNCHANGED = 1.0  # mean absolute difference of neighbours in levels of 255; rounding alone gives 0.5
FAULTS = ("flat", "black", "white", "not finite")  # bits of `faults`, in this order


@dataclass(frozen=True)
class Pictures:
    """Facts of A images, in the order they are stored.

    Attributes:
        faults: uint8 [A], a bit for each of the first three FAULTS.
        steps: float32 [A-1], mean absolute difference of neighbours along alpha, in levels.
        hashes: uint64 [A, 2], whether cells grow brighter to the right, and downwards.
        coarse: uint8 [A, 19], brightness of a grid of COARSE x COARSE cells, then mean red,
            green and blue.
        exact: uint64 [A], a digest of the pixels.
    """

    faults: np.ndarray
    steps: np.ndarray
    hashes: np.ndarray
    coarse: np.ndarray
    exact: np.ndarray


def look_at(images: np.ndarray, alphas: np.ndarray) -> Pictures:
    """Measure uint8 [A, H, W, 3]; `alphas` [A] give the order of neighbours."""
    brightness = images.mean(-1, dtype=np.float32)  # [A, H, W]
    return Pictures(
        faults=_faults(brightness),
        steps=_steps(images[np.argsort(alphas, kind="stable")]),
        hashes=difference_hash(brightness),
        coarse=_coarse(images, brightness),
        exact=np.array([_digest(image) for image in images], dtype=np.uint64),
    )


def difference_hash(brightness: np.ndarray) -> np.ndarray:
    """Where brightness [A, H, W] grows between neighbouring cells of a grid, uint64 [A, 2].

    64 bits to the right and 64 downwards, as the difference hash of image search, by area means.
    """
    height, width = brightness.shape[1:]
    cells, more = CELLS, CELLS + 1
    across = _area_means(height, cells) @ brightness @ _area_means(width, more).T
    down = _area_means(height, more) @ brightness @ _area_means(width, cells).T
    bits = [np.diff(across, axis=2) > MARGIN, np.diff(down, axis=1) > MARGIN]  # [A, 8, 8] each
    packed = [np.packbits(part.reshape(len(part), -1), axis=1) for part in bits]
    return np.stack([part.view(np.uint64)[:, 0] for part in packed], axis=1)


def _coarse(images: np.ndarray, brightness: np.ndarray) -> np.ndarray:
    height, width = brightness.shape[1:]
    cells = _area_means(height, COARSE) @ brightness @ _area_means(width, COARSE).T
    colours = images.mean((1, 2))
    parts = [cells.reshape(len(cells), -1), colours]
    return np.concatenate(parts, axis=1).round().astype(np.uint8)


@cache
def _area_means(pixels: int, cells: int) -> np.ndarray:
    """Matrix [cells, pixels] that averages pixels over cells of equal width."""
    edges = np.linspace(0, pixels, cells + 1)
    pixel = np.arange(pixels)
    overlap = np.minimum(edges[1:, None], pixel + 1) - np.maximum(edges[:-1, None], pixel)
    return (overlap.clip(0) * cells / pixels).astype(np.float32)


def _faults(brightness: np.ndarray) -> np.ndarray:
    low, high = brightness.min((1, 2)), brightness.max((1, 2))
    found = np.stack([brightness.std((1, 2)) < FLAT, high < DARK, low > BRIGHT])
    return np.packbits(found, axis=0, bitorder="little")[0]


def _steps(images: np.ndarray) -> np.ndarray:
    difference = np.diff(images.astype(np.int16), axis=0)
    return np.abs(difference).mean((1, 2, 3)).astype(np.float32)


def _digest(image: np.ndarray) -> int:
    return int.from_bytes(hashlib.blake2b(image.tobytes(), digest_size=8).digest(), "little")
