"""The images of a split for training: decoded in memory if they fit, else streamed by workers."""

import os
import signal
import tempfile
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from semix.calib.processes import wait_for_all
from semix.data.errors import InputError
from semix.data.machine import cores, machine
from semix.data.splits import ImageSplit
from semix.data.threads import mapped

DECODE_CHUNK = 512  # images that are decoded together when a whole split is
MIN_IMAGES_FOR_WORKERS = 2048  # fewer are read before a worker has started
MAX_WORKERS = 16


class ImageSource(Protocol):
    """The N images of a split, square and of one size, in order.

    Attributes:
        side: pixels of a side.
    """

    side: int

    def __len__(self) -> int: ...

    def to(self, device: torch.device) -> "ImageSource":
        """Move images in memory to a device; prepare streamed ones for copies to it."""

    def parts(self, indices: Iterable[Tensor]) -> Generator[Tensor, None, None]:
        """For each int64 [n] of indices, the images, uint8 [n, S, S, 3].

        Raises:
            InputError: an image cannot be read.
        """


class InMemoryImages:
    """Decoded images.

    Args:
        tensor: uint8 [N, S, S, 3].
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.side = tensor, tensor.shape[1]

    def __len__(self) -> int:
        return len(self.tensor)

    def to(self, device: torch.device) -> "InMemoryImages":
        return InMemoryImages(self.tensor.to(device))

    def parts(self, indices: Iterable[Tensor]) -> Generator[Tensor, None, None]:
        for part in indices:
            yield self.tensor.index_select(0, part.to(self.tensor.device))


class StreamedImages:
    """Images that are decoded each time they are requested, ahead of their use.

    Args:
        workers: processes that decode; None: the machine's cores, shared among its trainers, or
            none for few images.
        pinned: put images into pinned memory, for copies to a GPU while the host goes on.
    """

    def __init__(
        self, split: ImageSplit, side: int, *, workers: int | None = None, pinned: bool = False
    ) -> None:
        self.split, self.side, self.workers, self.pinned = split, side, workers, pinned

    def __len__(self) -> int:
        return len(self.split)

    def to(self, device: torch.device) -> "StreamedImages":
        pinned = device.type == "cuda"
        return StreamedImages(self.split, self.side, workers=self.workers, pinned=pinned)

    def parts(self, indices: Iterable[Tensor]) -> Generator[Tensor, None, None]:
        arrays = [part.numpy() for part in indices]  # a tensor is sent to workers as an open file
        loader = DataLoader(
            _Parts(self.split),
            batch_size=None,
            sampler=arrays,
            num_workers=self._workers(arrays),
            pin_memory=self.pinned,
            worker_init_fn=_begin_worker,
            generator=torch.Generator(),  # else the loader would draw from the global generator
        )
        for images in loader:
            if isinstance(images, InputError):
                raise images
            yield images

    def _workers(self, parts: Sequence[np.ndarray]) -> int:
        if self.workers is not None:
            return min(self.workers, len(parts))
        if sum(map(len, parts)) < MIN_IMAGES_FOR_WORKERS:
            return 0
        share = cores() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        return max(1, min(share, MAX_WORKERS, len(parts)))


class _Parts(Dataset[Tensor | InputError]):
    """Parts of a split. InputError is returned: a DataLoader would raise it as another type."""

    def __init__(self, split: ImageSplit) -> None:
        self.split = split

    def __getitem__(self, indices: np.ndarray) -> Tensor | InputError:
        try:
            return torch.from_numpy(self.split.images(indices))
        except InputError as error:
            return error


def _begin_worker(worker: int) -> None:
    """Ignore signals to stop, which the trainer handles; its workers end with it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # Exit handlers of the parent's libraries, such as Prefect's, fail in a forked process.
    Finalize(None, os._exit, args=(0,), exitpriority=100)


def ranges(start: int, stop: int, size: int) -> list[Tensor]:
    """The indices from `start` to `stop - 1` in parts of `size`; the last may be smaller."""
    return list(torch.arange(start, stop).split(size)) if stop > start else []


def open_images(
    split: ImageSplit,
    side: int,
    *,
    limit: int,
    workers: int | None = None,
    accelerator: Accelerator | None = None,
) -> ImageSource:
    """The images of a split, decoded once per machine if they fit.

    Args:
        side: pixels of a side.
        limit: bytes that the decoded images may take.
        accelerator: of the processes that train together; all of them must call.
    Raises:
        InputError: an image cannot be decoded, or the shared file does not fit on the disk.
    """
    if len(split) * side * side * 3 > limit:
        return StreamedImages(split, side, workers=workers)
    if accelerator is not None and accelerator.num_processes > 1:
        names = gather_object([machine()])
        if names.count(machine()) > 1:
            return InMemoryImages(_decode_shared(split, side, names=names, accelerator=accelerator))
    return InMemoryImages(decode(split))


def decode(split: ImageSplit) -> Tensor:
    """All images of a split, uint8 [N, S, S, 3]."""
    images = torch.empty(len(split), *split.images([0]).shape[1:], dtype=torch.uint8)
    with closing(_decode_parts(split)) as parts:
        start = 0
        for part in parts:
            images[start : start + len(part)] = torch.from_numpy(part)
            start += len(part)
    return images


def _decode_parts(split: ImageSplit) -> Generator[np.ndarray, None, None]:
    """The images of a split in order, decoded on threads."""
    threads = min(cores(), MAX_WORKERS)
    parts = [indices.numpy() for indices in ranges(0, len(split), DECODE_CHUNK)]
    return mapped(split.images, parts, threads=threads)


def _decode_shared(
    split: ImageSplit, side: int, *, names: Sequence[str], accelerator: Accelerator
) -> Tensor:
    """One copy for all processes of a machine, memory-mapped from a file that is then unlinked.

    Args:
        names: the machine of each process.
    """
    first = names.index(machine())
    leads = accelerator.process_index == first
    path = _decode_to_file(split) if leads else None
    wait_for_all(accelerator)  # for the process that decodes
    path = gather_object([path])[first]
    if isinstance(path, InputError):
        raise path
    size = len(split) * side * side * 3
    images = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    wait_for_all(accelerator)
    if leads:
        Path(path).unlink()
    return images.view(len(split), side, side, 3)


def _decode_to_file(split: ImageSplit) -> str | InputError:
    """Write a file of the decoded images; returns its path, or the error that prevented it."""
    handle, name = tempfile.mkstemp(prefix="semix-images-")
    try:
        with os.fdopen(handle, "wb") as file, closing(_decode_parts(split)) as parts:
            for part in parts:
                file.write(part.data)
    except (InputError, OSError) as error:
        Path(name).unlink()
        if isinstance(error, InputError):
            return error
        remedy = f"no room for the decoded images ({error.strerror}); set TMPDIR to a folder that "
        remedy += "has it, or lower real_memory_gib"
        return InputError("TMPDIR", tempfile.gettempdir(), remedy)
    return name
