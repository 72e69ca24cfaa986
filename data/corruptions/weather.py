"""Weather: snow, frost, fog."""

import numpy as np

from data.corruptions.interpolation import enlarged
from data.corruptions.noise import Generators
from data.corruptions.pixels import Images, draw, grey, to_bytes, whole_levels
from data.corruptions.plasma import plasma
from data.corruptions.streaks import streaked

Snow = tuple[float, float, float, float, int, float, float]
# Mean colour, and the range of brightness and contrast, of five photographs of frosted windows.
ICE = np.array([0.89, 1.02, 1.09], dtype=np.float32)
BRIGHTNESS, CONTRAST = (0.45, 0.8), (0.08, 0.17)


def snow(images: Images, level: Snow, generators: Generators) -> Images:
    """Flakes that fall, once as they are and once turned by 180 degrees, on a whiter image."""
    mean, deviation, zoom, threshold, radius, sigma, kept = level
    shape = (*images.shape[1:3], 1)
    flakes = draw(generators, lambda one: one.normal(mean, deviation, shape))
    degrees = draw(generators, lambda one: one.uniform(-135, -45, ()))
    flakes = enlarged(flakes, zoom)
    flakes = to_bytes(np.where(flakes < threshold, 0, flakes)) / np.float32(255)
    flakes = whole_levels(streaked(flakes, radius=radius, sigma=sigma, degrees=degrees))
    white = np.maximum(images, 1.5 * grey(images) + 0.5)
    whiter = kept * images + (1 - kept) * white
    found: Images = whiter + flakes + flakes[:, ::-1, ::-1]
    return found


def frost(images: Images, level: tuple[float, float], generators: Generators) -> Images:
    """Ice over the image.

    The benchmark takes parts of photographs of frosted windows. This ice is drawn: needles in
    three directions on uneven ground, of the photographs' mean colour, brightness and contrast.
    """
    image_weight, ice_weight = level
    size = images.shape[1]
    ground = plasma(size, 1.6, generators)
    crystals = _standard(_standard(ground) + _standard(_needles(size, generators)))
    brightness = draw(generators, lambda one: one.uniform(*BRIGHTNESS, (1, 1, 1)))
    contrast = draw(generators, lambda one: one.uniform(*CONTRAST, (1, 1, 1)))
    ice = np.clip(ICE * (brightness + contrast * crystals), 0, 1)
    found: Images = image_weight * images + ice_weight * ice
    return found


def _needles(size: int, generators: Generators) -> Images:
    """Of three directions the strongest streak at each pixel, [N, S, S, 1]."""
    length = max(2, size // 16)
    margin = 2 * length  # streaks come in from outside
    shape = (size + 2 * margin, size + 2 * margin, 1)
    sparks = draw(generators, lambda one: one.standard_normal(shape, dtype=np.float32))
    degrees = draw(generators, lambda one: one.uniform(0, 360, ()))
    directions = [
        streaked(sparks, radius=length, sigma=length, degrees=degrees + turn)
        for turn in (0, 120, 240)
    ]
    inside = slice(margin, margin + size)
    found: Images = np.max(directions, axis=0)[:, inside, inside]
    return found


def _standard(fields: Images) -> Images:
    each = (1, 2, 3)
    # In float64, so that rounding does not depend on how many images are summed at a time.
    mean = fields.mean(axis=each, keepdims=True, dtype=np.float64)
    deviation = fields.std(axis=each, keepdims=True, dtype=np.float64)
    return ((fields - mean) / deviation).astype(np.float32)


def fog(images: Images, level: tuple[float, float], generators: Generators) -> Images:
    """Plasma over the image, then dimmed so that the brightest value stays where it was."""
    thickness, decay = level
    brightest = images.max(axis=(1, 2, 3), keepdims=True)
    veiled = images + thickness * plasma(images.shape[1], decay, generators)
    return veiled * brightest / (brightest + thickness)
