"""Real datasets by name, each split into train, validation and test."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
from pydantic import Field

from data.fingerprint import fingerprint
from data.settings import Settings

Indices = Sequence[int] | np.ndarray
SPLITS = ("train", "validation", "test")


class RealDataConfig(Settings):
    """Which labelled pictures are the real data, and how they are split."""

    name: Literal["digits", "imagefolder"] = Field(
        description="digits: handwriting bundled with scikit-learn; imagefolder: your pictures"
    )
    path: str | None = Field(
        None, description="imagefolder only: the folder that holds CLASS/ or train/CLASS/"
    )
    image_size: int = Field(32, ge=8, description="side of the square images, pixels")
    train_per_class: int | None = Field(
        None, ge=1, description="training images a class; none: 30 for digits, all for imagefolder"
    )
    validation_per_class: int | None = Field(
        None, ge=1, description="validation images a class; none: 30 for digits, else one in ten"
    )
    split_seed: int = Field(0, ge=0, description="seed of the stratified split")


@dataclass(frozen=True)
class ImageSplit:
    """Labelled square RGB images.

    Attributes:
        targets: class indices, int64 [N].
    """

    targets: np.ndarray
    load: Callable[[np.ndarray], np.ndarray] = field(repr=False)
    content: Callable[[], str] = field(repr=False)

    def __len__(self) -> int:
        return len(self.targets)

    def images(self, indices: Indices | None = None) -> np.ndarray:
        """uint8 [B, S, S, 3]; all N images without `indices`."""
        chosen = np.arange(len(self)) if indices is None else np.asarray(indices, dtype=np.int64)
        return self.load(chosen)

    @cached_property
    def digest(self) -> str:
        """Digest of images and targets."""
        return fingerprint([self.content(), self.targets.tolist()])


@dataclass(frozen=True)
class RealDataset:
    """The splits of one dataset; class k of every split is `class_names[k]`."""

    class_names: tuple[str, ...]
    train: ImageSplit
    validation: ImageSplit
    test: ImageSplit


def load_real(config: RealDataConfig) -> RealDataset:
    """Open a real dataset.

    Raises:
        InputError: no such folder, fewer than two classes, a class without training images.
    """
    if config.name == "digits":
        from data.digits import load_digits

        return load_digits(config)
    from data.imagefolder import load_imagefolder

    return load_imagefolder(config)


def class_names(config: RealDataConfig) -> tuple[str, ...]:
    """The names in class order, without reading any image."""
    if config.name == "digits":
        from data.digits import NAMES

        return NAMES
    from data.imagefolder import find_classes

    return find_classes(config)
