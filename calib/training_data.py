"""The images that a run trains on, for all of its seeds; and whether splits share images."""

from collections.abc import Generator, Iterable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Literal

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from semix.calib.processes import broadcast_from_main
from semix.calib.real_images import (
    DECODE_CHUNK,
    ImageSource,
    InMemoryImages,
    StreamedImages,
    open_images,
    ranges,
)
from semix.calib.run_folder import DataRecord, MixedRecord
from semix.data.dataset import MixedDataset
from semix.data.errors import InputError
from semix.data.fingerprint import fingerprint
from semix.data.splits import SPLITS, ImageSplit, RealDataset, shared_images

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
    memory_limit: int = 8 * 2**30
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
