"""Draw batches of real and mixed images, augment them, and split them among processes."""

import math
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import repeat

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn import functional

from semix.calib.config import (
    MIN_IMAGES_PER_PROCESS,
    AugmentConfig,
    MixedConfig,
    TrainConfig,
    check_accumulation,
)
from semix.calib.controls import ControlledDraws
from semix.calib.real_images import ImageSource, InMemoryImages
from semix.calib.training_data import TrainingData
from semix.data.dataset import MixedDataset
from semix.data.errors import InputError
from semix.data.threads import one_ahead


@dataclass(frozen=True)
class TrainingBatch:
    """The images of one process in one step: B real images, and M mixed images if any are used.

    Attributes:
        images, mixed_images: uint8 [B, S, S, 3] and [M, S, S, 3], augmented.
        targets, indices: class and index in the training set, int64 [B].
        mixed_labels: float32 [M, K].
        mixed_kinds: float32 [M, 2]; one column for end points, one for inner images. Each image
            has 1 / (number of its kind) in its column and 0 in the other, so that a sum weighted
            with a column is the mean over that kind.
        generator_state: of the epoch's generator after the step; None for a micro-batch.
    """

    images: Tensor
    targets: Tensor
    indices: Tensor
    mixed_images: Tensor | None = None
    mixed_labels: Tensor | None = None
    mixed_kinds: Tensor | None = None
    generator_state: Tensor | None = None


@dataclass(frozen=True)
class _HostBatch:
    """A batch on the host, before it is copied to the device.

    Attributes:
        real: int64 [5, B]: indices, targets and three rows of changes, in one tensor, which takes
            one copy to the device.
        mixed: changes, images and labels of the mixed images; empty without mixed images.
        generator_state: of the epoch's generator after the batch.
    """

    real: Tensor
    mixed: tuple[Tensor, ...]
    generator_state: Tensor


class Batches:
    """Splits the training images into batches, in a new order each epoch.

    Every process draws the same random numbers for the whole step and takes its slice, so the
    slices are equal in size, each image is used once, and the order does not depend on the number
    of processes. Images that do not fill a batch are left out of the epoch.

    A real image that draws mixed images gets n = ceil(per_real) images of one series: an end point
    and inner images. If `per_real` is a whole number, all real images of the step draw; else only
    the first ones, a fraction per_real / n of the step. Their number is rounded to a multiple of
    the number of processes, so that every process has equally many; nothing else depends on the
    number of processes.

    Args:
        images: of the training split; images in memory are moved to the device.
        targets: int64 [N].
        batch_size: real images per step, over all processes; a smaller training set is one batch.
        mixed: dataset to draw mixed images from; None draws none.
        per_real: mixed images per real image; CSM has 2.
        sampled_labels: sample a class from the label of each mixed image, as a hard label.
        process, processes: index of this process, and the number of processes.
    Raises:
        InputError: the processes cannot share the batch equally, or one would get fewer than two
            real or two mixed images, which batch norms need.
    """

    def __init__(
        self,
        images: ImageSource,
        targets: Tensor,
        *,
        batch_size: int,
        augment: AugmentConfig,
        device: torch.device,
        mixed: MixedDataset | ControlledDraws | None = None,
        class_matched: bool = True,
        per_real: float = 2.0,
        sampled_labels: bool = False,
        process: int = 0,
        processes: int = 1,
    ) -> None:
        local_size = min(batch_size, len(images)) // processes
        if batch_size % processes or local_size < MIN_IMAGES_PER_PROCESS:
            remedy = f"{processes} processes share it equally; choose a multiple of {processes}"
            minimum = f"at least {MIN_IMAGES_PER_PROCESS} of the {len(images)} training images"
            raise InputError("batch_size", batch_size, f"{remedy}, with {minimum} for each")
        self.batch_size = local_size * processes
        self._slice = slice(process * local_size, (process + 1) * local_size)
        self.images_per_series = math.ceil(per_real)  # mixed images drawn per series
        # Real images per process that draw a series.
        local_draws = round(local_size * per_real / self.images_per_series)
        if mixed is not None and local_draws * self.images_per_series < MIN_IMAGES_PER_PROCESS:
            problem = f"gives fewer than {MIN_IMAGES_PER_PROCESS} mixed images"
            remedy = f"{problem} for the {local_size} real images of a process; choose more"
            raise InputError("mixed.per_real", per_real, remedy)
        self._draws = local_draws * processes
        self._draws_slice = slice(process * local_draws, (process + 1) * local_draws)
        self.images = images.to(device)
        self.targets = targets.cpu()  # where the order is drawn
        self.augment, self.device = augment, device
        self.mixed, self.class_matched = mixed, class_matched
        self.sampled_labels = sampled_labels
        per_series = self.images_per_series
        self._kinds = kind_weights(local_draws * per_series, per_series).to(device)

    def __len__(self) -> int:
        """Steps in an epoch."""
        return len(self.images) // self.batch_size

    def epoch(
        self,
        generator: torch.Generator,
        *,
        steps_done: int = 0,
        generator_state: Tensor | None = None,
    ) -> Generator[TrainingBatch, None, None]:
        """Yield the batches of one epoch.

        Args:
            generator: on the CPU, in the same state in every process. A thread prepares the next
                batch meanwhile, which advances the generator; `TrainingBatch.generator_state` is
                the state after the batch itself.
            steps_done: steps of the epoch that were done before an interruption; they are skipped.
            generator_state: the state after those steps.
        """
        order = torch.randperm(len(self.images), generator=generator)
        if generator_state is not None:
            generator.set_state(generator_state)
        steps = order[: len(self) * self.batch_size].split(self.batch_size)[steps_done:]
        host_batches = (self._read(indices, generator) for indices in steps)
        with (
            closing(one_ahead(host_batches)) as prefetched,
            closing(self._local_images(steps)) as images,
        ):
            for host_batch in prefetched:
                yield self._batch(host_batch, next(images))

    def _local_images(self, steps: Sequence[Tensor]) -> Generator[Tensor | None, None, None]:
        """Yield this process's images of each step; None for images in memory."""
        if isinstance(self.images, InMemoryImages):
            yield from repeat(None)
        with closing(self.images.chunks([indices[self._slice] for indices in steps])) as chunks:
            yield from chunks

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
        targets, local = targets[: self._draws], self._draws_slice
        group, position = self.mixed.choose(
            targets,
            rng=generator,
            class_matched=self.class_matched,
            count=self.images_per_series,
        )
        changes = draw_changes(position.numel(), self.augment, generator)
        changes = changes.view(*position.shape, -1)[local]
        # All processes choose images for the whole step; each reads only its own.
        images, labels = self.mixed.read(group[local], position[local])
        if self.sampled_labels:
            uniform = torch.rand(position.shape, generator=generator)
            labels = sample_labels(labels, uniform[local])
        return tuple(tensor.flatten(0, 1) for tensor in (changes, images, labels))

    def _batch(self, host: _HostBatch, images: Tensor | None) -> TrainingBatch:
        """Copy a batch to the device and augment it there."""
        indices, targets, *changes = host.real.to(self.device, non_blocking=True).unbind()
        if isinstance(self.images, InMemoryImages):
            images = self.images.tensor.index_select(0, indices)
        else:
            assert images is not None
            images = images.to(self.device, non_blocking=True)
        images = apply_changes(images, torch.stack(changes, dim=1), self.augment)
        if not host.mixed:
            return TrainingBatch(images, targets, indices, generator_state=host.generator_state)
        mixed = (tensor.to(self.device, non_blocking=True) for tensor in host.mixed)
        mixed_changes, mixed_images, labels = mixed
        mixed_images = apply_changes(mixed_images, mixed_changes, self.augment)
        return TrainingBatch(
            images, targets, indices, mixed_images, labels, self._kinds, host.generator_state
        )


def sample_labels(labels: Tensor, uniform: Tensor) -> Tensor:
    """One class of each soft label [..., K], as a one-hot label.

    Args:
        uniform: numbers in [0, 1), [...], that decide which: the class with its probability.
    """
    cumulative = labels.cumsum(-1)
    # Scaled, because rounding may leave a sum below a number that is close to 1.
    chosen = (uniform[..., None] * cumulative[..., -1:] >= cumulative).sum(-1)
    return functional.one_hot(chosen.clamp(max=labels.shape[-1] - 1), labels.shape[-1]).float()


def kind_weights(total: int, count: int) -> Tensor:
    """`TrainingBatch.mixed_kinds` of series of `count` images each, whose first is an end point."""
    end = torch.arange(total) % count == 0
    kinds = torch.stack([end, ~end], dim=1).float()  # [M, 2]
    return kinds / kinds.sum(0).clamp(min=1)


def pin(values: Tensor, device: torch.device) -> Tensor:
    """Pin memory for a GPU, which then copies it with `non_blocking` while the host goes on."""
    return values.pin_memory() if device.type == "cuda" else values


def apply_changes(images: Tensor, changes: Tensor, augment: AugmentConfig) -> Tensor:
    """Shift images, filling with black, and mirror them.

    Args:
        images: uint8 [B, S, S, 3].
        changes: int64 [B, 3]. Columns 0 and 1 move the image down and to the right by
            (value - shift) pixels, with values 0 .. 2 shift; column 2 is 1 to mirror, else 0.
    Returns:
        uint8 [B, S, S, 3].
    """
    if not augment.shift and not augment.flip:
        return images
    size, shift = images.shape[1], augment.shift
    positions = torch.arange(size, device=images.device)
    rows = positions + 2 * shift - changes[:, :1]  # [B, S] in the padded image
    columns = positions + 2 * shift - changes[:, 1:2]
    columns = torch.where(changes[:, 2:] == 1, columns.flip(1), columns)
    padded = functional.pad(images, (0, 0, shift, shift, shift, shift))
    batch_index = torch.arange(len(images), device=images.device)[:, None, None]
    return padded[batch_index, rows[:, :, None], columns[:, None, :]]


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
        mixed=_controlled(config.mixed, data.mixed),
        class_matched=config.mixed is not None and config.mixed.class_matched,
        per_real=config.mixed.per_real if config.mixed is not None else 2.0,
        sampled_labels=config.mixed is not None and config.mixed.labels_as == "sampled",
        process=accelerator.process_index,
        processes=accelerator.num_processes,
    )


def _controlled(
    config: MixedConfig | None, mixed: MixedDataset | None
) -> MixedDataset | ControlledDraws | None:
    if config is None or config.control is None or mixed is None:
        return mixed
    return ControlledDraws(mixed, config.control)


def head_batches(config: TrainConfig, data: TrainingData, accelerator: Accelerator) -> Batches:
    """Batches of stage two: real images only."""
    assert config.head is not None
    return Batches(
        data.images("train", accelerator),
        data.train_targets,
        batch_size=config.head.batch_size_for(len(data.train_targets)),
        augment=config.head.augmentation(config.augment),
        device=accelerator.device,
        process=accelerator.process_index,
        processes=accelerator.num_processes,
    )


@dataclass(frozen=True)
class MicroBatch:
    """A part of a batch, with its fractions of the batch's images.

    Attributes:
        real_fraction, mixed_fraction: of the batch's real and mixed images. Means over
            micro-batches, weighted with these fractions, add up to the means over the batch.
    """

    batch: TrainingBatch
    real_fraction: float
    mixed_fraction: float


def split_batch(batch: TrainingBatch, count: int) -> Iterator[MicroBatch]:
    """Split a batch into `count` micro-batches with equally many real images.

    Their numbers of mixed images differ by at most one.

    Raises:
        InputError: a micro-batch would have fewer than two real or two mixed images, which batch
            norms need.
    """
    if count == 1:
        yield MicroBatch(batch, 1.0, 1.0)
        return
    check_accumulation(len(batch.targets), count)
    real_chunks = [tensor.chunk(count) for tensor in (batch.images, batch.targets, batch.indices)]
    mixed = [batch.mixed_images, batch.mixed_labels, batch.mixed_kinds]
    if batch.mixed_images is None:
        for images, targets, indices in zip(*real_chunks, strict=True):
            yield MicroBatch(TrainingBatch(images, targets, indices), 1 / count, 0.0)
        return
    total = len(batch.mixed_images)
    if total // count < MIN_IMAGES_PER_PROCESS:
        problem = f"fewer than {MIN_IMAGES_PER_PROCESS} per micro-batch; choose fewer"
        raise InputError("accumulate", count, f"the {total} mixed images of a step leave {problem}")
    mixed_chunks = [tensor.tensor_split(count) for tensor in mixed if tensor is not None]
    for tensors in zip(*real_chunks, *mixed_chunks, strict=True):
        yield MicroBatch(TrainingBatch(*tensors), 1 / count, len(tensors[3]) / total)
