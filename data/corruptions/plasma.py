"""Plasma: random fields with detail of every size, by midpoint displacement."""

from collections.abc import Sequence

import numpy as np

from data.corruptions.pixels import Images, draw


def plasma(size: int, decay: float, generators: Sequence[np.random.Generator]) -> Images:
    """Fields that repeat beyond their edges, [N, S, S, 1], each from 0 to 1.

    Every halving of the grid adds noise that is decay^2 times weaker than the one before: the
    authors' script draws from (-w, w), multiplies with w again and divides w by `decay`.

    Source: the diamond-square algorithm, Fournier, Fussell and Carpenter 1982.
    """
    levels = (size - 1).bit_length()
    noise = draw(generators, lambda one: one.uniform(-1, 1, 4**levels - 1))
    field, used, strength = np.zeros((len(noise), 1, 1), np.float32), 0, np.float32(1)
    for level in range(levels):
        count = 4**level
        parts = [
            strength * noise[:, used + k * count :][:, :count].reshape(field.shape)
            for k in range(3)
        ]
        field, used = _refined(field, *parts), used + 3 * count
        strength /= np.float32(decay**2)
    low, high = (edge(field, axis=(1, 2), keepdims=True) for edge in (np.min, np.max))
    return ((field - low) / (high - low))[:, :size, :size, None]


def _refined(corners: Images, centre: Images, right: Images, below: Images) -> Images:
    """Twice as fine: means of four neighbours, and noise, between the corners."""
    rows, columns = 1, 2

    def next_to(values: Images, axis: int) -> Images:
        return values + np.roll(values, -1, axis)

    def before(values: Images, axis: int) -> Images:
        return values + np.roll(values, 1, axis)

    centre = next_to(next_to(corners, rows), columns) / 4 + centre
    right = (next_to(corners, columns) + before(centre, rows)) / 4 + right
    below = (next_to(corners, rows) + before(centre, columns)) / 4 + below
    upper, lower = np.stack([corners, right], -1), np.stack([below, centre], -1)  # [N, m, m, 2]
    shape = (len(corners), *(2 * side for side in corners.shape[1:]))
    return np.stack([upper, lower], 2).reshape(shape)
