"""Open and check the real and mixed datasets of a run."""

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
from semix.calib.config.model import TimmConfig
from semix.calib.processes import broadcast_from_main
from semix.calib.real_images import (
    DECODE_CHUNK,
    ImageSource,
    InMemoryImages,
    StreamedImages,
    open_images,
    ranges,
)
from semix.calib.run_folder import DataRecord, MixedPin, MixedRecord
from semix.data.dataset import MixedDataset
from semix.data.errors import InputError
from semix.data.fingerprint import file_digest, fingerprint
from semix.data.real import load_real
from semix.data.splits import SPLITS, ImageSplit, RealDataset, shared_images

GIB = 2**30
UNPINNED = MixedPin()
TrainingSplit = Literal["train", "validation"]


@dataclass(frozen=True)
class TrainingData:
    """The real and mixed images of a run, for all of its seeds.

    Attributes:
        side: side of the square real images, in pixels.
        memory_limit: bytes that decoded real images may take in memory.
        workers: number of processes that decode the images that do not fit in memory, as in
            `StreamedImages`.
        weights_digest: digest of the file of pretrained weights; None without such a file.
    """

    real: RealDataset
    mixed: MixedDataset | None
    side: int
    memory_limit: int = 8 * GIB
    workers: int | None = None
    weights_digest: str | None = None
    _images: dict[TrainingSplit, ImageSource] = field(default_factory=dict, repr=False)

    @property
    def num_classes(self) -> int:
        return len(self.real.class_names)

    def images(self, split: TrainingSplit, accelerator: Accelerator | None = None) -> ImageSource:
        """The images of a split; training images get memory before validation images.

        Args:
            accelerator: that of the processes that train together; all of them must call this.
        """
        if split not in self._images:
            free = self.memory_limit
            if split != "train":
                images = self.images("train", accelerator)
                free -= images.tensor.nbytes if isinstance(images, InMemoryImages) else 0
            self._images[split] = open_images(
                getattr(self.real, split),
                self.side,
                limit=free,
                workers=self.workers,
                accelerator=accelerator,
            )
        return self._images[split]

    def stream(self, split: ImageSplit) -> StreamedImages:
        """The images of a split that is read once and therefore not kept in memory."""
        return StreamedImages(split, self.side, workers=self.workers)

    @cached_property
    def train_targets(self) -> Tensor:
        """Classes of the training images, int64 [N]."""
        return torch.from_numpy(self.real.train.targets)

    @cached_property
    def train_histogram(self) -> Tensor:
        """Histograms of the training images' pixel values, int64 [3, 256], one per channel."""
        images = self.images("train")
        with closing(images.chunks(ranges(0, len(images), DECODE_CHUNK))) as chunks:
            return pixel_histogram(chunks)

    @cached_property
    def record(self) -> DataRecord:
        """The content of `data.json`: class names, and digests of all data that the run reads."""
        names = list(self.real.class_names)
        record: DataRecord = {"real": real_digest(self.real), "class_names": names, "mixed": None}
        if self.mixed is not None:
            exclude = self.mixed.exclude
            mixed: MixedRecord = {
                "url": self.mixed.url,
                "index": self.mixed.index_name,
                "digest": self.mixed.digest,
                "labels": self.mixed.label_digest,
                "exclude": (
                    exclude.model_dump(mode="json", exclude_defaults=True) if exclude else None
                ),
                "series": self.mixed.series_digest,
            }
            if self.mixed.flags is not None:
                mixed["flags"] = self.mixed.flags
            record["mixed"] = mixed
        if self.weights_digest is not None:
            record["weights"] = self.weights_digest
        return record


def real_digest(real: RealDataset) -> str:
    """Digest of the class names, images and targets of all splits."""
    digests = {split: getattr(real, split).digest for split in SPLITS}
    return fingerprint({"class_names": list(real.class_names), **digests})


def open_data(
    config: TrainConfig,
    *,
    pin: MixedPin = UNPINNED,
    weights_digest: str | None = None,
    compare_splits: bool = True,
) -> TrainingData:
    """Open the data that the settings name.

    Args:
        pin: index of the mixed dataset to use if the settings name none, and number of its files
            of flags to read.
        weights_digest: digest of the pretrained weights, if it is known; None reads their file.
        compare_splits: search for images that two splits share. This decodes all images.
            Training images that fit in memory are kept; all others are decoded again when used.
    Raises:
        InputError: as `load_real`, `MixedDataset` and `check_overlap`; or the mixed images have
            another size, other classes or invalid labels, or no mixed series exists for some class.
    """
    real = load_real(config.real)
    side = config.real.image_size
    mixed = None if config.mixed is None else _open_mixed(config.mixed, real, pin, side=side)
    path = config.model.weights if isinstance(config.model, TimmConfig) else None
    if path is not None and weights_digest is None:
        weights_digest = file_digest(Path(path))
    data = TrainingData(
        real,
        mixed,
        side,
        memory_limit=int(config.real_memory_gib * GIB),
        workers=config.real_workers,
        weights_digest=weights_digest,
    )
    if compare_splits:
        check_overlap(data, allowed=config.real.allow_overlap)
    return data


def prepare(data: TrainingData, accelerator: Accelerator, *, allowed: int = 0) -> None:
    """Compare the splits and compute histogram and record in one process, for all processes.

    Raises:
        InputError: as `check_overlap`, in every process.
    """
    data.images("train", accelerator)
    broadcast_from_main(partial(check_overlap, data, allowed=allowed), accelerator)
    for name in ("train_histogram", "record"):
        value = broadcast_from_main(partial(getattr, data, name), accelerator)
        vars(data)[name] = value  # sets the cached property


def check_overlap(data: TrainingData, *, allowed: int = 0) -> None:
    """Raise InputError if more than `allowed` images are in an earlier split, too."""
    with ExitStack() as stack:
        chunks = {split: stack.enter_context(closing(_chunks(data, split))) for split in SPLITS}
        shared = shared_images(chunks)
    if len(shared) > allowed:
        names = [f"{split} {getattr(data.real, split).name(index)}" for split, index in shared[0]]
        overlap = f"{len(shared)} images of validation or test are in an earlier split as well"
        example = f"for example, {names[0]} is identical to {names[1]}"
        remedy = f"{overlap}: {example}; remove them, or allow them"
        raise InputError("real.allow_overlap", allowed, remedy)


def _chunks(data: TrainingData, split: str) -> Generator[np.ndarray, None, None]:
    """Yield the images of a split in chunks; of training images, also set `train_histogram`."""
    is_training = split == "train"
    images = data.images("train") if is_training else data.stream(getattr(data.real, split))
    histogram = pixel_histogram(())
    with closing(images.chunks(ranges(0, len(images), DECODE_CHUNK))) as chunks:
        for chunk in chunks:
            if is_training:
                histogram += pixel_histogram([chunk])
            yield chunk.numpy()
    if is_training:
        vars(data)["train_histogram"] = histogram


def pixel_histogram(chunks: Iterable[Tensor]) -> Tensor:
    """Histogram, int64 [3, 256], of the pixel values of all chunks, uint8 [n, S, S, 3] each."""
    counts = torch.zeros(3, 256, dtype=torch.int64)
    for images in chunks:
        for channel in range(3):
            values = images[..., channel].flatten()
            counts[channel] += torch.bincount(values, minlength=256).cpu()
    return counts


def _open_mixed(
    config: MixedConfig, real: RealDataset, pin: MixedPin, *, side: int
) -> MixedDataset:
    mixed = _read_mixed(config, pin, side)
    if mixed.class_names != real.class_names:
        mixed_names, real_names = (", ".join(dataset.class_names) for dataset in (mixed, real))
        remedy = f"its classes are {mixed_names}; the real data's are {real_names}"
        raise InputError("mixed.url", config.url, remedy)
    if config.choose is not None:
        from semix.calib.series_choice import choose_series  # networks, which import this module

        mixed.draw_only(choose_series(mixed, config.choose, image_size=side))
    if config.class_matched:
        try:
            mixed.check_groups_exist(torch.from_numpy(real.train.targets))
        except InputError as error:
            raise _name_setting(error) from None
    return mixed


def _read_mixed(config: MixedConfig, pin: MixedPin, side: int) -> MixedDataset:
    try:
        return MixedDataset(
            config.url,
            index=config.index or pin.index,
            scale=config.scale,
            rule=config.rule,
            labels=config.labels,
            exclude=config.exclude,
            flags=pin.flags,
            side=side,
            memory_limit=int(config.memory_gib * 2**30),
            cache_limit=int(config.cache_gib * 2**30),
        )
    except InputError as error:
        raise _name_setting(error) from None
    except ValueError as error:  # its message names a damaged shard or its labels
        raise InputError("mixed.url", config.url, str(error)) from None


def _name_setting(error: InputError) -> InputError:
    """The same error with the setting `mixed.X` in place of the argument `X`."""
    is_setting = error.field.partition(".")[0] in MixedConfig.model_fields
    field = f"mixed.{error.field}" if is_setting else error.field
    return InputError(field, error.value, error.remedy)
