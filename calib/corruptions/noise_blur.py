"""Noise of sensors, of few photons and of broken pixels; every kind of blur; saturation."""

from collections.abc import Sequence

import numpy as np
from scipy.ndimage import correlate

from semix.calib.corruptions.pixels import (
    Pixels,
    draw,
    enlarged,
    round_to_bytes,
    smooth,
    streaked,
    to_bytes,
)

Generators = Sequence[np.random.Generator]


def gaussian_noise(images: Pixels, scale: float, generators: Generators) -> Pixels:
    """Normal noise of one deviation everywhere."""
    shape = images.shape[1:]
    noise = draw(generators, lambda rng: rng.standard_normal(shape, dtype=np.float32))
    return images + np.float32(scale) * noise


def shot_noise(images: Pixels, photons: float, generators: Generators) -> Pixels:
    """Poisson noise: the square root of the number of photons that a value stands for."""
    pairs = zip(images * photons, generators, strict=True)
    counts = np.stack([generator.poisson(image) for image, generator in pairs])
    return (counts / photons).astype(np.float32)


def impulse_noise(images: Pixels, fraction: float, generators: Generators) -> Pixels:
    """Some values, independently per channel, become black or white by a fair coin."""
    shape = (2, *images.shape[1:])
    chance, coin = draw(generators, lambda rng: rng.random(shape, dtype=np.float32)).swapaxes(0, 1)
    noisy: Pixels = np.where(chance < fraction, (coin < 0.5).astype(np.float32), images)
    return noisy


RED = np.array([0, 1, 1], dtype=np.float32)  # distance of each channel from the value of HSV


def speckle_noise(images: Pixels, scale: float, generators: Generators) -> Pixels:
    """Normal noise in proportion to the value."""
    noise = gaussian_noise(np.zeros_like(images), scale, generators)
    return images + images * noise


def gaussian_blur(images: Pixels, sigma: float, generators: Generators) -> Pixels:
    """Blur of one deviation everywhere."""
    return smooth(images, sigma)


def saturate(images: Pixels, parameters: tuple[float, float], generators: Generators) -> Pixels:
    """The saturation of HSV times a factor, plus a constant; hue and value unchanged.

    Grey has no hue. The benchmark takes that of red, so the constant turns grey to red.
    """
    factor, added = parameters
    value, low = (extreme(images, axis=-1, keepdims=True) for extreme in (np.max, np.min))
    chroma = value - low
    with np.errstate(divide="ignore", invalid="ignore"):
        saturation = np.where(value > 0, chroma / value, 0)
        distance = np.where(chroma > 0, (value - images) / chroma, RED)
    return value * (1 - distance * np.clip(factor * saturation + added, 0, 1))


def defocus_blur(images: Pixels, parameters: tuple[float, float], generators: Generators) -> Pixels:
    """A point becomes a disk with a smooth rim."""
    kernel = _disk(*parameters)[None, :, :, None]
    blurred: Pixels = correlate(images, kernel, mode="mirror")
    return blurred


def _disk(radius: float, rim: float) -> np.ndarray:
    reach = max(8, int(radius))
    taps = 1 if radius <= 8 else 2  # on each side, of the Gaussian that smooths the rim
    offset = np.arange(-reach, reach + 1)
    disk = (offset[:, None] ** 2 + offset**2 <= radius**2).astype(np.float64)
    gaussian = np.exp(-(np.arange(-taps, taps + 1) ** 2) / (2 * rim**2))
    gaussian /= gaussian.sum()
    padded = np.pad(disk / disk.sum(), taps, mode="reflect")
    for axis in (0, 1):
        padded = np.apply_along_axis(np.convolve, axis, padded, gaussian, mode="valid")
    return padded


def glass_blur(
    images: Pixels, parameters: tuple[float, int, int], generators: Generators
) -> Pixels:
    """Pixels become copies of near ones, between two slight Gaussian blurs.

    From the last pixel to the first, each becomes a copy of the current value of a random pixel
    at most `reach` away. The authors' script intends to swap the two, but copies, as in the
    published files.
    """
    sigma, reach, rounds = parameters
    size = images.shape[1]
    levels = to_bytes(smooth(images, sigma))
    inner = size - 2 * reach  # indices reach + 1 .. size - reach of each axis
    shape = (rounds, 2, inner, inner)
    moves = draw(generators, lambda rng: rng.integers(-reach, reach, shape)).astype(int)
    for turn in range(rounds):
        _copy_neighbours(levels, moves[:, turn], reach=reach)
    return smooth(levels.astype(np.float32) / 255, sigma)


def _copy_neighbours(images: np.ndarray, moves: np.ndarray, *, reach: int) -> None:
    """Copy in place; `moves` are offsets in rows and columns, [N, 2, inner, inner].

    Pixels with the same number `(reach + 1) row + column`, counted from the last, do not reach
    each other, and the pixels within reach of a pixel are processed before or after it as in
    reading order; so all pixels of one number are copied at once.
    """
    inner = moves.shape[-1]
    row, column = np.indices((inner, inner)).reshape(2, -1)
    number = (reach + 1) * row + column
    image = np.arange(len(images))[:, None]
    order = np.argsort(number, kind="stable")
    for group in np.split(order, np.flatnonzero(np.diff(number[order])) + 1):
        rows, columns = (inner + reach - index[group] for index in (row, column))
        down, right = moves[:, 0, row[group], column[group]], moves[:, 1, row[group], column[group]]
        images[image, rows, columns] = images[image, rows + down, columns + right]


def motion_blur(images: Pixels, parameters: tuple[int, float], generators: Generators) -> Pixels:
    """Blur along a line that is at most 45 degrees from a row."""
    radius, sigma = parameters
    degrees = draw(generators, lambda rng: rng.uniform(-45, 45, ()))
    return round_to_bytes(streaked(images, radius=radius, sigma=sigma, degrees=degrees))


def zoom_blur(images: Pixels, parameters: tuple[float, float], generators: Generators) -> Pixels:
    """The mean of the image and of its enlargements."""
    factors = np.arange(1, *parameters)
    total = images.copy()
    for factor in factors:
        total += enlarged(images, float(factor))
    return total / np.float32(len(factors) + 1)
