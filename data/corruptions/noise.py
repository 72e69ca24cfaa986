"""Noise: of sensors, of few photons, of broken pixels."""

from collections.abc import Sequence

import numpy as np

from data.corruptions.pixels import Images, draw

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
