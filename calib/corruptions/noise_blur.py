"""Noise of sensors, of few photons, of broken pixels; blur of every kind; saturation."""

from collections.abc import Sequence

import numpy as np
from scipy.ndimage import correlate
from semix.calib.corruptions.pixels import (
    Images,
    draw,
    enlarged,
    smooth,
    streaked,
    to_bytes,
    whole_levels,
)

Generators = Sequence[np.random.Generator]


def gaussian_noise(images: Images, scale: float, generators: Generators) -> Images:
    """Normal noise of one deviation everywhere."""
    shape = images.shape[1:]
    noise = draw(generators, lambda one: one.standard_normal(shape, dtype=np.float32))
    return images + np.float32(scale) * noise


def shot_noise(images: Images, photons: float, generators: Generators) -> Images:
    """Poisson noise: the square root of how many photons a value stands for."""
    pairs = zip(images * photons, generators, strict=True)
    counts = np.stack([generator.poisson(image) for image, generator in pairs])
    return (counts / photons).astype(np.float32)


def impulse_noise(images: Images, share: float, generators: Generators) -> Images:
    """Some values, of each channel by itself, become black or white, by a fair coin."""
    shape = (2, *images.shape[1:])
    chance, coin = draw(generators, lambda one: one.random(shape, dtype=np.float32)).swapaxes(0, 1)
    found: Images = np.where(chance < share, (coin < 0.5).astype(np.float32), images)
    return found


RED = np.array([0, 1, 1], dtype=np.float32)  # how far its channels are from its value


def speckle_noise(images: Images, scale: float, generators: Generators) -> Images:
    """Normal noise in proportion to the value."""
    noise = gaussian_noise(np.zeros_like(images), scale, generators)
    return images + images * noise


def gaussian_blur(images: Images, sigma: float, generators: Generators) -> Images:
    """Blur of one deviation everywhere."""
    return smooth(images, sigma)


def saturate(images: Images, level: tuple[float, float], generators: Generators) -> Images:
    """The saturation of HSV times a factor, and more; hue and value kept.

    Grey has no hue. The benchmark takes that of red, so what is added turns grey to red.
    """
    factor, added = level
    value, low = (edge(images, axis=-1, keepdims=True) for edge in (np.max, np.min))
    depth = value - low
    with np.errstate(divide="ignore", invalid="ignore"):
        saturation = np.where(value > 0, depth / value, 0)
        away = np.where(depth > 0, (value - images) / depth, RED)
    return value * (1 - away * np.clip(factor * saturation + added, 0, 1))


def defocus_blur(images: Images, level: tuple[float, float], generators: Generators) -> Images:
    """A point becomes a disk with a smooth rim."""
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
