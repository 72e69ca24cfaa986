"""Processes that compute items ahead of their consumer, in order."""

import os
import signal
from collections.abc import Iterable
from multiprocessing.util import Finalize
from typing import Any, Protocol, TypeVar, cast

import torch
from torch.utils.data import DataLoader, Dataset

from semix.data.machine import cores

MAX_WORKERS = 16
Result = TypeVar("Result")
Item = TypeVar("Item", covariant=True)


class Items(Protocol[Item]):
    """Items by their keys."""

    def __getitem__(self, key: Any, /) -> Item: ...


def by_workers(
    items: Items[Result],
    keys: Iterable[Any],
    *,
    workers: int,
    pinned: bool = False,
) -> "DataLoader[Result]":
    """The items of these keys, in order, computed ahead by processes.

    Args:
        keys: each is taken when it is due, so there may be any number of them.
        workers: number of processes; 0 computes each item where it is used.
        pinned: whether to put tensors into pinned memory, for asynchronous copies to a GPU.
    """
    return DataLoader(
        cast(Dataset[Result], items),  # all that it uses of one is this method
        batch_size=None,
        sampler=keys,
        num_workers=workers,
        pin_memory=pinned,
        worker_init_fn=_ignore_stop_signals,
        generator=torch.Generator(),  # else it would use the global generator
    )


def default_workers() -> int:
    """The machine's cores, divided among its trainers, and no more than MAX_WORKERS."""
    return min(max(1, cores() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))), MAX_WORKERS)


def _ignore_stop_signals(worker: int) -> None:
    """Run in a new worker: signals to stop are handled by its parent, with which it ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # Exit handlers of the parent's libraries, such as Prefect's, fail in a forked process.
    Finalize(None, os._exit, args=(0,), exitpriority=100)
