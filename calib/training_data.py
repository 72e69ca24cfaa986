"""The data of a run: a real dataset and, where wanted, a mixed one that fits it."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from calib.config import MixedConfig, TrainConfig
from data.dataset import MixedDataset
from data.errors import InputError
from data.fingerprint import file_digest, fingerprint
from data.real import load_real
from data.splits import SPLITS, ImageSplit, RealDataset, shared_images

MEMORY_LIMIT = 8 * 2**30  # bytes of decoded images of one split
AT_ONCE = 1024  # images that are decoded to be compared


@dataclass(frozen=True)
class TrainingData:
    """Opened data; the training images are decoded once for all seeds."""

    real: RealDataset
    mixed: MixedDataset | None
    weights: str | None = None  # digest of the pretrained weights that the network begins with

    @property
    def num_classes(self) -> int:
        return len(self.real.class_names)

    @cached_property
    def train_images(self) -> Tensor:
        """uint8 [N, S, S, 3]."""
        return decode(self.real.train)

    @cached_property
    def train_targets(self) -> Tensor:
        """int64 [N]."""
        return torch.from_numpy(self.real.train.targets)

    @cached_property
    def record(self) -> dict[str, Any]:
        """What `data.json` holds: names and digests of all that was read."""
        digests = {split: getattr(self.real, split).digest for split in SPLITS}
        names = list(self.real.class_names)
        exclude = self.mixed.exclude if self.mixed else None
        mixed = self.mixed and {
            "url": self.mixed.url,
            "index": self.mixed.index_name,
            "digest": self.mixed.digest,
            "labels": self.mixed.label_digest,
            "exclude": exclude and exclude.model_dump(mode="json", exclude_defaults=True),
            "series": self.mixed.series_digest,
        }
        real = fingerprint({"class_names": names, **digests})
        record = {"real": real, "class_names": names, "mixed": mixed}
        return record if self.weights is None else {**record, "weights": self.weights}


def open_data(
    config: TrainConfig,
    *,
    pinned: str | None = None,
    weights: str | None = None,
    compare_splits: bool = True,
) -> TrainingData:
    """Open what the settings name.

    Args:
        pinned: mixed index to take where the settings name none.
        weights: digest of the pretrained weights, where it is known; else the file is read.
        compare_splits: look for images that two splits share, which decodes all of them:
            those for training once for good, the others once more than they are used.
    Raises:
        InputError: what `load_real`, `MixedDataset` and `refuse_overlap` refuse; mixed images
            of another size, of other classes, without one of them, or with labels that are none.
    """
    real = load_real(config.real)
    mixed = None if config.mixed is None else _open_mixed(config.mixed, real, pinned)
    path = config.model.params.get("weights")
    if path is not None and weights is None:
        weights = file_digest(Path(path))
    data = TrainingData(real, mixed, weights)
    if compare_splits:
        refuse_overlap(data, allowed=config.real.allow_overlap)
    return data


def refuse_overlap(data: TrainingData, *, allowed: int = 0) -> None:
    """Raises InputError if more images of validation and test are in an earlier split as well."""
    parts = {split: _parts(getattr(data.real, split)) for split in SPLITS[1:]}
    shared = shared_images({"train": [data.train_images.numpy()], **parts})
    if len(shared) > allowed:
        names = [f"{split} {getattr(data.real, split).name(index)}" for split, index in shared[0]]
        found = f"{len(shared)} images of validation or test are in an earlier split as well"
        remedy = f"{found}, first {names[0]}, which is {names[1]}"
        raise InputError("real.allow_overlap", allowed, f"{remedy}; remove them, or allow them")


def _parts(split: ImageSplit) -> Iterator[np.ndarray]:
    for start in range(0, len(split), AT_ONCE):
        yield split.images(range(start, min(start + AT_ONCE, len(split))))


def decode(split: ImageSplit) -> Tensor:
    """All images of a split, uint8 [N, S, S, 3]. Raises InputError if they do not fit."""
    total = split.images([0]).nbytes * len(split)
    if total > MEMORY_LIMIT:
        remedy = f"the limit is {MEMORY_LIMIT >> 30} GiB; choose a smaller real.image_size"
        raise InputError("real images", f"{total >> 30} GiB", remedy)
    return torch.from_numpy(split.images())


def _open_mixed(config: MixedConfig, real: RealDataset, pinned: str | None) -> MixedDataset:
    side = real.train.images([0]).shape[1]
    mixed = _read_mixed(config, pinned, side)
    if mixed.class_names != real.class_names:
        theirs, ours = (", ".join(names) for names in (mixed.class_names, real.class_names))
        remedy = f"its classes are {theirs}; the real data's are {ours}"
        raise InputError("mixed.url", config.url, remedy)
    if config.class_matched:
        try:
            mixed.refuse_missing(torch.from_numpy(real.train.targets))
        except InputError as error:
            raise _as_setting(error) from None
    return mixed


def _read_mixed(config: MixedConfig, pinned: str | None, side: int) -> MixedDataset:
    try:
        return MixedDataset(
            config.url,
            index=config.index or pinned,
            scale=config.scale,
            labels=config.labels,
            exclude=config.exclude,
            side=side,
            memory_limit=int(config.memory_gib * 2**30),
            cache_limit=int(config.cache_gib * 2**30),
        )
    except InputError as error:
        raise _as_setting(error) from None
    except ValueError as error:  # a shard or its labels are damaged; names it
        raise InputError("mixed.url", config.url, str(error)) from None


def _as_setting(error: InputError) -> InputError:
    """The same, of an argument of the mixed dataset, under the name of the setting."""
    known = error.field.partition(".")[0] in MixedConfig.model_fields
    return InputError(f"mixed.{error.field}" if known else error.field, error.value, error.remedy)
