"""The images of a split as training asks for them: held where they fit, else read by workers."""

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
from semix.calib.processes import wait_for_all
from semix.data.errors import InputError
from semix.data.machine import cores, machine
from semix.data.splits import ImageSplit
from semix.data.threads import mapped
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

DECODE_CHUNK = 512  # images that are decoded together where all are
MIN_IMAGES_FOR_WORKERS = 2048  # images that are read sooner than a worker begins
MAX_WORKERS = 16


class ImageSource(Protocol):
    """The N images of a split, square and of one size, in order.

    Attributes:
        side: pixels.
    """

    side: int

    def __len__(self) -> int: ...

    def to(self, device: torch.device) -> "ImageSource":
        """Move images in memory to a device; prepare streamed ones for copies to it."""

    def parts(self, indices: Iterable[Tensor]) -> Generator[Tensor, None, None]:
        """The images at each int64 [n], uint8 [n, S, S, 3], in turn.

        Raises:
            InputError: one cannot be read.
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
        for chosen in indices:
            yield self.tensor.index_select(0, chosen.to(self.tensor.device))


class StreamedImages:
    """Images that are decoded each time they are asked for, ahead of who takes them.

    Args:
        workers: processes that decode; None: the machine's cores, shared among its trainers, or
            none of them for few images.
        pinned: parts lie where a GPU copies them from while the host goes on.
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
        chosen = [part.numpy() for part in indices]  # a tensor would travel as an open file
        loader = DataLoader(
            _Parts(self.split),
            batch_size=None,
            sampler=chosen,
            num_workers=self._workers(chosen),
            pin_memory=self.pinned,
            worker_init_fn=_begin_worker,
            generator=torch.Generator(),  # it draws from it, and must not from everyone's
        )
        for found in loader:
            if isinstance(found, InputError):
                raise found
            yield found

    def _workers(self, chosen: Sequence[np.ndarray]) -> int:
        if self.workers is not None:
            return min(self.workers, len(chosen))
        if sum(map(len, chosen)) < MIN_IMAGES_FOR_WORKERS:
            return 0
        own = cores() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        return max(1, min(own, MAX_WORKERS, len(chosen)))


class _Parts(Dataset[Tensor | InputError]):
    """A refusal is an answer: what a DataLoader makes of an exception loses its kind."""

    def __init__(self, split: ImageSplit) -> None:
        self.split = split

    def __getitem__(self, chosen: np.ndarray) -> Tensor | InputError:
        try:
            return torch.from_numpy(self.split.images(chosen))
        except InputError as error:
            return error


def _begin_worker(worker: int) -> None:
    """Signals to all processes ask the trainer alone for an end; its workers go with it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # What its parent's libraries would do at their end, as Prefect's, fails in a fork of it.
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
    """The images of a split, decoded once on each machine if they fit.

    Args:
        side: pixels of theirs.
        limit: bytes that they may take decoded.
        accelerator: of the processes that train together, which must all call.
    Raises:
        InputError: one cannot be decoded, or there is no room where processes share them.
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
    found = torch.empty(len(split), *split.images([0]).shape[1:], dtype=torch.uint8)
    with closing(_decode_parts(split)) as parts:
        start = 0
        for part in parts:
            found[start : start + len(part)] = torch.from_numpy(part)
            start += len(part)
    return found


def _decode_parts(split: ImageSplit) -> Generator[np.ndarray, None, None]:
    """Its images in order, on threads."""
    threads = min(cores(), MAX_WORKERS)
    every = [chosen.numpy() for chosen in ranges(0, len(split), DECODE_CHUNK)]
    return mapped(split.images, every, threads=threads)


def _decode_shared(
    split: ImageSplit, side: int, *, names: Sequence[str], accelerator: Accelerator
) -> Tensor:
    """One copy for all processes of a machine, in the pages of a file without a name.

    Args:
        names: of the machine of each process.
    """
    first = names.index(machine())
    leads = accelerator.process_index == first
    path = _decode_to_file(split) if leads else None
    wait_for_all(accelerator)  # while others decode
    found = gather_object([path])[first]
    if isinstance(found, InputError):
        raise found
    size = len(split) * side * side * 3
    images = torch.from_file(str(found), shared=False, size=size, dtype=torch.uint8)
    wait_for_all(accelerator)
    if leads:
        Path(found).unlink()
    return images.view(len(split), side, side, 3)


def _decode_to_file(split: ImageSplit) -> str | InputError:
    """A file of the decoded images, or why there is none."""
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
