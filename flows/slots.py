"""A flow's slots: one task run each, followed by counting commit records."""

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from typing import Any

from prefect.futures import PrefectConcurrentFuture

from data.label_sets import LabelSet
from data.progress import Progress
from data.root import Root
from flows.gpus import visible_gpus
from flows.slot import generate, worker_command

LOOK_EVERY_S = 1.0

SlotFuture = PrefectConcurrentFuture[dict[str, Any]]


def start_workers(
    url: str, slots: int, *, shards: str = "", labels: str = "", stop: threading.Event
) -> list[SlotFuture]:
    """One task run a slot; its worker makes images, or the labels of one set."""
    what = "label" if labels else "generate"
    work = generate.with_options(task_run_name=f"{what} slot {{slot}}")
    gpus = visible_gpus()
    # Together no more threads than cores: a few too many cost ten times, not a few per cent.
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // slots))
    quiet = {"TQDM_DISABLE": "1", "OMP_NUM_THREADS": threads}  # no bars as lines in a log
    futures: list[Any] = [
        work.submit(
            slot,
            worker_command(url, slot, slots, shards=shards, labels=labels),
            environment=quiet | ({"CUDA_VISIBLE_DEVICES": gpus[slot % len(gpus)]} if gpus else {}),
            stop=stop,
        )
        for slot in range(slots)
    ]
    return futures


def follow(
    futures: Sequence[SlotFuture],
    root: Root | LabelSet,
    *,
    listeners: Sequence[Callable[[Progress], None]],
) -> None:
    """Count commit records until every task is done, and tell the listeners."""
    pending, pause = {future.wrapped_future for future in futures}, 0.0
    while pending:
        pending = wait(pending, timeout=pause).not_done
        started = time.monotonic()
        progress = root.progress()
        # On a large root or a slow store, looking must not become the work.
        pause = max(LOOK_EVERY_S, 20 * (time.monotonic() - started))
        for listener in listeners:
            listener(progress)
