"""The images of a split: decoded once into memory if they fit, else streamed by workers."""

import os
import tempfile
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from semix.calib.processes import wait_for_all
from semix.data.errors import InputError
from semix.data.machine import cores, machine
from semix.data.splits import ImageSplit
from semix.data.threads import mapped
from semix.data.workers import MAX_WORKERS, by_workers, default_workers

DECODE_CHUNK = 512  # images per chunk, where a whole split is decoded
MIN_IMAGES_FOR_WORKERS = 2048  # fewer images are decoded before a worker has started


class ImageSource(Protocol):
    """The N images of a split, all square and of one size.

    Attributes:
        side: of the images, in pixels.
    """

    side: int

    def __len__(self) -> int: ...

    def to(self, device: torch.device) -> "ImageSource":
        """Move images in memory to a device; prepare streamed ones for copies to it."""

    def chunks(self, indices: Iterable[Tensor]) -> Generator[Tensor, None, None]:
        """Yield the images, uint8 [n, S, S, 3], of each tensor of indices, int64 [n].

        Raises:
            InputError: an image cannot be read.
        """


class InMemoryImages:
    """Images of a split, decoded in memory.

    Args:
        tensor: uint8 [N, S, S, 3].
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.side = tensor, tensor.shape[1]

    def __len__(self) -> int:
        return len(self.tensor)

    def to(self, device: torch.device) -> "InMemoryImages":
        return InMemoryImages(self.tensor.to(device))

    def chunks(self, indices: Iterable[Tensor]) -> Generator[Tensor, None, None]:
        for chunk in indices:
            yield self.tensor.index_select(0, chunk.to(self.tensor.device))


class StreamedImages:
    """Images of a split that are decoded by workers each time they are used, a little earlier.

    Args:
        workers: number of processes that decode; None: the machine's cores, divided among its
            trainers; 0 for fewer than MIN_IMAGES_FOR_WORKERS images.
        pinned: whether to put images into pinned memory, for asynchronous copies to a GPU.
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

    def chunks(self, indices: Iterable[Tensor]) -> Generator[Tensor, None, None]:
        # As arrays: workers would get each tensor as an open file.
        arrays = [chunk.numpy() for chunk in indices]
        dataset, workers = _ChunkDataset(self.split), self._num_workers(arrays)
        for images in by_workers(dataset, arrays, workers=workers, pinned=self.pinned):
            if isinstance(images, InputError):
                raise images
            yield images

    def _num_workers(self, chunks: Sequence[np.ndarray]) -> int:
        if self.workers is not None:
            return min(self.workers, len(chunks))
        if sum(map(len, chunks)) < MIN_IMAGES_FOR_WORKERS:
            return 0
        return min(default_workers(), len(chunks))


class _ChunkDataset:
    """Chunks of a split. Returns an InputError, which a DataLoader would raise as another type."""

    def __init__(self, split: ImageSplit) -> None:
        self.split = split

    def __getitem__(self, indices: np.ndarray) -> Tensor | InputError:
        try:
            return torch.from_numpy(self.split.images(indices))
        except InputError as error:
            return error


def ranges(start: int, stop: int, size: int) -> list[Tensor]:
    """The indices from `start` to `stop - 1` in chunks of `size`; the last may be smaller."""
    return list(torch.arange(start, stop).split(size)) if stop > start else []


def open_images(
    split: ImageSplit,
    side: int,
    *,
    limit: int,
    workers: int | None = None,
    accelerator: Accelerator | None = None,
) -> ImageSource:
    """The images of a split, decoded once per machine if they fit into memory.

    Args:
        side: of the images, in pixels.
        limit: bytes that the decoded images may take.
        accelerator: of the processes that train together; all of them must call this.
    Raises:
        InputError: an image cannot be decoded, or the shared file does not fit on the disk.
    """
    if len(split) * side * side * 3 > limit:
        return StreamedImages(split, side, workers=workers)
    if accelerator is not None and accelerator.num_processes > 1:
        machines = gather_object([machine()])
        if machines.count(machine()) > 1:
            return InMemoryImages(
                _decode_shared(split, side, machines=machines, accelerator=accelerator)
            )
    return InMemoryImages(decode(split))


def decode(split: ImageSplit) -> Tensor:
    """Decode all images of a split, uint8 [N, S, S, 3]."""
    images = torch.empty(len(split), *split.images([0]).shape[1:], dtype=torch.uint8)
    with closing(_decode_chunks(split)) as chunks:
        start = 0
        for chunk in chunks:
            images[start : start + len(chunk)] = torch.from_numpy(chunk)
            start += len(chunk)
    return images


def _decode_chunks(split: ImageSplit) -> Generator[np.ndarray, None, None]:
    """Yield the images of a split in order, in chunks that threads decode."""
    threads = min(cores(), MAX_WORKERS)
    chunks = [indices.numpy() for indices in ranges(0, len(split), DECODE_CHUNK)]
    return mapped(split.images, chunks, threads=threads)


def _decode_shared(
    split: ImageSplit, side: int, *, machines: Sequence[str], accelerator: Accelerator
) -> Tensor:
    """Decode images once per machine, into a file that its processes map and that is then removed.

    Args:
        names: the machine of each process.
    """
    first = machines.index(machine())
    decodes = accelerator.process_index == first
    path = _decode_to_file(split) if decodes else None
    wait_for_all(accelerator)  # for the process that decodes the images
    path = gather_object([path])[first]
    if isinstance(path, InputError):
        raise path
    size = len(split) * side * side * 3
    images = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    wait_for_all(accelerator)
    if decodes:
        Path(path).unlink()
    return images.view(len(split), side, side, 3)


def _decode_to_file(split: ImageSplit) -> str | InputError:
    """Write the decoded images to a file; returns its path, or the error if that fails."""
    handle, name = tempfile.mkstemp(prefix="semix-images-")
    try:
        with os.fdopen(handle, "wb") as file, closing(_decode_chunks(split)) as chunks:
            for chunk in chunks:
                file.write(chunk.data)
    except (InputError, OSError) as error:
        Path(name).unlink()
        if isinstance(error, InputError):
            return error
        remedy = f"has no space for the decoded images ({error.strerror}); set TMPDIR to another "
        remedy += "folder, or lower real_memory_gib"
        return InputError("TMPDIR", tempfile.gettempdir(), remedy)
    return name
