"""Checks on pixels alone: degenerate and unchanging images, hashes, and similar series."""

import hashlib
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

CELLS = 8  # cells per side whose brightness the perceptual hash compares
MARGIN = 2.0  # levels of 255, so that noise in a flat background does not decide bits
COARSE = 4  # cells per side of the thumbnail
FLAT = 1.0  # standard deviation of brightness, in levels of 255
DARK, BRIGHT = 8, 247  # levels; all pixels below or above are a black or a white image
UNCHANGED = 1.0  # mean absolute difference of neighbours in levels of 255; rounding alone gives 0.5
FAULTS = ("flat", "black", "white", "not finite")  # bits of `faults`, in this order


class Pictures(NamedTuple):
    """Facts on A images, in stored order; for G series, G is the first dimension.

    Attributes:
        faults: uint8 [A], one bit for each of the first three FAULTS.
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


def measure_pictures(images: np.ndarray, alphas: np.ndarray) -> Pictures:
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
    """Bits that say where brightness [A, H, W] grows between cells of a grid, uint64 [A, 2].

    64 bits to the right and 64 downwards, as the difference hash of image search, by area means.
    """
    height, width = brightness.shape[1:]
    cells, more = CELLS, CELLS + 1
    across = _area_means(height, cells) @ brightness @ _area_means(width, more).T
    down = _area_means(height, more) @ brightness @ _area_means(width, cells).T
    bits = [np.diff(across, axis=2) > MARGIN, np.diff(down, axis=1) > MARGIN]  # [A, 8, 8] each
    packed = [np.packbits(direction.reshape(len(direction), -1), axis=1) for direction in bits]
    return np.stack([octets.view(np.uint64)[:, 0] for octets in packed], axis=1)


def _coarse(images: np.ndarray, brightness: np.ndarray) -> np.ndarray:
    height, width = brightness.shape[1:]
    cells = _area_means(height, COARSE) @ brightness @ _area_means(width, COARSE).T
    colours = images.mean((1, 2))
    columns = [cells.reshape(len(cells), -1), colours]
    return np.concatenate(columns, axis=1).round().astype(np.uint8)


@cache
def _area_means(pixels: int, cells: int) -> np.ndarray:
    """Matrix [cells, pixels] that averages pixels over cells of equal width."""
    edges = np.linspace(0, pixels, cells + 1)
    pixel = np.arange(pixels)
    overlap = np.minimum(edges[1:, None], pixel + 1) - np.maximum(edges[:-1, None], pixel)
    return (overlap.clip(0) * cells / pixels).astype(np.float32)


def _faults(brightness: np.ndarray) -> np.ndarray:
    low, high = brightness.min((1, 2)), brightness.max((1, 2))
    faults = np.stack([brightness.std((1, 2)) < FLAT, high < DARK, low > BRIGHT])
    return np.packbits(faults, axis=0, bitorder="little")[0]


def _steps(images: np.ndarray) -> np.ndarray:
    difference = np.diff(images.astype(np.int16), axis=0)
    return np.abs(difference).mean((1, 2, 3)).astype(np.float32)


def _digest(image: np.ndarray) -> int:
    return int.from_bytes(hashlib.blake2b(image.tobytes(), digest_size=8).digest(), "little")


# Different bits at most. Noise of 2 levels in every pixel changes at most 6 of 128 bits in 997 of
# 1,000 pictures.
NEAR = 6
# Largest difference of two thumbnails, in levels of 255. Of 580,000 pairs of 1,080 handwritten
# digits, which are very similar pictures, none is within 12.
ALIKE = 6
BANDS = 8  # of 16 bits; if at most 6 bits differ, at least 2 bands are equal
NEIGHBOURS = 16  # following images that each is compared with; some are of the same series


@dataclass(frozen=True)
class Duplicates:
    """Series with a picture that resembles one of an earlier series.

    Attributes:
        rows: int64 [N], ascending, the later series of each pair.
        of: int64 [N], the earliest series that it resembles.
        same: bool [N], whether a picture has the same pixels.
    """

    rows: np.ndarray
    of: np.ndarray
    same: np.ndarray


def find_duplicates(
    hashes: np.ndarray, coarse: np.ndarray, exact: np.ndarray, *, usable: np.ndarray
) -> Duplicates:
    """Compare each picture with those next to it in several orders of their hashes.

    Equal pixels are always found. Hashes that differ in at most NEAR bits are missed only if, in
    each of the orders, more than NEIGHBOURS images lie between them. The cost grows with N log N.

    Args:
        hashes: uint64 [G, A, 2]; coarse: uint8 [G, A, 19]; exact: uint64 [G, A].
        usable: bool [G, A], images to compare; all flat images would be alike.
    """
    series = np.nonzero(usable)[0]  # [N], the series of each compared image
    hashes, coarse, exact = hashes[usable], coarse[usable], exact[usable]
    pairs = np.concatenate([_equal(exact), *(_near(hashes, coarse, band) for band in range(BANDS))])
    same = exact[pairs[:, 0]] == exact[pairs[:, 1]]
    rows = np.sort(series[pairs], axis=1)  # [P, 2]
    differ = rows[:, 0] != rows[:, 1]  # not two images of one series
    return _earliest_series(rows[differ], same[differ])


def _equal(exact: np.ndarray) -> np.ndarray:
    """Pairs of equal images, [P, 2]: the earliest image, and a later one that equals it."""
    _, first, inverse = np.unique(exact, return_index=True, return_inverse=True)
    later = np.flatnonzero(first[inverse] != np.arange(len(exact)))
    return np.stack([first[inverse[later]], later], axis=1)


def _near(hashes: np.ndarray, coarse: np.ndarray, band: int) -> np.ndarray:
    """Pairs of similar images, [P, 2], among neighbours when hashes are sorted from a band on."""
    octets = np.roll(hashes.view(np.uint8), -2 * band, axis=1)
    high, low = np.ascontiguousarray(octets).view(">u8").T
    order = np.lexsort((low, high))
    pairs = []
    for shift in range(1, min(NEIGHBOURS, len(order) - 1) + 1):
        first, second = order[:-shift], order[shift:]
        bits = np.bitwise_count(hashes[first] ^ hashes[second]).sum(1)
        close = np.flatnonzero(bits <= NEAR)
        first, second = first[close], second[close]
        gap = np.abs(coarse[first].astype(np.int16) - coarse[second]).max(1)
        pairs.append(np.stack([first, second], axis=1)[gap <= ALIKE])
    return np.concatenate(pairs) if pairs else np.empty((0, 2), dtype=np.int64)


def _earliest_series(pairs: np.ndarray, same: np.ndarray) -> Duplicates:
    """The earliest similar series of each later series in pairs [P, 2]."""
    order = np.lexsort((pairs[:, 0], ~same, pairs[:, 1]))  # equal pixels come first
    pairs, same = pairs[order], same[order]
    rows, start = np.unique(pairs[:, 1], return_index=True)
    return Duplicates(rows, pairs[start, 0], same[start])
