"""MixedLoader: an epoch of groups or images in batches, shared out over ranks and workers."""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from data.errors import InputError
from data.mixed.dataset import MixedDataset
from data.mixed.images import StoredImages, images_at
from data.mixed.order import Last, epoch_order, num_steps, share_of_step
from data.mixed.soft_labels import SoftLabels

Kind = Literal["groups", "images"]


class MixedBatch(NamedTuple):
    """One rank's share of a step.

    Attributes:
        images: uint8 [b, H, W, 3], or [b, A, H, W, 3] where samples are groups.
        labels: float32 [b, K], or [b, A, K].
        ids: int64 [b], what a sample keeps while a root grows: the number of its group, or
            that times A plus the position in it.
        counted: bool [b]; False for samples that fill up the last batch, and were seen before.
    """

    images: Tensor
    labels: Tensor
    ids: Tensor
    counted: Tensor


class MixedLoader:
    """Batches of a MixedDataset; every sample exactly once an epoch, over all ranks.

    Order and batches follow from seed, epoch and batch size alone: not from ranks, workers or
    how images are read. Each rank gets equally many batches, all of one size but in the last
    step. It is no torch DataLoader, so `accelerator.prepare` leaves it alone; a DataLoader that
    shares out by itself is split again there, and shows a part of the data only.

    Iterating shows one epoch and turns to the next. `state_dict()` between two batches, loaded
    later, by any number of ranks, goes on with exactly the batches that were left.

    Args:
        batch_size: samples a step, over all ranks.
        kind: whether a sample is a group or an image.
        rank, ranks: whose share this is; those of torch.distributed where that is in use.
        workers: processes that read ahead; 0 reads when asked.
        last: what becomes of a last, smaller batch: `short` shares it out as evenly as it goes,
            `drop` leaves it out of the epoch, `repeat` fills it up.
        window: shards whose samples are mixed with each other.
        context: how workers start.
    Raises:
        InputError: a batch that cannot be shared out equally, or is never full; workers that
            cannot see the images.
    """

    def __init__(
        self,
        dataset: MixedDataset,
        *,
        batch_size: int,
        kind: Kind = "groups",
        seed: int = 0,
        rank: int | None = None,
        ranks: int | None = None,
        workers: int = 0,
        last: Last = "short",
        window: int = 4,
        context: Literal["fork", "spawn", "forkserver"] = "fork",
    ) -> None:
        self.rank, self.ranks = _place(rank, ranks)
        self._samples = _Samples(dataset, kind)
        images = 1 if kind == "groups" else dataset.alphas.shape[1]
        self._sizes = [size * images for size in dataset.shard_sizes]
        if batch_size < 1 or batch_size % self.ranks:
            remedy = f"{self.ranks} ranks share it equally; choose a multiple of {self.ranks}"
            raise InputError("batch_size", batch_size, remedy)
        if last == "drop" and sum(self._sizes) < batch_size:
            remedy = f"there are {sum(self._sizes)} {kind}; choose less, or last `short`"
            raise InputError("batch_size", batch_size, remedy)
        if workers and not dataset.shared and not dataset.in_memory:
            remedy = f"only this process sees {dataset.url}; choose 0, or a larger memory_limit"
            raise InputError("workers", workers, remedy)
        self.batch_size, self.kind, self.seed = batch_size, kind, seed
        self.workers, self.last, self.window, self.context = workers, last, window, context
        self._digest = dataset.series_digest
        self.epoch = self.step = self._start = 0

    def __len__(self) -> int:
        """Steps of an epoch."""
        return num_steps(sum(self._sizes), self.batch_size, self.last)

    def set_epoch(self, epoch: int) -> None:
        """Which epoch comes next; the one that a loaded state is in goes on where it stopped."""
        if epoch != self.epoch:
            self.epoch, self.step, self._start = epoch, 0, 0

    def __iter__(self) -> Iterator[MixedBatch]:
        first, self._start = self._start, 0
        order = epoch_order(self._sizes, seed=self.seed, epoch=self.epoch, window=self.window)
        shares = [self._share(order, step) for step in range(first, len(self))]
        reader = self._reader([samples for samples, _ in shares])
        for step, (read, (samples, count)) in enumerate(zip(reader, shares, strict=True), first):
            images, labels, ids = read
            self.step = step + 1
            yield MixedBatch(images, labels, ids, torch.arange(len(samples)) < count)
        self.epoch, self.step = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """Where it stands, and whose order that is; JSON values, equal on all ranks."""
        return {"epoch": self.epoch, "step": self.step, "order": self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the last batch that was given before `state` was taken.

        Raises:
            InputError: the state is of another order: other data, seed or batches.
        """
        for name, value in self._identity().items():
            if state["order"][name] != value:
                remedy = f"the state has {state['order'][name]}; open the loader with that"
                raise InputError(f"loader.{name}", value, remedy)
        self.epoch, self.step = state["epoch"], state["step"]
        self._start = self.step

    def _identity(self) -> dict[str, Any]:
        names = ("batch_size", "kind", "seed", "last", "window")
        return {name: getattr(self, name) for name in names} | {"data": self._digest}

    def _share(self, order: np.ndarray, step: int) -> tuple[np.ndarray, int]:
        return share_of_step(
            order,
            step,
            batch_size=self.batch_size,
            rank=self.rank,
            ranks=self.ranks,
            last=self.last,
        )

    def _reader(self, batches: list[np.ndarray]) -> DataLoader[Any]:
        return DataLoader(
            self._samples,
            batch_sampler=batches,  # type: ignore[arg-type]  # any iterable of indices
            collate_fn=_as_read,
            num_workers=self.workers,
            multiprocessing_context=self.context if self.workers else None,
            # Otherwise starting an epoch would take a number from torch's global generator.
            generator=torch.Generator(),
        )


class _Samples(Dataset[Any]):
    """What workers need of a dataset, and no more: spawned ones get a copy of it."""

    def __init__(self, dataset: MixedDataset, kind: Kind) -> None:
        self.images: Tensor | StoredImages = dataset.images
        self.labels: SoftLabels = dataset.soft_labels
        self.numbers = dataset.numbers
        self.positions = torch.arange(dataset.alphas.shape[1])
        self.kind = kind

    def __getitems__(self, samples: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        """images, labels and ids of a batch at once."""
        chosen = torch.from_numpy(samples)
        if self.kind == "groups":
            group, position = chosen[:, None], self.positions
            ids = self.numbers[chosen]
        else:
            images = len(self.positions)
            group, position = chosen // images, chosen % images
            ids = self.numbers[group] * images + position
        return images_at(self.images, group, position), self.labels.dense(group, position), ids


def _as_read(batch: Any) -> Any:
    return batch


def _place(rank: int | None, ranks: int | None) -> tuple[int, int]:
    if (rank is None) != (ranks is None):
        raise InputError("rank, ranks", f"{rank}, {ranks}", "give both or neither")
    if rank is not None and ranks is not None:
        if not 0 <= rank < ranks:
            raise InputError("rank", rank, f"must lie in 0 .. {ranks - 1}")
        return rank, ranks
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1
