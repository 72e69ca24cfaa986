"""Labelled images in three splits, and their settings."""

import hashlib
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Self

import numpy as np
from pydantic import Field, field_validator, model_validator

from semix.data.errors import InputError
from semix.data.fingerprint import fingerprint
from semix.data.settings import Settings

Indices = Sequence[int] | np.ndarray
SPLITS = ("train", "validation", "test")
ImagePosition = tuple[str, int]  # split, and index in the split


ONLY_OF = {
    "dataset": "torchvision",
    "download": "torchvision",
    "revision": "huggingface",
    "image": "huggingface",
    "label": "huggingface",
    "skip_bad": "imagefolder",
}


def _is_none(value: object) -> bool:
    return value is None


class RealDataConfig(Settings):
    """Which labelled pictures are the real data, and how they are split."""

    name: Literal["digits", "imagefolder", "torchvision", "huggingface"] = Field(
        description="digits: handwriting bundled with scikit-learn; imagefolder: your pictures; "
        "torchvision: a benchmark by its name; huggingface: a dataset for `datasets`"
    )
    path: str | None = Field(
        None,
        description="imagefolder: the folder of CLASS/, or of train/CLASS/ and test/CLASS/; "
        "torchvision: the folder of its files; huggingface: a folder, or OWNER/NAME on the Hub",
    )
    # Where they do not apply they are not stored, so that they change the identity of no other run.
    dataset: str | None = Field(
        None,
        description="torchvision only: name of the class, such as CIFAR100",
        exclude_if=_is_none,
    )
    download: bool = Field(
        False,
        description="torchvision only: download files that are missing",
        exclude_if=operator.not_,
    )
    revision: str | None = Field(
        None,
        description="huggingface only: the commit of a dataset on the Hub, 40 hex digits",
        exclude_if=_is_none,
    )
    image: str | None = Field(
        None,
        description="huggingface only: the column of images; none: the only one",
        exclude_if=_is_none,
    )
    label: str | None = Field(
        None,
        description="huggingface only: the column of classes, a ClassLabel; none: the only one",
        exclude_if=_is_none,
    )
    image_size: int = Field(32, ge=8, description="side of the square images, pixels")
    train_per_class: int | None = Field(
        None, ge=1, description="training images per class; none: 30 digits, all of imagefolder"
    )
    validation_per_class: int | None = Field(
        None, ge=1, description="validation images per class; none: 30 digits, else one in ten"
    )
    test_per_class: int | None = Field(
        None, ge=1, description="test images per class, always the same ones; none: all"
    )
    set_aside_per_class: int | None = Field(
        None,
        ge=1,
        description="of the training images of each class, how many are not trained on, so that "
        "pairs of classes can be chosen by what a classifier says of them",
        exclude_if=_is_none,
    )
    split_seed: int = Field(0, ge=0, description="seed of the stratified splits")
    allow_overlap: int = Field(
        0, ge=0, description="validation and test images that may also be in an earlier split"
    )

    skip_bad: int | float = Field(
        0,
        ge=0,
        description="imagefolder only: how many images that cannot be decoded may be left out, "
        "a count or a fraction below 1",
    )

    @field_validator("skip_bad")
    @classmethod
    def _is_count_or_fraction(cls, value: int | float) -> int | float:
        if isinstance(value, float) and value >= 1:
            raise ValueError("give a whole number, or a fraction below 1")
        return value

    @model_validator(mode="after")
    def _has_no_settings_of_other_kinds(self) -> Self:
        for setting, kind in ONLY_OF.items():
            if getattr(self, setting) and self.name != kind:
                raise ValueError(f"`name: {self.name}` has no `{setting}`; leave it out")
        return self

    @property
    def folder(self) -> str | None:
        """The folder of the user's own pictures; None of other kinds."""
        return self.path if self.name == "imagefolder" else None


@dataclass(frozen=True)
class ImageSplit:
    """Labelled square RGB images.

    Attributes:
        targets: class indices, int64 [N].
        name: function from the index of an image to its name in messages.
    """

    targets: np.ndarray
    load: Callable[[np.ndarray], np.ndarray] = field(repr=False)
    content: Callable[[Callable[[], None]], str] = field(repr=False)
    name: Callable[[int], str] = field(default="image {}".format, repr=False)

    def __len__(self) -> int:
        return len(self.targets)

    def images(self, indices: Indices | None = None) -> np.ndarray:
        """The images at these indices, by default all N, uint8 [B, S, S, 3]."""
        rows = np.arange(len(self)) if indices is None else np.asarray(indices, dtype=np.int64)
        return self.load(rows)

    def subset(self, indices: np.ndarray) -> "ImageSplit":
        """A split of the images at these indices, int64 [n]."""
        subset = _Subset(self, indices)
        return ImageSplit(self.targets[indices], subset.load, subset.content, subset.name)

    @property
    def digest(self) -> str:
        """Digest of images and targets."""
        return self.compute_digest()

    def compute_digest(self, heartbeat: Callable[[], None] = lambda: None) -> str:
        """`digest`, computed once from all files; the heartbeat is called after each."""
        if "_digest" not in self.__dict__:
            content = self.content(heartbeat)
            self.__dict__["_digest"] = fingerprint([content, self.targets.tolist()])
        digest: str = self.__dict__["_digest"]
        return digest


@dataclass(frozen=True)
class _Subset:
    """Some images of a split; a class, so that it can be pickled to spawned workers."""

    split: ImageSplit
    indices: np.ndarray

    def load(self, rows: np.ndarray) -> np.ndarray:
        return self.split.load(self.indices[rows])

    def content(self, heartbeat: Callable[[], None]) -> str:
        return fingerprint([self.split.content(heartbeat), self.indices.tolist()])

    def name(self, index: int) -> str:
        return self.split.name(int(self.indices[index]))


@dataclass(frozen=True)
class _Grey:
    """Greyscale images; a class, so that they can be pickled to spawned workers."""

    coloured: ImageSplit

    def load(self, rows: np.ndarray) -> np.ndarray:
        pixels = self.coloured.load(rows).astype(np.uint32)
        luma = (pixels @ LUMA + 0x8000) >> 16  # [B, S, S], as Pillow rounds
        return np.repeat(luma.astype(np.uint8)[..., None], 3, axis=-1)

    def content(self, heartbeat: Callable[[], None]) -> str:
        return fingerprint(["grey", self.coloured.content(heartbeat)])


LUMA = np.array([19595, 38470, 7471], dtype=np.uint32)  # ITU-R 601, in units of 1 / 65,536


def in_grey(split: ImageSplit) -> ImageSplit:
    """The same images with their luma in all three channels."""
    grey = _Grey(split)
    return ImageSplit(split.targets, grey.load, grey.content, split.name)


@dataclass(frozen=True)
class RealDataset:
    """The splits of one dataset; class k of every split is `class_names[k]`.

    Attributes:
        set_aside: images that would be training images; None if none were set aside.
    Raises:
        InputError: a target that is not a class.
    """

    class_names: tuple[str, ...]
    train: ImageSplit
    validation: ImageSplit
    test: ImageSplit
    set_aside: ImageSplit | None = None

    def __post_init__(self) -> None:
        for name in SPLITS:
            _check_targets(name, getattr(self, name), classes=len(self.class_names))


def _check_targets(name: str, split: ImageSplit, *, classes: int) -> None:
    invalid = np.flatnonzero((split.targets < 0) | (split.targets >= classes))
    if invalid.size:
        first = int(invalid[0])
        remedy = f"of {split.name(first)}; the {classes} classes are 0 to {classes - 1}"
        raise InputError(f"{name} target", int(split.targets[first]), remedy)


def official_splits(
    class_names: tuple[str, ...], train: ImageSplit, test: ImageSplit, *, config: RealDataConfig
) -> RealDataset:
    """A dataset with its own test images; validation images are drawn from those to train on.

    Raises:
        InputError: fewer than two classes, or one without images in a split; a target that is not
            a class.
    """
    if len(class_names) < 2:
        raise InputError("real", config.path, f"has {len(class_names)} class; give at least 2")
    for name, split in (("train", train), ("test", test)):
        _check_targets(name, split, classes=len(class_names))
        counts = np.bincount(split.targets, minlength=len(class_names))
        if not counts.all():
            empty = class_names[int(counts.argmin())]
            raise InputError("real", config.path, f"class {empty!r} has no {name} images")
    training, validation = draw_validation(train.targets, config)
    if np.unique(train.targets[training]).size < len(class_names):
        remedy = "leaves a class without training images; lower it"
        raise InputError("real.validation_per_class", config.validation_per_class, remedy)
    return RealDataset(class_names, train.subset(training), train.subset(validation), test)


def draw_validation(
    targets: np.ndarray, config: RealDataConfig, *, none: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Indices of training and validation images, each sorted.

    Args:
        targets: of the official training images, int64 [N].
        none: draw no validation images, because there are official ones.
    """
    rarest = int(np.bincount(targets).min())
    size = 0 if none else config.validation_per_class or max(1, rarest // 10)
    count = config.train_per_class or len(targets)
    # Validation images are drawn first, so that a smaller training set has the same ones.
    validation, training, _ = stratified_split(targets, (size, count), seed=config.split_seed)
    return training, validation


def stratified_split(
    targets: np.ndarray, sizes: tuple[int | None, int | None], *, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Indices of train, validation and test, each sorted.

    Args:
        targets: int64 [N].
        sizes: training and validation images per class; None takes eight and one in ten.
    """
    splits: tuple[list, list, list] = ([], [], [])
    for target in np.unique(targets):
        # One generator per class: adding a class does not change the split of the others.
        order = np.random.default_rng([seed, int(target)]).permutation(
            np.flatnonzero(targets == target)
        )
        train, validation = split_sizes(len(order), sizes)
        class_indices = np.split(order, [train, train + validation])
        for split, indices in zip(splits, class_indices, strict=True):
            split.append(indices)
    train_split, validation_split, test_split = (np.sort(np.concatenate(s)) for s in splits)
    return train_split, validation_split, test_split


def split_sizes(count: int, sizes: tuple[int | None, int | None]) -> tuple[int, int]:
    """Training and validation images of a class of `count`; None is as in `stratified_split`."""
    train = max(1, count * 8 // 10) if sizes[0] is None else sizes[0]
    validation = max(1, count // 10) if sizes[1] is None else sizes[1]
    return train, validation


def shared_images(
    splits: Mapping[str, Iterable[np.ndarray]],
) -> list[tuple[ImagePosition, ImagePosition]]:
    """Positions of images that are also in an earlier split, each with its position there.

    Only a digest of 16 bytes per image is kept in memory, so a split is passed in batches.

    Args:
        splits: batches of each split by its name, uint8 [n, S, S, 3], in order.
    """
    shared: list[tuple[ImagePosition, ImagePosition]] = []
    earlier: dict[bytes, ImagePosition] = {}
    for split, batches in splits.items():
        this_split: dict[bytes, ImagePosition] = {}
        images = (image for batch in batches for image in batch)
        for index, image in enumerate(images):
            digest = hashlib.blake2b(image.tobytes(), digest_size=16).digest()
            if digest in earlier:
                shared.append(((split, index), earlier[digest]))
            this_split.setdefault(digest, (split, index))
        earlier = this_split | earlier
    return shared
