"""Digital corruptions: brightness, contrast, distortion, coarse pixels, JPEG."""

import io
from collections.abc import Callable

import numpy as np
from PIL import Image

from semix.calib.corruptions.noise_blur import Generators
from semix.calib.corruptions.pixels import (
    Pixels,
    draw,
    interpolate_at,
    mirrored,
    reflected,
    smooth,
    to_bytes,
)


def brightness(images: Pixels, added: float, generators: Generators) -> Pixels:
    """The value of HSV raised, hue and saturation kept."""
    value = images.max(axis=-1, keepdims=True)
    raised = np.minimum(value + np.float32(added), 1)
    # Hue and saturation are ratios of the channels; black has neither and becomes grey.
    ratio = np.divide(raised, value, out=np.zeros_like(value), where=value > 0)
    brightened: Pixels = np.where(value > 0, images * ratio, raised)
    return brightened


def contrast(images: Pixels, factor: float, generators: Generators) -> Pixels:
    """Every channel pulled towards its mean over the image."""
    mean = images.mean(axis=(1, 2), keepdims=True, dtype=np.float64).astype(np.float32)
    return mean + np.float32(factor) * (images - mean)


def elastic_transform(
    images: Pixels, parameters: tuple[float, float, float], generators: Generators
) -> Pixels:
    """A random affine map, then smooth random shifts of each pixel; in fractions of the side."""
    size = images.shape[1]
    shift, sigma, reach = (fraction * size for fraction in parameters)
    corners = draw(generators, lambda rng: rng.uniform(-reach, reach, (3, 2)))
    shifts = draw(generators, lambda rng: rng.uniform(-1, 1, (2, size, size)))
    images = interpolate_at(images, *_affine_coordinates(corners, size), border=mirrored)
    if not shift:
        return images
    rows, columns = (
        index + shift * smooth(shifts[:, axis], sigma, mode="reflect", truncate=3)
        for axis, index in enumerate(np.indices((size, size)))
    )
    return interpolate_at(images, rows, columns, border=reflected)


def _affine_coordinates(corner_shifts: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns that the affine map takes to each pixel, [N, S, S].

    The map moves three corners of the middle square by `corner_shifts`, columns and rows [N, 3, 2].
    """
    middle, third = size // 2, size // 3
    corners = middle + third * np.array([(1, 1), (1, -1), (-1, -1)], dtype=np.float64)
    targets = np.concatenate([corners + corner_shifts, np.ones((len(corner_shifts), 3, 1))], axis=2)
    inverse = np.linalg.solve(targets, np.broadcast_to(corners, corner_shifts.shape))  # [N, 3, 2]
    row, column = np.indices((size, size))
    columns, rows = (
        weights[:, 0] * column + weights[:, 1] * row + weights[:, 2]
        for weights in inverse.transpose(2, 0, 1)[..., None, None]
    )
    return rows, columns


def pixelate(images: Pixels, factor: float, generators: Generators) -> Pixels:
    """Shrunk and enlarged again by box averages."""
    size = images.shape[1]
    small, box = int(size * factor), Image.Resampling.BOX

    def coarsen(image: Image.Image) -> Image.Image:
        return image.resize((small, small), box).resize((size, size), box)

    return _apply_pillow(images, coarsen)


def jpeg_compression(images: Pixels, quality: int, generators: Generators) -> Pixels:
    """Written as JPEG and read again."""

    def compress(image: Image.Image) -> Image.Image:
        file = io.BytesIO()
        image.save(file, "JPEG", quality=quality)
        return Image.open(file)

    return _apply_pillow(images, compress)


def _apply_pillow(images: Pixels, change: Callable[[Image.Image], Image.Image]) -> Pixels:
    changed = [np.asarray(change(Image.fromarray(image))) for image in to_bytes(images)]
    return np.stack(changed).astype(np.float32) / 255
