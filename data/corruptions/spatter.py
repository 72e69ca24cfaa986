"""Spatter: drops of water, or mud, on the lens."""

import numpy as np

from data.corruptions.noise import Generators
from data.corruptions.pixels import ROUNDING, Images, draw, smooth

Spatter = tuple[float, float, float, float, float, bool]
WATER = np.array([175, 238, 238], dtype=np.float32) / 255
MUD = np.array([63, 42, 20], dtype=np.float32) / 255
FAR = 20  # pixels from a rim, beyond which all of a drop is alike
RELIEF = np.array([[-2, -1, 0], [-1, 1, 1], [0, 1, 2]])
WEAK, STRONG = 50, 150  # thresholds of the rims, on Sobel's gradient of levels
SOBEL = np.array([[-1, -2, -1], [0, 0, 0], [1, 2, 1]])
DIAGONAL, KNIGHT = 1.4, 2.1969  # lengths of steps that are not along an axis
BLOCK = np.ones((1, 3, 3))


def spatter(images: Images, level: Spatter, generators: Generators) -> Images:
    """Drops where smooth noise passes a threshold: of water, which shine, or of mud."""
    mean, deviation, sigma, threshold, strength, is_mud = level
    shape = images.shape[1:3]
    liquid = smooth(draw(generators, lambda one: one.normal(mean, deviation, shape)), sigma)
    liquid[liquid < threshold] = 0
    if not is_mud:
        return images + strength * _shine(liquid)[..., None] * WATER
    cover = smooth((liquid > threshold).astype(np.float32), strength)
    cover[cover < 0.8] = 0
    return images + cover[..., None] * (MUD - images)


def _shine(liquid: Images) -> Images:
    """A relief of the distance to the rims, brightest where it is steep and the drop deep."""
    from scipy import ndimage

    levels = np.minimum(255 * liquid, 255).astype(np.uint8)
    distance = np.minimum(np.stack([_distance(rim) for rim in _rims(levels)]), FAR)
    flat = np.stack([_equalised(one) for one in np.floor(_box(distance) + ROUNDING).astype(int)])
    relief = ndimage.correlate(flat.astype(np.int32), RELIEF[None], mode="mirror")
    shine = levels * np.rint(_box(np.clip(relief, 0, 255)))
    most = shine.max(axis=(1, 2), keepdims=True)
    return np.divide(shine, most, out=np.zeros_like(shine), where=most > 0).astype(np.float32)


def _box(values: np.ndarray) -> np.ndarray:
    from scipy import ndimage

    found: np.ndarray = ndimage.correlate(values.astype(np.float64), BLOCK / 9, mode="mirror")
    return found


def _distance(rim: np.ndarray) -> np.ndarray:
    """To the nearest rim, by steps to neighbours and by knight's moves, as OpenCV measures it."""
    from scipy import ndimage

    if not rim.any():
        return np.full(rim.shape, float(FAR))
    nearest = ndimage.distance_transform_edt(~rim, return_distances=False, return_indices=True)
    away = np.abs(nearest - np.indices(rim.shape))
    far, near = away.max(axis=0), away.min(axis=0)
    return np.where(
        far >= 2 * near,
        far - 2 * near + KNIGHT * near,
        KNIGHT * (far - near) + DIAGONAL * (2 * near - far),
    )


def _equalised(levels: np.ndarray) -> np.ndarray:
    """The histogram spread over 0 .. 255, the lowest level to 0; one level alone stays."""
    counts = np.bincount(levels.ravel(), minlength=256)
    below = counts.cumsum() - counts[levels.min()]
    if not below[-1]:
        return levels
    return np.rint(below * (255 / below[-1]))[levels]


def _rims(levels: np.ndarray) -> np.ndarray:
    """Canny's edges of uint8 [N, S, S], with |dx| + |dy| for the gradient."""
    from scipy import ndimage

    padded = np.pad(levels.astype(np.int32), ((0, 0), (1, 1), (1, 1)), mode="edge")
    kernels = SOBEL[None], SOBEL.T[None]
    down, right = (ndimage.correlate(padded, kernel)[:, 1:-1, 1:-1] for kernel in kernels)
    size = np.abs(down) + np.abs(right)
    thin = (size > WEAK) & _is_ridge(size, down, right)
    joined, _ = ndimage.label(
        thin, structure=np.stack([np.zeros((3, 3)), *BLOCK, np.zeros((3, 3))])
    )
    strong = np.unique(joined[thin & (size > STRONG)])
    found: np.ndarray = thin & np.isin(joined, strong)
    return found


def _is_ridge(size: np.ndarray, down: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Where the gradient is largest along its own direction, to one of four."""
    padded = np.pad(size, ((0, 0), (1, 1), (1, 1)))

    def beside(row: int, column: int) -> np.ndarray:
        rows, columns = padded.shape[1:]
        return padded[:, 1 + row : rows - 1 + row, 1 + column : columns - 1 + column]

    steep, flat = np.abs(down), np.abs(right)
    tangent = np.tan(np.pi / 8)
    along_row = steep < tangent * flat
    along_column = steep * tangent > flat
    falling = np.sign(down) * np.sign(right) >= 0
    diagonal = np.where(
        falling,
        (size > beside(-1, -1)) & (size > beside(1, 1)),
        (size > beside(-1, 1)) & (size > beside(1, -1)),
    )
    return np.where(
        along_row,
        (size > beside(0, -1)) & (size >= beside(0, 1)),
        np.where(along_column, (size > beside(-1, 0)) & (size >= beside(1, 0)), diagonal),
    )
