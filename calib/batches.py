"""Training batches: real images, and mixed ones drawn for them, as tensors on the device."""

import math
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from calib.config import AugmentConfig
from calib.config.checks import LEAST
from data.dataset import MixedDataset
from data.errors import InputError
from data.threads import one_ahead


@dataclass(frozen=True)
class Batch:
    """One process's share of a step: B real images, and M mixed ones where there are any.

    Attributes:
        images, mixed_images: uint8 [B, S, S, 3] and [M, S, S, 3], augmented.
        targets, indices: class and place in the training set, int64 [B].
        mixed_labels: float32 [M, K].
        drawn: state of the epoch's generator after the step; of a whole batch alone.
    """

    images: Tensor
    targets: Tensor
    indices: Tensor
    mixed_images: Tensor | None = None
    mixed_labels: Tensor | None = None
    drawn: Tensor | None = None


@dataclass(frozen=True)
class _Read:
    """What is drawn and read for a batch on the host.

    Attributes:
        real: int64 [5, B]: indices, targets, changes; in one tensor, which is one copy.
        mixed: changes, images and labels of mixed images, or nothing.
        drawn: state of the epoch's generator after it.
    """

    real: Tensor
    mixed: tuple[Tensor, ...]
    drawn: Tensor


class Batches:
    """The training split in batches, a new order each epoch.

    Every process draws the same random numbers for the whole step and takes its slice, so the
    slices are equal in size, each image is seen once, and the order does not depend on how many
    processes share the work. Images that do not fill a batch are left out of the epoch.

    Mixed images come from one series for each real image that draws: its end point and inner
    ones, n = ceil(per_real) in all. All real images of the step draw where `per_real` is whole;
    else the first per_real / n of them, to the nearest multiple of the number of processes, so
    that every process has equally many. That rounding alone depends on how many there are.

    Args:
        images: uint8 [N, S, S, 3], held on the device.
        targets: int64 [N].
        batch_size: images a step over all processes; a smaller training set is one batch.
        mixed: what to draw mixed images from; None draws none.
        per_real: mixed images for each real one; 2 are those of CSM.
        process, processes: which slice is this process's.
    Raises:
        InputError: the batch cannot be shared out equally, with two real and two mixed images
            for each process, which batch norms need.
    """

    def __init__(
        self,
        images: Tensor,
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
        if batch_size % processes or share < LEAST:
            remedy = f"{processes} processes share it equally; choose a multiple of {processes}"
            many = f"with {LEAST} of the {len(images)} training images for each at least"
            raise InputError("batch_size", batch_size, f"{remedy}, {many}")
        self.batch_size = share * processes
        self._slice = slice(process * share, (process + 1) * share)
        self.count = math.ceil(per_real)  # of each series
        drawing = round(share * per_real / self.count)  # real images of a process's part
        if mixed is not None and drawing * self.count < LEAST:
            remedy = f"gives fewer than {LEAST} mixed images for the {share} real ones of a process"
            raise InputError("mixed.per_real", per_real, f"{remedy}; choose more")
        self._drawing = drawing * processes
        self._drawing_slice = slice(process * drawing, (process + 1) * drawing)
        self.images = images.to(device)
        self.targets = targets.cpu()  # as the order is
        self.augment, self.device = augment, device
        self.mixed, self.class_matched = mixed, class_matched

    def __len__(self) -> int:
        """Steps in an epoch."""
        return len(self.images) // self.batch_size

    def epoch(
        self, generator: torch.Generator, *, done: int = 0, drawn: Tensor | None = None
    ) -> Generator[Batch, None, None]:
        """The batches of one epoch.

        Args:
            generator: on the CPU, in the same state in every process. A thread reads the next
                batch meanwhile, so it is one batch ahead; `Batch.drawn` is the state after each.
            done: steps that were made before and are left out.
            drawn: state of the generator after them.
        """
        steps = self._steps(generator, done, drawn)
        with closing(one_ahead(steps)) as ahead:
            for read in ahead:
                yield self._batch(read)

    def _steps(
        self, generator: torch.Generator, done: int, drawn: Tensor | None
    ) -> Iterator[_Read]:
        order = torch.randperm(len(self.images), generator=generator)
        if drawn is not None:
            generator.set_state(drawn)
        for step in range(done, len(self)):
            yield self._read(order[step * self.batch_size :][: self.batch_size], generator)

    def _read(self, chosen: Tensor, generator: torch.Generator) -> _Read:
        targets = self.targets[chosen]
        changes = draw_changes(len(chosen), self.augment, generator)
        real = torch.stack([chosen, targets, *changes.unbind(1)])[:, self._slice]
        mixed = self._read_mixed(targets, generator)
        pinned = [pin(tensor, self.device) for tensor in mixed]
        return _Read(pin(real, self.device), tuple(pinned), generator.get_state())

    def _read_mixed(self, targets: Tensor, generator: torch.Generator) -> tuple[Tensor, ...]:
        if self.mixed is None:
            return ()
        targets, own = targets[: self._drawing], self._drawing_slice
        group, position = self.mixed.choose(
            targets, rng=generator, class_matched=self.class_matched, count=self.count
        )
        changes = draw_changes(position.numel(), self.augment, generator)
        changes = changes.view(*position.shape, -1)[own]
        # All processes choose for the whole step; each reads its own images alone.
        images, labels = self.mixed.read(group[own], position[own])
        return tuple(tensor.flatten(0, 1) for tensor in (changes, images, labels))

    def _batch(self, read: _Read) -> Batch:
        """Copied to the device, and changed there."""
        own, targets, *changes = read.real.to(self.device, non_blocking=True).unbind()
        images = self.images.index_select(0, own)
        images = apply_changes(images, torch.stack(changes, dim=1), self.augment)
        if not read.mixed:
            return Batch(images, targets, own, drawn=read.drawn)
        mixed = (tensor.to(self.device, non_blocking=True) for tensor in read.mixed)
        changes_of_mixed, mixed_images, labels = mixed
        mixed_images = apply_changes(mixed_images, changes_of_mixed, self.augment)
        return Batch(images, targets, own, mixed_images, labels, read.drawn)


def pin(values: Tensor, device: torch.device) -> Tensor:
    """Where a GPU copies it from while the host goes on, with `non_blocking`."""
    return values.pin_memory() if device.type == "cuda" else values


class Normalise(nn.Module):
    """Images to the float32 [N, 3, H, W] that networks are trained on; uint8 or float in 0..255.

    One mean and deviation a channel for the whole dataset, found on the training split and
    saved with the model, so that no set is ever normalised otherwise.
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
        # Channels stay last in memory, which convolutions like, on the CPU and on GPUs.
        return rows.view(images.shape).permute(0, 3, 1, 2)

    @torch.no_grad()
    def fit(self, images: Tensor) -> "Normalise":
        """Take mean and deviation from uint8 [N, H, W, 3]."""
        # The counts of the 256 values are exact, and small whatever N.
        values = torch.arange(256, dtype=torch.float64)
        for channel in range(3):
            counts = torch.bincount(images[..., channel].flatten(), minlength=256).cpu().double()
            mean = (counts * values).sum() / counts.sum()
            variance = (counts * (values - mean).square()).sum() / counts.sum()
            self.mean[channel] = mean
            self.std[channel] = variance.sqrt().clamp(min=1)  # one even colour has none
        return self


def apply_changes(images: Tensor, changes: Tensor, augment: AugmentConfig) -> Tensor:
    """Shift images over black, and mirror them.

    Args:
        images: uint8 [B, S, S, 3].
        changes: int64 [B, 3]: rows down and columns right, each 0 .. 2 shift, where `shift`
            is no move; then 1 to mirror.
    Returns:
        uint8 [B, S, S, 3].
    """
    if not augment.shift and not augment.flip:
        return images
    size, edge = images.shape[1], augment.shift
    place = torch.arange(size, device=images.device)
    rows = place + 2 * edge - changes[:, :1]  # [B, S] in the padded image
    columns = place + 2 * edge - changes[:, 1:2]
    columns = torch.where(changes[:, 2:] == 1, columns.flip(1), columns)
    padded = functional.pad(images, (0, 0, edge, edge, edge, edge))
    every = torch.arange(len(images), device=images.device)[:, None, None]
    return padded[every, rows[:, :, None], columns[:, None, :]]


def draw_changes(count: int, augment: AugmentConfig, generator: torch.Generator) -> Tensor:
    """Random changes of `count` images, int64 [B, 3], as `apply_changes` takes them."""
    shifts = torch.randint(2 * augment.shift + 1, (count, 2), generator=generator)
    mirrored = torch.randint(2, (count, 1), generator=generator) * int(augment.flip)
    return torch.cat([shifts, mirrored], dim=1)
