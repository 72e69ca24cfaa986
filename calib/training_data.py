"""The data of a run: a real dataset and, where wanted, a mixed one that fits it."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from calib.config import MixedConfig, TrainConfig
from data.errors import InputError
from data.fingerprint import fingerprint
from data.mixed import MixedDataset
from data.real import SPLITS, ImageSplit, RealDataset, load_real

MEMORY_LIMIT = 8 * 2**30  # bytes of decoded images of one split


@dataclass(frozen=True)
class TrainingData:
    """Opened data; the training images are decoded once for all seeds."""

    real: RealDataset
    mixed: MixedDataset | None

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
        return {"real": real, "class_names": names, "mixed": mixed}


def open_data(config: TrainConfig, *, pinned: str | None = None) -> TrainingData:
    """Open what the settings name.

    Args:
        pinned: mixed index to take where the settings name none.
    Raises:
        InputError: what `load_real` and `MixedDataset` refuse; mixed images of another size.
    """
    real = load_real(config.real)
    mixed = None if config.mixed is None else _open_mixed(config.mixed, real, pinned)
    return TrainingData(real, mixed)


def decode(split: ImageSplit) -> Tensor:
    """All images of a split, uint8 [N, S, S, 3]. Raises InputError if they do not fit."""
    total = split.images([0]).nbytes * len(split)
    if total > MEMORY_LIMIT:
        remedy = f"the limit is {MEMORY_LIMIT >> 30} GiB; choose a smaller real.image_size"
        raise InputError("real images", f"{total >> 30} GiB", remedy)
    return torch.from_numpy(split.images())


def _open_mixed(config: MixedConfig, real: RealDataset, pinned: str | None) -> MixedDataset:
    mixed = MixedDataset(
        config.url,
        index=config.index or pinned,
        scale=config.scale,
        labels=config.labels,
        exclude=config.exclude,
        memory_limit=int(config.memory_gib * 2**30),
        cache_limit=int(config.cache_gib * 2**30),
    )
    found, wanted = tuple(mixed.images.shape[2:]), real.train.images([0]).shape[1:]
    if found != wanted:
        size = f"its images are {found[0]}x{found[1]} pixels, the real ones {wanted[0]}x{wanted[1]}"
        remedy = f"{size}; build it with shards.store_size {wanted[0]} or set real.image_size"
        raise InputError("mixed.url", config.url, remedy)
    return mixed
