"""Whether a dataset can teach the stand-ins anything; asked before anything is trained."""

import numpy as np

from data.errors import InputError
from data.real import RealDataset

SMALLEST_SIDE = 16  # pixels
FEWEST_PER_CLASS = 2


def check_suitable(real: RealDataset) -> int:
    """Refuse what the small models cannot be trained on; returns the images' side in pixels.

    Raises:
        InputError: fewer than two classes, a class with fewer than two training images, a side
            below 16 or no multiple of 8.
    """
    classes = len(real.class_names)
    if classes < 2:
        raise InputError("class_names", list(real.class_names), "mixing needs at least two classes")
    counts = np.bincount(real.train.targets, minlength=classes)
    if len(counts) > classes:
        raise InputError("train", f"class {len(counts) - 1}", f"there are {classes} class names")
    scarce = int(counts.argmin())
    if counts[scarce] < FEWEST_PER_CLASS:
        name = real.class_names[scarce]
        remedy = f"class {name!r} needs at least {FEWEST_PER_CLASS} to learn from"
        raise InputError("train", f"{counts[scarce]} images", remedy)
    side = real.train.images([0]).shape[1]
    if side < SMALLEST_SIDE or side % 8:
        remedy = f"choose a multiple of 8, at least {SMALLEST_SIDE}"
        raise InputError("real.image_size", side, remedy)
    return int(side)
