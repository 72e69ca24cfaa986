"""Real handwriting that comes with scikit-learn: 1,797 digits, 8x8 pixels (UCI, 1998)."""

import hashlib
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from PIL import Image

from data.errors import InputError
from data.real import ImageSplit, RealDataConfig, RealDataset
from data.splits import stratified_split

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
PER_CLASS = 30  # few enough that plain cross-entropy is visibly overconfident
FEWEST = 174  # images of the rarest class, "eight"


def load_digits(config: RealDataConfig) -> RealDataset:
    """The digits as RGB images of `config.image_size`; white strokes on black."""
    if config.path is not None:
        raise InputError("real.path", config.path, "digits come with the program; leave it out")
    train = config.train_per_class or PER_CLASS
    validation = config.validation_per_class or PER_CLASS
    if train + validation >= FEWEST:
        raise InputError(
            "real.train_per_class", train, f"with {validation} for validation, stay below {FEWEST}"
        )
    images, targets = _read(config.image_size)
    parts = stratified_split(targets, (train, validation), seed=config.split_seed)
    return RealDataset(NAMES, *(_split(images[part], targets[part]) for part in parts))


def _read(size: int) -> tuple[np.ndarray, np.ndarray]:
    # As sklearn.datasets.load_digits reads it, without the seconds that importing sklearn takes.
    table = np.loadtxt(_bundled(), delimiter=",")  # [N, 64 + 1], of 0 to 16, and the digit
    small = np.round(table[:, :-1].reshape(-1, 8, 8) * 255 / 16).astype(np.uint8)
    large = [
        np.asarray(Image.fromarray(image).resize((size, size), Image.Resampling.BICUBIC))
        for image in small
    ]
    return np.repeat(np.stack(large)[..., None], 3, axis=-1), table[:, -1].astype(np.int64)


def _bundled() -> Path:
    package = find_spec("sklearn")
    assert package is not None and package.origin is not None, "a requirement of semix"
    return Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"


def _split(images: np.ndarray, targets: np.ndarray) -> ImageSplit:
    return ImageSplit(
        targets,
        load=lambda indices: images[indices],
        content=lambda: hashlib.sha256(images.tobytes()).hexdigest(),
    )
