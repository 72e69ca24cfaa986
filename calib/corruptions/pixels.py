"""The building blocks of corruptions: pixels in [0, 1], interpolation, streaks, plasma."""

import math
from collections.abc import Callable, Sequence

import numpy as np
from scipy.ndimage import gaussian_filter

Pixels = np.ndarray  # float32 [N, S, S, 3], or [N, S, S] of one channel, in [0, 1]
Draw = Callable[[np.random.Generator], np.ndarray]

ROUNDING = 1e-3  # of a level: whole numbers must stay whole despite float32 rounding


def to_bytes(images: Pixels) -> np.ndarray:
    """Clipped to [0, 1], then truncated to uint8, as in the published files."""
    levels: np.ndarray = (np.clip(images, 0, 1) * 255 + ROUNDING).astype(np.uint8)
    return levels


def round_to_bytes(images: Pixels) -> Pixels:
    """Rounded to the 256 levels of bytes, still in [0, 1]."""
    return np.rint(np.clip(images, 0, 1) * 255) / np.float32(255)


def draw(generators: Sequence[np.random.Generator], draw_one: Draw) -> np.ndarray:
    """Call `draw_one` with each image's generator and stack the results, float32."""
    return np.stack([draw_one(generator) for generator in generators]).astype(np.float32)


def smooth(images: Pixels, sigma: float, *, mode: str = "nearest", truncate: float = 4.0) -> Pixels:
    """Gaussian blur over rows and columns, in pixels; beyond the edge as scipy's `mode`."""
    blurred: Pixels = gaussian_filter(images, sigma, axes=(1, 2), mode=mode, truncate=truncate)
    return blurred


def grey(images: Pixels) -> Pixels:
    """Luma of BT.601, [N, S, S, 1]."""
    red, green, blue = np.split(images, 3, axis=-1)
    return np.float32(0.299) * red + np.float32(0.587) * green + np.float32(0.114) * blue


Border = Callable[[np.ndarray, int], np.ndarray]


def enlarged(images: Pixels, factor: float) -> Pixels:
    """The centre enlarged linearly, cut to the old size; [N, S, S, ...].

    The crop that is enlarged has ceil(S / factor) whole pixels per side; its corner pixels become
    the corner pixels of the enlargement.
    """
    size = images.shape[1]
    crop = math.ceil(size / factor)
    large, start = round(crop * factor), (size - crop) // 2
    indices = (large - size) // 2 + np.arange(size)
    positions = start + indices * ((crop - 1) / (large - 1))
    for axis in (1, 2):
        images = _interpolate(images, positions, axis=axis)
    return images


def _interpolate(images: Pixels, positions: np.ndarray, *, axis: int) -> Pixels:
    low = np.minimum(np.floor(positions).astype(int), images.shape[axis] - 2)
    shape = [-1 if dimension == axis else 1 for dimension in range(images.ndim)]
    fraction = (positions - low).astype(np.float32).reshape(shape)
    below, above = images.take(low, axis=axis), images.take(low + 1, axis=axis)
    interpolated: Pixels = below + fraction * (above - below)
    return interpolated


def interpolate_at(
    images: Pixels, rows: np.ndarray, columns: np.ndarray, *, border: Border
) -> Pixels:
    """Linear interpolation of [N, S, S, C] at real coordinates [N, S, S]."""
    size = images.shape[1]
    flat = images.reshape(-1, images.shape[-1])
    offsets = np.arange(len(images))[:, None, None] * size * size
    interpolated = np.zeros_like(images)
    for row, row_weight in _neighbours(rows, border, size):
        for column, column_weight in _neighbours(columns, border, size):
            weight = (row_weight * column_weight).astype(np.float32)[..., None]
            interpolated += weight * flat.take(offsets + row * size + column, axis=0)
    return interpolated


def mirrored(index: np.ndarray, size: int) -> np.ndarray:
    """Pixels beyond the edge mirror those within; the outermost one is the mirror."""
    index = np.abs(index) % (2 * size - 2)
    return np.minimum(index, 2 * size - 2 - index)


def reflected(index: np.ndarray, size: int) -> np.ndarray:
    """Pixels beyond the edge mirror those within; the mirror is the edge."""
    index = index % (2 * size)
    return np.minimum(index, 2 * size - 1 - index)


def _neighbours(
    positions: np.ndarray, border: Border, size: int
) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    low = np.floor(positions)
    fraction, index = positions - low, low.astype(int)
    return (border(index, size), 1 - fraction), (border(index + 1, size), fraction)


def streaked(images: Pixels, *, radius: int, sigma: float, degrees: np.ndarray) -> Pixels:
    """Blur each image to one side, in a direction per image.

    Half a Gaussian on 2 radius + 1 points of the line, each at the nearest pixel; beyond the
    edge the outermost pixels are repeated. This is ImageMagick's motion blur.

    Args:
        images: [N, S, S, C].
        degrees: directions, [N]; 0 is along a row, 90 down a column.
    """
    steps = np.arange(2 * radius + 1)
    weights = np.exp(-(steps**2) / (2 * sigma**2))
    weights = (weights / weights.sum()).astype(np.float32)
    turns = np.deg2rad(degrees)[:, None]
    reach, size = 2 * radius, images.shape[1]
    down = reach + np.ceil(steps * np.sin(turns) - 0.5).astype(int)  # [N, steps]
    right = reach + np.ceil(steps * np.cos(turns) - 0.5).astype(int)
    padded = np.pad(images, ((0, 0), (reach, reach), (reach, reach), (0, 0)), mode="edge")
    streaks = np.zeros_like(images)
    for image, blurred, rows, columns in zip(padded, streaks, down, right, strict=True):
        for weight, row, column in zip(weights, rows, columns, strict=True):
            blurred += weight * image[row : row + size, column : column + size]
    return streaks


def plasma(size: int, decay: float, generators: Sequence[np.random.Generator]) -> Pixels:
    """Periodic random fields, [N, S, S, 1], each from 0 to 1.

    Each halving of the grid adds noise that is decay^2 times weaker than the one before: the
    authors' script draws from (-w, w), multiplies by w again and divides w by `decay`.

    Source: the diamond-square algorithm, Fournier, Fussell and Carpenter 1982.
    """
    levels = (size - 1).bit_length()
    noise = draw(generators, lambda rng: rng.uniform(-1, 1, 4**levels - 1))
    field, start, strength = np.zeros((len(noise), 1, 1), np.float32), 0, np.float32(1)
    for level in range(levels):
        count = 4**level
        noises = [
            strength * noise[:, start + k * count :][:, :count].reshape(field.shape)
            for k in range(3)
        ]
        field, start = _refine(field, *noises), start + 3 * count
        strength /= np.float32(decay**2)
    low, high = (extreme(field, axis=(1, 2), keepdims=True) for extreme in (np.min, np.max))
    return ((field - low) / (high - low))[:, :size, :size, None]


def _refine(corners: Pixels, centre: Pixels, right: Pixels, below: Pixels) -> Pixels:
    """The field on a grid twice as fine: between corners, means of four neighbours plus noise."""
    rows, columns = 1, 2

    def add_next(values: Pixels, axis: int) -> Pixels:
        return values + np.roll(values, -1, axis)

    def add_previous(values: Pixels, axis: int) -> Pixels:
        return values + np.roll(values, 1, axis)

    centre = add_next(add_next(corners, rows), columns) / 4 + centre
    right = (add_next(corners, columns) + add_previous(centre, rows)) / 4 + right
    below = (add_next(corners, rows) + add_previous(centre, columns)) / 4 + below
    upper, lower = np.stack([corners, right], -1), np.stack([below, centre], -1)  # [N, m, m, 2]
    shape = (len(corners), *(2 * side for side in corners.shape[1:]))
    return np.stack([upper, lower], 2).reshape(shape)
