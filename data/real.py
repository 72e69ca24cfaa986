"""Real datasets by name, each split into train, validation and test."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer

from data.errors import InputError
from data.fingerprint import fingerprint
from data.settings import Settings
from data.splits import stratified_split

Indices = Sequence[int] | np.ndarray
SPLITS = ("train", "validation", "test")


class RealDataConfig(Settings):
    """Which labelled pictures are the real data, and how they are split."""

    name: Literal["digits", "imagefolder"] = Field(
        description="digits: handwriting bundled with scikit-learn; imagefolder: your pictures"
    )
    path: str | None = Field(
        None,
        description="imagefolder only: the folder of CLASS/, or of train/CLASS/ and test/CLASS/",
    )
    image_size: int = Field(32, ge=8, description="side of the square images, pixels")
    train_per_class: int | None = Field(
        None, ge=1, description="training images a class; none: 30 for digits, all for imagefolder"
    )
    validation_per_class: int | None = Field(
        None, ge=1, description="validation images a class; none: 30 for digits, else one in ten"
    )
    test_per_class: int | None = Field(
        None, ge=1, description="test images a class, the same whenever asked for; none: all"
    )
    split_seed: int = Field(0, ge=0, description="seed of the stratified splits")
    allow_overlap: int = Field(
        0, ge=0, description="validation and test images that an earlier split may have as well"
    )

    skip_bad: int | float = Field(
        0,
        ge=0,
        description="imagefolder only: how many images may be left out because they cannot be "
        "decoded, a count or a share below 1",
    )

    @field_validator("skip_bad")
    @classmethod
    def _is_count_or_share(cls, value: int | float) -> int | float:
        if isinstance(value, float) and value >= 1:
            raise ValueError("give a whole number, or a share below 1")
        return value

    @model_serializer(mode="wrap")
    def _without_newer_defaults(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Plans from before these settings were there keep their digests."""
        values: dict[str, Any] = handler(self)
        newer = {"test_per_class": None, "allow_overlap": 0, "skip_bad": 0}
        return {k: v for k, v in values.items() if k not in newer or v != newer[k]}


@dataclass(frozen=True)
class ImageSplit:
    """Labelled square RGB images.

    Attributes:
        targets: class indices, int64 [N].
        name: what an image is called in messages, by its index.
    """

    targets: np.ndarray
    load: Callable[[np.ndarray], np.ndarray] = field(repr=False)
    content: Callable[[], str] = field(repr=False)
    name: Callable[[int], str] = field(default="image {}".format, repr=False)

    def __len__(self) -> int:
        return len(self.targets)

    def images(self, indices: Indices | None = None) -> np.ndarray:
        """uint8 [B, S, S, 3]; all N images without `indices`."""
        chosen = np.arange(len(self)) if indices is None else np.asarray(indices, dtype=np.int64)
        return self.load(chosen)

    def part(self, indices: np.ndarray) -> "ImageSplit":
        """Some of the images, int64 [n], as a split."""
        return ImageSplit(
            self.targets[indices],
            load=lambda chosen: self.load(indices[chosen]),
            content=lambda: fingerprint([self.content(), indices.tolist()]),
            name=lambda index: self.name(int(indices[index])),
        )

    @cached_property
    def digest(self) -> str:
        """Digest of images and targets."""
        return fingerprint([self.content(), self.targets.tolist()])


@dataclass(frozen=True)
class RealDataset:
    """The splits of one dataset; class k of every split is `class_names[k]`.

    Raises:
        InputError: a target that is no class.
    """

    class_names: tuple[str, ...]
    train: ImageSplit
    validation: ImageSplit
    test: ImageSplit

    def __post_init__(self) -> None:
        count = len(self.class_names)
        for name in SPLITS:
            split: ImageSplit = getattr(self, name)
            outside = np.flatnonzero((split.targets < 0) | (split.targets >= count))
            if outside.size:
                first = int(outside[0])
                remedy = f"of {split.name(first)}; the {count} classes are 0 to {count - 1}"
                raise InputError(f"{name} target", int(split.targets[first]), remedy)


def load_real(config: RealDataConfig) -> RealDataset:
    """Open a real dataset.

    Raises:
        InputError: no such folder, fewer than two classes, a class without training images, or
            with fewer test images than are asked for; more images that cannot be decoded than
            `skip_bad`, where that is set.
    """
    if config.name == "digits":
        from data.digits import load_digits as load
    else:
        from data.imagefolder import load_imagefolder as load

    found = load(config)
    if config.test_per_class is None:
        return found
    return replace(found, test=_fewer(found, config.test_per_class, seed=config.split_seed))


def _fewer(real: RealDataset, per_class: int, *, seed: int) -> ImageSplit:
    """Equally many test images of each class; more of them contain these."""
    counts = np.bincount(real.test.targets, minlength=len(real.class_names))
    rarest, fewest = real.class_names[int(counts.argmin())], int(counts.min())
    if fewest < per_class:
        remedy = f"class {rarest!r} has {fewest} test images; choose at most {fewest}"
        raise InputError("real.test_per_class", per_class, remedy)
    chosen, _, _ = stratified_split(real.test.targets, (per_class, 0), seed=seed)
    return real.test.part(chosen)


def class_names(config: RealDataConfig) -> tuple[str, ...]:
    """The names in class order, without reading any image."""
    if config.name == "digits":
        from data.digits import NAMES

        return NAMES
    from data.imagefolder import find_classes

    return find_classes(config)
