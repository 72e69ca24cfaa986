"""Real datasets by name, with the digits that are bundled with scikit-learn."""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from PIL import Image

from semix.data.errors import InputError
from semix.data.huggingface_data import hub_names, load_hub_dataset
from semix.data.imagefolder import find_classes, load_imagefolder
from semix.data.splits import (
    ImageSplit,
    RealDataConfig,
    RealDataset,
    stratified_split,
)
from semix.data.torchvision_data import benchmark_names, benchmark_of, load_benchmark

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
PER_CLASS = 30  # so few that plain cross-entropy is visibly overconfident
RAREST = 174  # number of images of the rarest class, "eight"


def load_real(
    config: RealDataConfig, *, heartbeat: Callable[[], None] = lambda: None
) -> RealDataset:
    """Open a real dataset.

    Args:
        heartbeat: called after each image that is decoded now, as `skip_bad` makes it decode all.
    Raises:
        InputError: no such folder or dataset, fewer than two classes, a class without training
            images, or with fewer test images than requested; more images that cannot be decoded
            than `skip_bad`, if that is set.
    """
    if config.name == "digits":
        dataset = load_digits(config)
    elif config.name == "torchvision":
        dataset = load_benchmark(config)
    elif config.name == "huggingface":
        dataset = load_hub_dataset(config)
    else:
        dataset = load_imagefolder(config, heartbeat=heartbeat)
    if config.test_per_class is not None:
        test = _test_split(dataset, config.test_per_class, seed=config.split_seed)
        dataset = replace(dataset, test=test)
    if config.set_aside_per_class is not None:
        dataset = _set_aside(dataset, config.set_aside_per_class, seed=config.split_seed)
    return dataset


def _set_aside(real: RealDataset, per_class: int, *, seed: int) -> RealDataset:
    """Move `per_class` training images of each class to `set_aside`."""
    targets = real.train.targets
    counts = np.bincount(targets, minlength=len(real.class_names))
    if counts.min() <= per_class:
        rarest, fewest = real.class_names[int(counts.argmin())], int(counts.min())
        remedy = f"class {rarest!r} has {fewest} training images; choose fewer than {fewest}"
        raise InputError("real.set_aside_per_class", per_class, remedy)
    moved, _, kept = stratified_split(targets, (per_class, 0), seed=seed)
    return replace(real, train=real.train.subset(kept), set_aside=real.train.subset(moved))


def _test_split(real: RealDataset, per_class: int, *, seed: int) -> ImageSplit:
    """`per_class` test images of each class; larger splits include the images of smaller ones."""
    counts = np.bincount(real.test.targets, minlength=len(real.class_names))
    rarest, fewest = real.class_names[int(counts.argmin())], int(counts.min())
    if fewest < per_class:
        remedy = f"class {rarest!r} has {fewest} test images; choose at most {fewest}"
        raise InputError("real.test_per_class", per_class, remedy)
    indices, _, _ = stratified_split(real.test.targets, (per_class, 0), seed=seed)
    return real.test.subset(indices)


def class_names(config: RealDataConfig) -> tuple[str, ...]:
    """The names of the classes in order."""
    if config.name == "digits":
        return DIGITS
    if config.name == "torchvision":
        return benchmark_names(config)
    if config.name == "huggingface":
        return hub_names(config)
    return find_classes(config)


def may_be_mirrored(config: RealDataConfig) -> bool:
    """Whether a mirrored image still shows its class, as far as that is known."""
    if config.name == "torchvision":
        return benchmark_of(config).mirrored
    return config.name != "digits"


def load_digits(config: RealDataConfig) -> RealDataset:
    """The digits as RGB images of `config.image_size`; white strokes on black."""
    if config.path is not None:
        raise InputError("real.path", config.path, "digits come with the program; leave it out")
    train = config.train_per_class or PER_CLASS
    validation = config.validation_per_class or PER_CLASS
    if train + validation >= RAREST:
        remedy = f"with {validation} for validation, stay below {RAREST}"
        raise InputError("real.train_per_class", train, remedy)
    images, targets = _read_digits(config.image_size)
    splits = stratified_split(targets, (train, validation), seed=config.split_seed)
    return RealDataset(DIGITS, *(_digit_split(images[rows], targets[rows]) for rows in splits))


def _read_digits(size: int) -> tuple[np.ndarray, np.ndarray]:
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


def _digit_split(images: np.ndarray, targets: np.ndarray) -> ImageSplit:
    return ImageSplit(targets, images.__getitem__, partial(_content, images))


def _content(images: np.ndarray, heartbeat: Callable[[], None]) -> str:
    return hashlib.sha256(images.tobytes()).hexdigest()
