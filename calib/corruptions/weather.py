"""Weather: snow, frost, fog; and drops on the lens."""

import numpy as np
from scipy import ndimage

from semix.calib.corruptions.noise_blur import Generators
from semix.calib.corruptions.pixels import (
    ROUNDING,
    Pixels,
    blur_along_line,
    draw,
    enlarge,
    grey,
    plasma,
    round_to_bytes,
    smooth,
    to_bytes,
)

Snow = tuple[float, float, float, float, int, float, float]
# Of five photographs of frosted windows: mean colour relative to the mean brightness, and ranges of
# brightness and contrast.
ICE = np.array([0.89, 1.02, 1.09], dtype=np.float32)
BRIGHTNESS, CONTRAST = (0.45, 0.8), (0.08, 0.17)


def snow(images: Pixels, parameters: Snow, generators: Generators) -> Pixels:
    """A layer of falling flakes over a whitened image.

    The layer is added once as it is and once turned by 180 degrees.
    """
    mean, deviation, zoom, threshold, radius, sigma, image_share = parameters
    shape = (*images.shape[1:3], 1)
    flakes = draw(generators, lambda rng: rng.normal(mean, deviation, shape))
    degrees = draw(generators, lambda rng: rng.uniform(-135, -45, ()))
    flakes = enlarge(flakes, zoom)
    flakes = to_bytes(np.where(flakes < threshold, 0, flakes)) / np.float32(255)
    flakes = round_to_bytes(blur_along_line(flakes, radius=radius, sigma=sigma, degrees=degrees))
    white = np.maximum(images, 1.5 * grey(images) + 0.5)
    whiter = image_share * images + (1 - image_share) * white
    snowy: Pixels = whiter + flakes + flakes[:, ::-1, ::-1]
    return snowy


def frost(images: Pixels, parameters: tuple[float, float], generators: Generators) -> Pixels:
    """Ice over the image.

    The benchmark uses crops of photographs of frosted windows. This ice is drawn: needles in three
    directions on an uneven background, with the photographs' mean colour, brightness and contrast.
    """
    image_weight, ice_weight = parameters
    size = images.shape[1]
    background = plasma(size, 1.6, generators)
    crystals = _standardised(_standardised(background) + _standardised(_needles(size, generators)))
    brightness = draw(generators, lambda rng: rng.uniform(*BRIGHTNESS, (1, 1, 1)))
    contrast = draw(generators, lambda rng: rng.uniform(*CONTRAST, (1, 1, 1)))
    ice = np.clip(ICE * (brightness + contrast * crystals), 0, 1)
    frosted: Pixels = image_weight * images + ice_weight * ice
    return frosted


def _needles(size: int, generators: Generators) -> Pixels:
    """The strongest streak of three directions at each pixel, [N, S, S, 1]."""
    length = max(2, size // 16)
    margin = 2 * length  # so that streaks from outside the image reach into it
    shape = (size + 2 * margin, size + 2 * margin, 1)
    noise = draw(generators, lambda rng: rng.standard_normal(shape, dtype=np.float32))
    degrees = draw(generators, lambda rng: rng.uniform(0, 360, ()))
    directions = [
        blur_along_line(noise, radius=length, sigma=length, degrees=degrees + turn)
        for turn in (0, 120, 240)
    ]
    inside = slice(margin, margin + size)
    strongest: Pixels = np.max(directions, axis=0)[:, inside, inside]
    return strongest


def _standardised(fields: Pixels) -> Pixels:
    axes = (1, 2, 3)
    # float64, so that rounding does not depend on how many images are summed at a time.
    mean = fields.mean(axis=axes, keepdims=True, dtype=np.float64)
    deviation = fields.std(axis=axes, keepdims=True, dtype=np.float64)
    return ((fields - mean) / deviation).astype(np.float32)


def fog(images: Pixels, parameters: tuple[float, float], generators: Generators) -> Pixels:
    """Plasma added to the image.

    All values are then scaled so that the brightest possible one is the image's old maximum.
    """
    thickness, decay = parameters
    brightest = images.max(axis=(1, 2, 3), keepdims=True)
    foggy = images + thickness * plasma(images.shape[1], decay, generators)
    return foggy * brightest / (brightest + thickness)


Spatter = tuple[float, float, float, float, float, bool]
WATER = np.array([175, 238, 238], dtype=np.float32) / 255
MUD = np.array([63, 42, 20], dtype=np.float32) / 255
MAX_DISTANCE = 20  # pixels from a rim, beyond which a drop is uniform
RELIEF = np.array([[-2, -1, 0], [-1, 1, 1], [0, 1, 2]])
WEAK, STRONG = 50, 150  # thresholds of the rims, on Sobel's gradient of levels
SOBEL = np.array([[-1, -2, -1], [0, 0, 0], [1, 2, 1]])
DIAGONAL, KNIGHT = 1.4, 2.1969  # lengths of steps that are not along an axis
BLOCK = np.ones((1, 3, 3))


def spatter(images: Pixels, parameters: Spatter, generators: Generators) -> Pixels:
    """Drops where smooth noise exceeds a threshold: of shining water, or of mud."""
    mean, deviation, sigma, threshold, strength, is_mud = parameters
    shape = images.shape[1:3]
    liquid = smooth(draw(generators, lambda rng: rng.normal(mean, deviation, shape)), sigma)
    liquid[liquid < threshold] = 0
    if not is_mud:
        return images + strength * _shine(liquid)[..., None] * WATER
    cover = smooth((liquid > threshold).astype(np.float32), strength)
    cover[cover < 0.8] = 0
    return images + cover[..., None] * (MUD - images)


def _shine(liquid: Pixels) -> Pixels:
    """The glint of each drop.

    It is brightest where the distance to the rim changes fast and where the liquid is thick.
    """
    levels = np.minimum(255 * liquid, 255).astype(np.uint8)
    distance = np.minimum(np.stack([_distance(rim) for rim in _rims(levels)]), MAX_DISTANCE)
    rounded = np.floor(_box(distance) + ROUNDING).astype(int)
    equalised = np.stack([_equalised(distances) for distances in rounded])
    relief = ndimage.correlate(equalised.astype(np.int32), RELIEF[None], mode="mirror")
    shine = levels * np.rint(_box(np.clip(relief, 0, 255)))
    maximum = shine.max(axis=(1, 2), keepdims=True)
    return np.divide(shine, maximum, out=np.zeros_like(shine), where=maximum > 0).astype(np.float32)


def _box(values: np.ndarray) -> np.ndarray:
    means: np.ndarray = ndimage.correlate(values.astype(np.float64), BLOCK / 9, mode="mirror")
    return means


def _distance(rim: np.ndarray) -> np.ndarray:
    """OpenCV's approximate Euclidean distance (5 x 5 chamfer) to the nearest rim.

    It is the length of a path of steps along the axes, of length 1, of steps along the diagonals,
    and of a chess knight's moves.
    """
    if not rim.any():
        return np.full(rim.shape, float(MAX_DISTANCE))
    nearest = ndimage.distance_transform_edt(~rim, return_distances=False, return_indices=True)
    away = np.abs(nearest - np.indices(rim.shape))
    far, near = away.max(axis=0), away.min(axis=0)
    return np.where(
        far >= 2 * near,
        far - 2 * near + KNIGHT * near,
        KNIGHT * (far - near) + DIAGONAL * (2 * near - far),
    )


def _equalised(levels: np.ndarray) -> np.ndarray:
    """The image with its histogram equalised to 0 .. 255, so that the lowest level becomes 0.

    An image of one level is unchanged.
    """
    counts = np.bincount(levels.ravel(), minlength=256)
    cumulative = counts.cumsum() - counts[levels.min()]
    if not cumulative[-1]:
        return levels
    return np.rint(cumulative * (255 / cumulative[-1]))[levels]


def _rims(levels: np.ndarray) -> np.ndarray:
    """Canny's edges of uint8 [N, S, S], with |dx| + |dy| for the gradient."""
    padded = np.pad(levels.astype(np.int32), ((0, 0), (1, 1), (1, 1)), mode="edge")
    kernels = SOBEL[None], SOBEL.T[None]
    down, right = (ndimage.correlate(padded, kernel)[:, 1:-1, 1:-1] for kernel in kernels)
    magnitude = np.abs(down) + np.abs(right)
    ridges = (magnitude > WEAK) & _is_ridge(magnitude, down, right)
    labels, _ = ndimage.label(
        ridges, structure=np.stack([np.zeros((3, 3)), *BLOCK, np.zeros((3, 3))])
    )
    strong = np.unique(labels[ridges & (magnitude > STRONG)])
    edges: np.ndarray = ridges & np.isin(labels, strong)
    return edges


def _is_ridge(magnitude: np.ndarray, down: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Where the gradient is largest along its direction, rounded to one of four."""
    padded = np.pad(magnitude, ((0, 0), (1, 1), (1, 1)))

    def neighbour(row: int, column: int) -> np.ndarray:
        rows, columns = padded.shape[1:]
        return padded[:, 1 + row : rows - 1 + row, 1 + column : columns - 1 + column]

    vertical, horizontal = np.abs(down), np.abs(right)
    tangent = np.tan(np.pi / 8)
    along_row = vertical < tangent * horizontal
    along_column = vertical * tangent > horizontal
    on_main_diagonal = np.sign(down) * np.sign(right) >= 0
    diagonal = np.where(
        on_main_diagonal,
        (magnitude > neighbour(-1, -1)) & (magnitude > neighbour(1, 1)),
        (magnitude > neighbour(-1, 1)) & (magnitude > neighbour(1, -1)),
    )
    return np.where(
        along_row,
        (magnitude > neighbour(0, -1)) & (magnitude >= neighbour(0, 1)),
        np.where(
            along_column, (magnitude > neighbour(-1, 0)) & (magnitude >= neighbour(1, 0)), diagonal
        ),
    )
