"""Common corruptions of images (Hendrycks and Dietterich 2019), made on the fly."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from semix.calib.corruptions.digital import (
    brightness,
    contrast,
    elastic_transform,
    jpeg_compression,
    pixelate,
)
from semix.calib.corruptions.noise_blur import (
    defocus_blur,
    gaussian_blur,
    gaussian_noise,
    glass_blur,
    impulse_noise,
    motion_blur,
    saturate,
    shot_noise,
    speckle_noise,
    zoom_blur,
)
from semix.calib.corruptions.pixels import Pixels, to_bytes
from semix.calib.corruptions.severities import published_constants
from semix.calib.corruptions.weather import fog, frost, snow, spatter
from semix.data.errors import InputError
from semix.data.fingerprint import derived_seed

CORRUPTIONS: dict[str, Callable[[Pixels, Any, Sequence[np.random.Generator]], Pixels]] = {
    "gaussian_noise": gaussian_noise,
    "shot_noise": shot_noise,
    "impulse_noise": impulse_noise,
    "defocus_blur": defocus_blur,
    "glass_blur": glass_blur,
    "motion_blur": motion_blur,
    "zoom_blur": zoom_blur,
    "snow": snow,
    "frost": frost,
    "fog": fog,
    "brightness": brightness,
    "contrast": contrast,
    "elastic_transform": elastic_transform,
    "pixelate": pixelate,
    "jpeg_compression": jpeg_compression,
    "speckle_noise": speckle_noise,
    "gaussian_blur": gaussian_blur,
    "spatter": spatter,
    "saturate": saturate,
}
STANDARD, EXTRA = tuple(CORRUPTIONS)[:15], tuple(CORRUPTIONS)[15:]
SEVERITIES = (1, 2, 3, 4, 5)
MIN_SIDE = 16  # pixels; the kernels need some room
STACK_VALUES = 2**20  # per stack of images, so that a stack stays in the CPU cache


def corrupt(
    images: np.ndarray, name: str, severity: int, *, seed: int, first: int = 0
) -> np.ndarray:
    """Corrupt images as the public benchmark does.

    Random choices for an image depend on seed, name, severity and the image's index alone, so
    that any division into stacks gives the same pixels.

    Args:
        images: uint8 [N, S, S, 3], S of 16 at least.
        name: one of `STANDARD` or `EXTRA`.
        severity: 1, hardly visible, to 5; its constants depend on S, see `severities`.
        first: index of the first image in its dataset.
    Returns:
        uint8 [N, S, S, 3].
    Raises:
        InputError: an unknown name or severity, or images that are too small.
        ValueError: the images are not square RGB images of uint8.

    Source: Hendrycks and Dietterich, "Benchmarking Neural Network Robustness to Common
    Corruptions and Perturbations", ICLR 2019, with the constants of the authors' scripts. Our
    frost is drawn, not photographed, so its results are not comparable with published ones.
    """
    _check(images, name, severity)
    corruption = CORRUPTIONS[name]
    parameters = published_constants(name, severity, size=images.shape[1])
    corrupted = np.empty_like(images)
    stack = max(1, STACK_VALUES // images[:1].size) if len(images) else 1
    for start in range(0, len(images), stack):
        originals = images[start : start + stack]
        indices = range(first + start, first + start + len(originals))
        generators = [
            np.random.default_rng(derived_seed("corruption", seed, name, severity, index))
            for index in indices
        ]
        scaled = originals.astype(np.float32) / 255
        corrupted[start : start + stack] = to_bytes(corruption(scaled, parameters, generators))
    return corrupted


def _check(images: np.ndarray, name: str, severity: int) -> None:
    if name not in CORRUPTIONS:
        raise InputError("corruption", name, f"choose one of {', '.join(CORRUPTIONS)}")
    if severity not in SEVERITIES:
        raise InputError("severity", severity, "choose 1, 2, 3, 4 or 5")
    shape = images.shape
    if images.dtype != np.uint8 or len(shape) != 4 or shape[1] != shape[2] or shape[3] != 3:
        raise ValueError(f"images are {images.dtype} {list(shape)}: give uint8 [N, S, S, 3]")
    if shape[1] < MIN_SIDE:
        raise InputError("image_size", shape[1], f"corruptions need at least {MIN_SIDE} pixels")
