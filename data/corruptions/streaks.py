"""Blur along a line, as of something that moves."""

import numpy as np

from data.corruptions.pixels import Images


def streaked(images: Images, *, radius: int, sigma: float, degrees: np.ndarray) -> Images:
    """Each image blurred to one side, along a direction of its own.

    Half a Gaussian on 2 radius + 1 points of the line, each at the nearest pixel; beyond the
    edge the outermost pixels go on. ImageMagick defines its motion blur so.

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
    found = np.zeros_like(images)
    for image, blurred, rows, columns in zip(padded, found, down, right, strict=True):
        for weight, row, column in zip(weights, rows, columns, strict=True):
            blurred += weight * image[row : row + size, column : column + size]
    return found
