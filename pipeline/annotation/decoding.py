"""Batches of real images, decoded on threads while the last one is used."""

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from data.real import ImageSplit

MOST_THREADS = 16


def decoded(split: ImageSplit, start: int, stop: int, *, batch: int) -> Iterator[Tensor]:
    """Images `start` to `stop - 1` in order, uint8 [n, S, S, 3]; two batches are in memory."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = min(MOST_THREADS, max(1, cores or 1))
    with ThreadPoolExecutor(threads) as pool:

        def begin(first: int) -> list[Future[np.ndarray]]:
            indices = np.arange(first, min(first + batch, stop))
            parts = np.array_split(indices, min(threads, len(indices)))
            return [pool.submit(split.images, part) for part in parts]

        ahead = begin(start)
        for first in range(start, stop, batch):
            current, ahead = ahead, begin(first + batch) if first + batch < stop else []
            yield torch.from_numpy(np.concatenate([part.result() for part in current]))
