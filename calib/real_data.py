"""The real and mixed datasets of a run, opened and checked for training."""

from collections.abc import Generator, Iterable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from semix.calib.config import MixedConfig, TrainConfig
from semix.calib.processes import broadcast_from_main
from semix.calib.real_images import (
    DECODE_CHUNK,
    ImageSource,
    InMemoryImages,
    StreamedImages,
    open_images,
    ranges,
)
from semix.calib.run_folder import DataRecord
from semix.data.dataset import MixedDataset
from semix.data.errors import InputError
from semix.data.fingerprint import file_digest, fingerprint
from semix.data.real import load_real
from semix.data.splits import SPLITS, ImageSplit, RealDataset, shared_images

GIB = 2**30
TrainingSplit = Literal["train", "validation"]


@dataclass(frozen=True)
class TrainingData:
    """Opened data, for all seeds of a run.

    Attributes:
        side: pixels of a side of the real images.
        memory: bytes of decoded real images that may be held.
        workers: processes that decode images beyond that limit, as in `StreamedImages`.
        weights: digest of the pretrained weights that the network begins with.
    """

    real: RealDataset
    mixed: MixedDataset | None
    side: int
    memory: int = 8 * GIB
    workers: int | None = None
    weights: str | None = None
    _opened: dict[TrainingSplit, ImageSource] = field(default_factory=dict, repr=False)

    @property
    def num_classes(self) -> int:
        return len(self.real.class_names)

    def images(self, split: TrainingSplit, accelerator: Accelerator | None = None) -> ImageSource:
        """The images of a split; training images take precedence in memory.

        Args:
            accelerator: of the processes that train together; all of them must call.
        """
        if split not in self._opened:
            left = self.memory
            if split != "train":
                images = self.images("train", accelerator)
                left -= images.tensor.nbytes if isinstance(images, InMemoryImages) else 0
            self._opened[split] = open_images(
                getattr(self.real, split),
                self.side,
                limit=left,
                workers=self.workers,
                accelerator=accelerator,
            )
        return self._opened[split]

    def read(self, split: ImageSplit) -> StreamedImages:
        """Images that are read once, so not held in memory."""
        return StreamedImages(split, self.side, workers=self.workers)

    @cached_property
    def train_targets(self) -> Tensor:
        """Classes of the training images, int64 [N]."""
        return torch.from_numpy(self.real.train.targets)

    @cached_property
    def train_pixels(self) -> Tensor:
        """Counts of the values in each channel of the training images, int64 [3, 256]."""
        images = self.images("train")
        with closing(images.parts(ranges(0, len(images), DECODE_CHUNK))) as parts:
            return count_pixels(parts)

    @cached_property
    def record(self) -> DataRecord:
        """The content of `data.json`: names and digests of all data that a run reads."""
        digests = {split: getattr(self.real, split).digest for split in SPLITS}
        names = list(self.real.class_names)
        real = fingerprint({"class_names": names, **digests})
        record: DataRecord = {"real": real, "class_names": names, "mixed": None}
        if self.mixed is not None:
            exclude = self.mixed.exclude
            record["mixed"] = {
                "url": self.mixed.url,
                "index": self.mixed.index_name,
                "digest": self.mixed.digest,
                "labels": self.mixed.label_digest,
                "exclude": (
                    exclude.model_dump(mode="json", exclude_defaults=True) if exclude else None
                ),
                "series": self.mixed.series_digest,
            }
        if self.weights is not None:
            record["weights"] = self.weights
        return record


def open_data(
    config: TrainConfig,
    *,
    pinned: str | None = None,
    weights: str | None = None,
    compare_splits: bool = True,
) -> TrainingData:
    """Open the data that the settings name.

    Args:
        pinned: mixed index to use if the settings name none.
        weights: digest of the pretrained weights, if known; else the file is read.
        compare_splits: search for images that two splits share. This decodes all images; all
            but training images held in memory are decoded again later.
    Raises:
        InputError: as `load_real`, `MixedDataset` and `check_overlap`; mixed images of another
            size, of other classes, without one of the classes, or with invalid labels.
    """
    real = load_real(config.real)
    side = config.real.image_size
    mixed = None if config.mixed is None else _open_mixed(config.mixed, real, pinned, side=side)
    path = config.model.params.get("weights")
    if path is not None and weights is None:
        weights = file_digest(Path(path))
    data = TrainingData(
        real,
        mixed,
        side,
        memory=int(config.real_memory_gib * GIB),
        workers=config.real_workers,
        weights=weights,
    )
    if compare_splits:
        check_overlap(data, allowed=config.real.allow_overlap)
    return data


def prepare(data: TrainingData, accelerator: Accelerator, *, allowed: int = 0) -> None:
    """Compare and count all images once, in the main process, and broadcast the results.

    Raises:
        InputError: as `check_overlap`, in every process.
    """
    data.images("train", accelerator)
    broadcast_from_main(partial(check_overlap, data, allowed=allowed), accelerator)
    for name in ("train_pixels", "record"):
        value = broadcast_from_main(partial(getattr, data, name), accelerator)
        vars(data)[name] = value  # fills the cached property


def check_overlap(data: TrainingData, *, allowed: int = 0) -> None:
    """Raises InputError if more than `allowed` images in all are in an earlier split as well."""
    with ExitStack() as stack:
        parts = {split: stack.enter_context(closing(_parts(data, split))) for split in SPLITS}
        shared = shared_images(parts)
    if len(shared) > allowed:
        names = [f"{split} {getattr(data.real, split).name(index)}" for split, index in shared[0]]
        overlap = f"{len(shared)} images of validation or test are in an earlier split as well"
        remedy = f"{overlap}, first {names[0]}, which is {names[1]}"
        raise InputError("real.allow_overlap", allowed, f"{remedy}; remove them, or allow them")


def _parts(data: TrainingData, split: str) -> Generator[np.ndarray, None, None]:
    """The images of a split, in parts; for training images, also counts their values."""
    training = split == "train"
    images = data.images("train") if training else data.read(getattr(data.real, split))
    pixels = count_pixels(())
    with closing(images.parts(ranges(0, len(images), DECODE_CHUNK))) as parts:
        for part in parts:
            if training:
                pixels += count_pixels([part])
            yield part.numpy()
    if training:
        vars(data)["train_pixels"] = pixels


def count_pixels(parts: Iterable[Tensor]) -> Tensor:
    """Counts of the values in each channel of uint8 [n, S, S, 3], int64 [3, 256]."""
    counts = torch.zeros(3, 256, dtype=torch.int64)
    for images in parts:
        for channel in range(3):
            values = images[..., channel].flatten()
            counts[channel] += torch.bincount(values, minlength=256).cpu()
    return counts


def _open_mixed(
    config: MixedConfig, real: RealDataset, pinned: str | None, *, side: int
) -> MixedDataset:
    mixed = _read_mixed(config, pinned, side)
    if mixed.class_names != real.class_names:
        of_mixed, of_real = (", ".join(each.class_names) for each in (mixed, real))
        remedy = f"its classes are {of_mixed}; the real data's are {of_real}"
        raise InputError("mixed.url", config.url, remedy)
    if config.class_matched:
        try:
            mixed.check_groups_exist(torch.from_numpy(real.train.targets))
        except InputError as error:
            raise _as_setting(error) from None
    return mixed


def _read_mixed(config: MixedConfig, pinned: str | None, side: int) -> MixedDataset:
    try:
        return MixedDataset(
            config.url,
            index=config.index or pinned,
            scale=config.scale,
            rule=config.rule,
            labels=config.labels,
            exclude=config.exclude,
            side=side,
            memory_limit=int(config.memory_gib * 2**30),
            cache_limit=int(config.cache_gib * 2**30),
        )
    except InputError as error:
        raise _as_setting(error) from None
    except ValueError as error:  # names a damaged shard or its labels
        raise InputError("mixed.url", config.url, str(error)) from None


def _as_setting(error: InputError) -> InputError:
    """The same error, named after the setting `mixed.X` instead of the argument `X`."""
    is_setting = error.field.partition(".")[0] in MixedConfig.model_fields
    field = f"mixed.{error.field}" if is_setting else error.field
    return InputError(field, error.value, error.remedy)
