"""Blur: out of focus, through frosted glass, of a moving camera, of a zooming one."""

import numpy as np

from data.corruptions.interpolation import enlarged
from data.corruptions.noise import Generators
from data.corruptions.pixels import Images, draw, smooth, to_bytes, whole_levels
from data.corruptions.streaks import streaked


def defocus_blur(images: Images, level: tuple[float, float], generators: Generators) -> Images:
    """A point becomes a disk with a smooth rim."""
    from scipy.ndimage import correlate

    kernel = _disk(*level)[None, :, :, None]
    found: Images = correlate(images, kernel, mode="mirror")
    return found


def _disk(radius: float, rim: float) -> np.ndarray:
    reach = max(8, int(radius))
    taps = 1 if radius <= 8 else 2  # on each side, of the Gaussian that smooths the rim
    offset = np.arange(-reach, reach + 1)
    disk = (offset[:, None] ** 2 + offset**2 <= radius**2).astype(np.float64)
    near = np.exp(-(np.arange(-taps, taps + 1) ** 2) / (2 * rim**2))
    near /= near.sum()
    padded = np.pad(disk / disk.sum(), taps, mode="reflect")
    for axis in (0, 1):
        padded = np.apply_along_axis(np.convolve, axis, padded, near, mode="valid")
    return padded


def glass_blur(images: Images, level: tuple[float, int, int], generators: Generators) -> Images:
    """Pixels take the place of near ones, between two slight Gaussian blurs.

    From the last pixel to the first, each becomes a copy of a random one, at most `reach` away,
    as it then is. The authors' script means to swap the two, but copies; so do the published
    files.
    """
    sigma, reach, rounds = level
    size = images.shape[1]
    moved = to_bytes(smooth(images, sigma))
    inner = size - 2 * reach  # places reach + 1 .. size - reach of each axis
    shape = (rounds, 2, inner, inner)
    moves = draw(generators, lambda one: one.integers(-reach, reach, shape)).astype(int)
    for turn in range(rounds):
        _copy_neighbours(moved, moves[:, turn], reach=reach)
    return smooth(moved.astype(np.float32) / 255, sigma)


def _copy_neighbours(images: np.ndarray, moves: np.ndarray, *, reach: int) -> None:
    """In place; `moves` are rows and columns to go, [N, 2, inner, inner].

    Pixels whose number `(reach + 1) row + column`, counted from the last, is the same do not
    reach each other, and those that one does reach come before or after it as they do in
    reading order; so they are all moved at once.
    """
    inner = moves.shape[-1]
    row, column = np.indices((inner, inner)).reshape(2, -1)
    turn = (reach + 1) * row + column
    every = np.arange(len(images))[:, None]
    order = np.argsort(turn, kind="stable")
    for group in np.split(order, np.flatnonzero(np.diff(turn[order])) + 1):
        rows, columns = (inner + reach - part[group] for part in (row, column))
        down, right = moves[:, 0, row[group], column[group]], moves[:, 1, row[group], column[group]]
        images[every, rows, columns] = images[every, rows + down, columns + right]


def motion_blur(images: Images, level: tuple[int, float], generators: Generators) -> Images:
    """Blur along a line that is at most 45 degrees from a row."""
    radius, sigma = level
    degrees = draw(generators, lambda one: one.uniform(-45, 45, ()))
    return whole_levels(streaked(images, radius=radius, sigma=sigma, degrees=degrees))


def zoom_blur(images: Images, level: tuple[float, float], generators: Generators) -> Images:
    """The mean of the image and of its enlargements."""
    factors = np.arange(1, *level)
    total = images.copy()
    for factor in factors:
        total += enlarged(images, float(factor))
    return total / np.float32(len(factors) + 1)
