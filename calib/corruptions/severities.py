"""The published constants of each severity for images of 32, 64 and 224 pixels."""

import math
from typing import Any

# From the authors' scripts for CIFAR-10-C, Tiny-ImageNet-C and ImageNet-C
# (github.com/hendrycks/robustness, ImageNet-C/create_c). Lengths are in pixels, except those of
# elastic_transform, which are fractions of the side; noise and brightness are in [0, 1].
PUBLISHED: dict[str, dict[int, tuple[Any, ...]]] = {
    "gaussian_noise": {  # standard deviation
        32: (0.04, 0.06, 0.08, 0.09, 0.10),
        64: (0.04, 0.08, 0.12, 0.15, 0.18),
        224: (0.08, 0.12, 0.18, 0.26, 0.38),
    },
    "shot_noise": {  # photons at full brightness
        32: (500, 250, 100, 75, 50),
        64: (250, 100, 50, 30, 15),
        224: (60, 25, 12, 5, 3),
    },
    "impulse_noise": {  # fraction of values that become black or white
        32: (0.01, 0.02, 0.03, 0.05, 0.07),
        64: (0.01, 0.02, 0.05, 0.08, 0.14),
        224: (0.03, 0.06, 0.09, 0.17, 0.27),
    },
    "defocus_blur": {  # radius of the disk, deviation that smooths its rim
        32: ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),
        64: ((0.5, 0.6), (1, 0.1), (1.5, 0.1), (2.5, 0.01), (3, 0.1)),
        224: ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),
    },
    "glass_blur": {  # deviation of the blur before and after, reach, rounds
        32: ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),
        64: ((0.1, 1, 1), (0.5, 1, 1), (0.6, 1, 2), (0.7, 2, 1), (0.9, 2, 2)),
        224: ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)),
    },
    "motion_blur": {  # radius, deviation
        32: ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),
        64: ((10, 1), (10, 1.5), (10, 2), (10, 2.5), (12, 3)),
        224: ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)),
    },
    "zoom_blur": {  # end and step of the factors, which begin at 1
        32: ((1.06, 0.01), (1.11, 0.01), (1.16, 0.01), (1.21, 0.01), (1.26, 0.01)),
        64: ((1.06, 0.01), (1.11, 0.01), (1.16, 0.01), (1.21, 0.01), (1.26, 0.01)),
        224: ((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03)),
    },
    # mean, deviation and zoom of the flakes, threshold, radius and deviation of their fall,
    # fraction of the image that is not whitened
    "snow": {
        32: (
            (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
            (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
            (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
            (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
            (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
        ),
        64: (
            (0.1, 0.2, 1, 0.6, 8, 3, 0.8),
            (0.1, 0.2, 1, 0.5, 10, 4, 0.8),
            (0.15, 0.3, 1.75, 0.55, 10, 4, 0.7),
            (0.25, 0.3, 2.25, 0.6, 12, 6, 0.65),
            (0.3, 0.3, 1.25, 0.65, 14, 12, 0.6),
        ),
        224: (
            (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
            (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
            (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
            (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
            (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
        ),
    },
    "frost": {  # weight of the image, of the frost
        32: ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)),
        64: ((1, 0.3), (0.9, 0.4), (0.8, 0.45), (0.75, 0.5), (0.7, 0.55)),
        224: ((1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75)),
    },
    "fog": {  # thickness, decay of detail
        32: ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)),
        64: ((0.4, 3), (0.7, 3), (1, 2.5), (1.5, 2), (2, 1.75)),
        224: ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)),
    },
    "brightness": {  # added to the value of HSV
        32: (0.05, 0.1, 0.15, 0.2, 0.3),
        64: (0.1, 0.2, 0.3, 0.4, 0.5),
        224: (0.1, 0.2, 0.3, 0.4, 0.5),
    },
    "contrast": {  # fraction of the distance to the mean colour that remains
        32: (0.75, 0.5, 0.4, 0.3, 0.15),
        64: (0.4, 0.3, 0.2, 0.1, 0.05),
        224: (0.4, 0.3, 0.2, 0.1, 0.05),
    },
    # size of the local shifts, deviation that smooths them, reach of the affine map; the script
    # for large images writes 244 where it means 224 pixels
    "elastic_transform": {
        32: (
            (0, 0, 0.08),
            (0.05, 0.2, 0.07),
            (0.08, 0.06, 0.06),
            (0.1, 0.04, 0.05),
            (0.1, 0.03, 0.03),
        ),
        64: (
            (0, 0, 0.08),
            (0.05, 0.3, 0.06),
            (0.1, 0.08, 0.06),
            (0.1, 0.03, 0.03),
            (0.16, 0.03, 0.02),
        ),
        224: tuple(
            tuple(244 / 224 * fraction for fraction in fractions)
            for fractions in (
                (2, 0.7, 0.1),
                (2, 0.08, 0.2),
                (0.05, 0.01, 0.02),
                (0.07, 0.01, 0.02),
                (0.12, 0.01, 0.02),
            )
        ),
    },
    "pixelate": {  # fraction of the side that remains
        32: (0.95, 0.9, 0.85, 0.75, 0.65),
        64: (0.9, 0.8, 0.7, 0.6, 0.5),
        224: (0.6, 0.5, 0.4, 0.3, 0.25),
    },
    "jpeg_compression": {  # quality
        32: (80, 65, 58, 50, 40),
        64: (65, 58, 50, 40, 25),
        224: (25, 18, 15, 10, 7),
    },
    "speckle_noise": {  # standard deviation at full brightness
        32: (0.06, 0.1, 0.12, 0.16, 0.2),
        64: (0.15, 0.2, 0.25, 0.3, 0.35),
        224: (0.15, 0.2, 0.35, 0.45, 0.6),
    },
    "gaussian_blur": {  # standard deviation
        32: (0.4, 0.6, 0.7, 0.8, 1),
        64: (0.5, 0.75, 1, 1.25, 1.5),
        224: (1, 2, 3, 4, 6),
    },
    # mean, deviation and smoothing of the liquid, threshold, its strength (water) or the
    # smoothing of its rim (mud), whether it is mud
    "spatter": {
        32: (
            (0.62, 0.1, 0.7, 0.7, 0.5, False),
            (0.65, 0.1, 0.8, 0.7, 0.5, False),
            (0.65, 0.3, 1, 0.69, 0.5, False),
            (0.65, 0.1, 0.7, 0.69, 0.6, True),
            (0.65, 0.1, 0.5, 0.68, 0.6, True),
        ),
        64: (
            (0.62, 0.1, 0.7, 0.7, 0.6, False),
            (0.65, 0.1, 0.8, 0.7, 0.6, False),
            (0.65, 0.3, 1, 0.69, 0.6, False),
            (0.65, 0.1, 0.7, 0.68, 0.6, True),
            (0.65, 0.1, 0.5, 0.67, 0.6, True),
        ),
        224: (
            (0.65, 0.3, 4, 0.69, 0.6, False),
            (0.65, 0.3, 3, 0.68, 0.6, False),
            (0.65, 0.3, 2, 0.68, 0.5, False),
            (0.65, 0.3, 1, 0.65, 1.5, True),
            (0.67, 0.4, 1, 0.65, 1.5, True),
        ),
    },
    "saturate": {  # factor and addition to the saturation of HSV
        32: ((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2)),
        64: ((0.3, 0), (0.1, 0), (2, 0), (5, 0.1), (30, 0.2)),
        224: ((0.3, 0), (0.1, 0), (2, 0), (5, 0.1), (20, 0.2)),
    },
}


def published_constants(name: str, severity: int, *, size: int) -> Any:
    """The constants of a severity, 1 to 5, for images of about `size` pixels.

    They are those for 32, 64 or 224 pixels, whichever is nearest in ratio: 32 up to a size of 45,
    64 up to 119, else 224.
    """
    nearest = min(PUBLISHED[name], key=lambda side: abs(math.log(size / side)))
    return PUBLISHED[name][nearest][severity - 1]
