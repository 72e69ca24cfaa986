"""Extra corruptions, held back to check choices by: speckle, Gaussian blur, saturation."""

import numpy as np

from data.corruptions.noise import Generators, gaussian_noise
from data.corruptions.pixels import Images, smooth

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
