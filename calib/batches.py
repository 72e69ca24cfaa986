"""Batches of real and mixed images: drawn, augmented and split among processes."""

import math
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import repeat

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional

from semix.calib.config import (
    MIN_IMAGES_PER_PROCESS,
    AugmentConfig,
    TrainConfig,
    check_accumulation,
)
from semix.calib.real_data import TrainingData
from semix.calib.real_images import ImageSource, InMemoryImages
from semix.data.dataset import MixedDataset
from semix.data.errors import InputError
from semix.data.threads import one_ahead


@dataclass(frozen=True)
class TrainingBatch:
    """One process's share of a step: B real images, and M mixed ones if any are drawn.

    Attributes:
        images, mixed_images: uint8 [B, S, S, 3] and [M, S, S, 3], augmented.
        targets, indices: class and index in the training set, int64 [B].
        mixed_labels: float32 [M, K].
        mixed_kinds: float32 [M, 2]; a column each for end points and inner images. An image has
            1 / count of its kind in its column, so a weighted sum is the mean over a kind.
        drawn: state of the epoch's generator after the step; None for a micro-batch.
    """

    images: Tensor
    targets: Tensor
    indices: Tensor
    mixed_images: Tensor | None = None
    mixed_labels: Tensor | None = None
    mixed_kinds: Tensor | None = None
    drawn: Tensor | None = None


@dataclass(frozen=True)
class _HostBatch:
    """A batch as drawn and read on the host.

    Attributes:
        real: int64 [5, B]: indices, targets, changes; one tensor, so one copy to the device.
        mixed: changes, images and labels of mixed images, or empty.
        drawn: state of the epoch's generator after the batch.
    """

    real: Tensor
    mixed: tuple[Tensor, ...]
    drawn: Tensor


class Batches:
    """The training split in batches, in a new order each epoch.

    Every process draws the same random numbers for the whole step and takes its slice, so the
    slices are equal in size, each image is used once, and the order does not depend on the number
    of processes. Images that do not fill a batch are left out of the epoch.

    Each real image that draws mixed images takes n = ceil(per_real) of one series: an end point
    and inner images. All real images of the step draw if `per_real` is whole; else the first
    per_real / n of them, rounded to a multiple of the number of processes, so that every process
    has equally many. Only that rounding depends on the number of processes.

    Args:
        images: of the training split; those in memory move to the device.
        targets: int64 [N].
        batch_size: images per step over all processes; a smaller training set is one batch.
        mixed: dataset to draw mixed images from; None draws none.
        per_real: mixed images per real image; 2 as in CSM.
        process, processes: index of this process, which takes that slice, and their number.
    Raises:
        InputError: the processes cannot share the batch equally, with at least two real and two
            mixed images each, which batch norms need.
    """

    def __init__(
        self,
        images: ImageSource,
        targets: Tensor,
        *,
        batch_size: int,
        augment: AugmentConfig,
        device: torch.device,
        mixed: MixedDataset | None = None,
        class_matched: bool = True,
        per_real: float = 2.0,
        process: int = 0,
        processes: int = 1,
    ) -> None:
        share = min(batch_size, len(images)) // processes
        if batch_size % processes or share < MIN_IMAGES_PER_PROCESS:
            remedy = f"{processes} processes share it equally; choose a multiple of {processes}"
            least = f"at least {MIN_IMAGES_PER_PROCESS} of the {len(images)} training images"
            raise InputError("batch_size", batch_size, f"{remedy}, with {least} for each")
        self.batch_size = share * processes
        self._slice = slice(process * share, (process + 1) * share)
        self.count = math.ceil(per_real)  # of each series
        drawing = round(share * per_real / self.count)  # real images of a process's part
        if mixed is not None and drawing * self.count < MIN_IMAGES_PER_PROCESS:
            few = f"gives fewer than {MIN_IMAGES_PER_PROCESS} mixed images"
            remedy = f"{few} for the {share} real ones of a process; choose more"
            raise InputError("mixed.per_real", per_real, remedy)
        self._drawing = drawing * processes
        self._drawing_slice = slice(process * drawing, (process + 1) * drawing)
        self.images = images.to(device)
        self.targets = targets.cpu()  # as the order is
        self.augment, self.device = augment, device
        self.mixed, self.class_matched = mixed, class_matched
        self._kinds = kind_weights(drawing * self.count, self.count).to(device)

    def __len__(self) -> int:
        """Steps in an epoch."""
        return len(self.images) // self.batch_size

    def epoch(
        self, generator: torch.Generator, *, done: int = 0, drawn: Tensor | None = None
    ) -> Generator[TrainingBatch, None, None]:
        """The batches of one epoch.

        Args:
            generator: on the CPU, in the same state in every process. A thread reads the next
                batch meanwhile, so the generator is one batch ahead; `TrainingBatch.drawn` is its
                state after each batch.
            done: steps of the epoch that were made before and are left out.
            drawn: state of the generator after these steps.
        """
        order = torch.randperm(len(self.images), generator=generator)
        if drawn is not None:
            generator.set_state(drawn)
        steps = order[: len(self) * self.batch_size].split(self.batch_size)[done:]
        reads = (self._read(indices, generator) for indices in steps)
        with closing(one_ahead(reads)) as ahead, closing(self._local_images(steps)) as images:
            for read in ahead:
                yield self._batch(read, next(images))

    def _local_images(self, steps: Sequence[Tensor]) -> Generator[Tensor | None, None, None]:
        """This process's images of each step; None for images in memory."""
        if isinstance(self.images, InMemoryImages):
            yield from repeat(None)
        with closing(self.images.parts([indices[self._slice] for indices in steps])) as parts:
            yield from parts

    def _read(self, indices: Tensor, generator: torch.Generator) -> _HostBatch:
        targets = self.targets[indices]
        changes = draw_changes(len(indices), self.augment, generator)
        real = torch.stack([indices, targets, *changes.unbind(1)])[:, self._slice]
        mixed = self._read_mixed(targets, generator)
        pinned = [pin(tensor, self.device) for tensor in mixed]
        return _HostBatch(pin(real, self.device), tuple(pinned), generator.get_state())

    def _read_mixed(self, targets: Tensor, generator: torch.Generator) -> tuple[Tensor, ...]:
        if self.mixed is None:
            return ()
        targets, local = targets[: self._drawing], self._drawing_slice
        group, position = self.mixed.choose(
            targets, rng=generator, class_matched=self.class_matched, count=self.count
        )
        changes = draw_changes(position.numel(), self.augment, generator)
        changes = changes.view(*position.shape, -1)[local]
        # All processes choose for the whole step; each reads only its part of the images.
        images, labels = self.mixed.read(group[local], position[local])
        return tuple(tensor.flatten(0, 1) for tensor in (changes, images, labels))

    def _batch(self, read: _HostBatch, images: Tensor | None) -> TrainingBatch:
        """Copy a batch to the device and augment it there."""
        indices, targets, *changes = read.real.to(self.device, non_blocking=True).unbind()
        if isinstance(self.images, InMemoryImages):
            images = self.images.tensor.index_select(0, indices)
        else:
            assert images is not None
            images = images.to(self.device, non_blocking=True)
        images = apply_changes(images, torch.stack(changes, dim=1), self.augment)
        if not read.mixed:
            return TrainingBatch(images, targets, indices, drawn=read.drawn)
        mixed = (tensor.to(self.device, non_blocking=True) for tensor in read.mixed)
        changes_of_mixed, mixed_images, labels = mixed
        mixed_images = apply_changes(mixed_images, changes_of_mixed, self.augment)
        return TrainingBatch(
            images, targets, indices, mixed_images, labels, self._kinds, read.drawn
        )


def kind_weights(total: int, count: int) -> Tensor:
    """`TrainingBatch.mixed_kinds` of series of `count` images each, whose first is an end point."""
    end = torch.arange(total) % count == 0
    kinds = torch.stack([end, ~end], dim=1).float()  # [M, 2]
    return kinds / kinds.sum(0).clamp(min=1)


def pin(values: Tensor, device: torch.device) -> Tensor:
    """Pin memory for a GPU, which then copies it with `non_blocking` while the host goes on."""
    return values.pin_memory() if device.type == "cuda" else values


class Normalise(nn.Module):
    """Normalises images, uint8 or float in 0..255, to the network's input: float32 [N, 3, H, W].

    Mean and deviation per channel come from the training split and are saved with the model, so
    that every set of images is normalised alike.
    """

    mean: Tensor  # [3], in [0, 255]
    std: Tensor  # [3]

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("std", torch.ones(3))

    def forward(self, images: Tensor) -> Tensor:
        width = images.shape[2]
        rows = images.flatten(2).float()  # [N, H, 3W]: long rows are several times faster
        rows = (rows - self.mean.repeat(width)) / self.std.repeat(width)
        # Channels stay last in memory, where convolutions are faster, on the CPU and on GPUs.
        return rows.view(images.shape).permute(0, 3, 1, 2)

    @torch.no_grad()
    def fit(self, pixels: Tensor) -> "Normalise":
        """Compute mean and deviation from the counts of the 256 values, int64 [3, 256]."""
        values = torch.arange(256, dtype=torch.float64)
        for channel, counts in enumerate(pixels.double()):
            mean = (counts * values).sum() / counts.sum()
            variance = (counts * (values - mean).square()).sum() / counts.sum()
            self.mean[channel] = mean
            self.std[channel] = variance.sqrt().clamp(min=1)  # 0 for a single colour
        return self


def apply_changes(images: Tensor, changes: Tensor, augment: AugmentConfig) -> Tensor:
    """Shift images, filling with black, and mirror them.

    Args:
        images: uint8 [B, S, S, 3].
        changes: int64 [B, 3]: rows down and columns right, each 0 .. 2 shift, where the value
            `shift` moves nothing; then 1 to mirror.
    Returns:
        uint8 [B, S, S, 3].
    """
    if not augment.shift and not augment.flip:
        return images
    size, edge = images.shape[1], augment.shift
    positions = torch.arange(size, device=images.device)
    rows = positions + 2 * edge - changes[:, :1]  # [B, S] in the padded image
    columns = positions + 2 * edge - changes[:, 1:2]
    columns = torch.where(changes[:, 2:] == 1, columns.flip(1), columns)
    padded = functional.pad(images, (0, 0, edge, edge, edge, edge))
    every = torch.arange(len(images), device=images.device)[:, None, None]
    return padded[every, rows[:, :, None], columns[:, None, :]]


def draw_changes(count: int, augment: AugmentConfig, generator: torch.Generator) -> Tensor:
    """Draw random changes of `count` images for `apply_changes`, int64 [B, 3]."""
    shifts = torch.randint(2 * augment.shift + 1, (count, 2), generator=generator)
    mirrored = torch.randint(2, (count, 1), generator=generator) * int(augment.flip)
    return torch.cat([shifts, mirrored], dim=1)


def base_batches(config: TrainConfig, data: TrainingData, accelerator: Accelerator) -> Batches:
    """Batches of stage one: real images, and mixed ones if the settings name a mixed dataset."""
    return Batches(
        data.images("train", accelerator),
        data.train_targets,
        batch_size=config.batch_size,
        augment=config.augment,
        device=accelerator.device,
        mixed=data.mixed,
        class_matched=config.mixed is not None and config.mixed.class_matched,
        per_real=config.mixed.per_real if config.mixed is not None else 2.0,
        process=accelerator.process_index,
        processes=accelerator.num_processes,
    )


def head_batches(config: TrainConfig, data: TrainingData, accelerator: Accelerator) -> Batches:
    """Batches of stage two: real images only."""
    assert config.head is not None
    return Batches(
        data.images("train", accelerator),
        data.train_targets,
        batch_size=config.head.batch_of(len(data.train_targets)),
        augment=config.head.changes(config.augment),
        device=accelerator.device,
        process=accelerator.process_index,
        processes=accelerator.num_processes,
    )


@dataclass(frozen=True)
class MicroBatch:
    """A part of a batch.

    Attributes:
        real, mixed: fractions of the batch's real and mixed images in this part; weighted with
            them, the means of the parts add up to the means of the batch.
    """

    batch: TrainingBatch
    real: float
    mixed: float


def micro_batches(batch: TrainingBatch, count: int) -> Iterator[MicroBatch]:
    """Split a batch into `count` parts with equally many real images.

    Numbers of mixed images differ by at most one.

    Raises:
        InputError: a part would have fewer than two real or mixed images, which batch norms need.
    """
    if count == 1:
        yield MicroBatch(batch, 1.0, 1.0)
        return
    check_accumulation(len(batch.targets), count)
    real = [tensor.chunk(count) for tensor in (batch.images, batch.targets, batch.indices)]
    mixed = [batch.mixed_images, batch.mixed_labels, batch.mixed_kinds]
    if batch.mixed_images is None:
        for images, targets, indices in zip(*real, strict=True):
            yield MicroBatch(TrainingBatch(images, targets, indices), 1 / count, 0.0)
        return
    total = len(batch.mixed_images)
    if total // count < MIN_IMAGES_PER_PROCESS:
        few = f"fewer than {MIN_IMAGES_PER_PROCESS} for each part; choose fewer parts"
        raise InputError("accumulate", count, f"the {total} mixed images of a step leave {few}")
    parts = [tensor.tensor_split(count) for tensor in mixed if tensor is not None]
    for tensors in zip(*real, *parts, strict=True):
        yield MicroBatch(TrainingBatch(*tensors), 1 / count, len(tensors[3]) / total)
