"""A flow's slots: one task run each, followed by counting commit records."""

import logging
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from data.errors import InputError
from data.label_sets import LabelSet
from data.root import Progress, Root
from flows.slots.runners.local import local_slots
from flows.slots.runners.place import Place, SlotFuture
from flows.slots.settings import SlotSettings, check_slots
from flows.slots.slot import generate, worker_arguments

LOOK_EVERY_S = 1.0
END_S = 30.0  # until slots elsewhere have noticed that they must end

log = logging.getLogger("semix.build")


@contextmanager
def slots_running(
    url: str,
    settings: SlotSettings,
    *,
    shards: str = "",
    labels: str = "",
    overrides: Sequence[str] = (),
) -> Iterator[list[SlotFuture]]:
    """Start one task run a slot; none lives on when the block is left, however it is left.

    Args:
        shards: only these, as in `3,7-9`; empty for all.
        labels: make the labels of this set, not images.
        overrides: of a root, for its workers.
    Raises:
        InputError: as of `check_slots`; a cluster that cannot be reached.
    """
    check_slots(settings)
    with _place(url, settings) as place:
        futures = _submit(place, url, settings, shards, labels, overrides)
        try:
            yield futures
        finally:
            place.end()  # an interrupt passes here; the flow ends when its workers have
            deadline = time.monotonic() + END_S
            for future in futures:
                future.wait(max(0.0, deadline - time.monotonic()))


def _place(url: str, settings: SlotSettings) -> AbstractContextManager[Place]:
    # Dask and Ray are extras, and take seconds to import.
    if settings.runner == "dask":
        from flows.slots.runners.dask import dask_slots

        return dask_slots(settings, url)
    if settings.runner == "ray":
        from flows.slots.runners.ray import ray_slots

        return ray_slots(settings, url)
    return local_slots(settings)


def _submit(
    place: Place,
    url: str,
    settings: SlotSettings,
    shards: str,
    labels: str,
    overrides: Sequence[str],
) -> list[SlotFuture]:
    what = "label" if labels else "generate"
    work = generate.with_options(task_run_name=f"{what} slot {{slot}}")
    return [
        place.submit(
            work,
            {
                "slot": slot,
                "arguments": worker_arguments(
                    url, slot, place.count, settings=settings, labels=labels, overrides=overrides
                ),
                "environment": place.environment(slot),
                "stop": place.stop,
                "device": settings.device,
                "url": url,
                "labels": labels,
                "shards": shards,
            },
        )
        for slot in range(place.count)
    ]


def follow(
    futures: Sequence[SlotFuture],
    root: Root | LabelSet,
    *,
    listeners: Sequence[Callable[[Progress], None]],
) -> list[str]:
    """Count commit records until every slot has ended, and tell the listeners.

    A store that cannot be counted for a while is no reason to end slots that may reach it.

    Returns:
        What the slots said that ended with an error, one text each.
    """
    ended: queue.SimpleQueue[SlotFuture] = queue.SimpleQueue()
    for future in futures:
        future.add_done_callback(ended.put)
    errors, left, pause, silent = [], len(futures), 0.0, False
    while left:
        for future in _take(ended, left, pause):
            left -= 1
            errors += _complaint(future)
        started = time.monotonic()
        try:
            progress = root.progress()
        except (OSError, InputError) as error:
            if not silent:  # once an outage
                log.warning("progress is not known, the slots go on: %s", _first_line(error))
            silent, pause = True, LOOK_EVERY_S
            continue
        silent = False
        # On a large root or a slow store, looking must not become the work.
        pause = max(LOOK_EVERY_S, 20 * (time.monotonic() - started))
        for listener in listeners:
            listener(progress)
    return errors


def _take(ended: "queue.SimpleQueue[SlotFuture]", most: int, pause: float) -> Iterator[SlotFuture]:
    """Futures as they end, for `pause` seconds or until so many have."""
    deadline = time.monotonic() + pause
    for _ in range(most):
        try:
            yield ended.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return


def _complaint(future: SlotFuture) -> list[str]:
    """The error a slot ended with, if it did."""
    result: Any
    try:
        result = future.result(raise_on_failure=False)
    except Exception as error:  # of the cluster: the process that supervised the worker is gone
        result = error
    if not isinstance(result, Exception):
        return []
    log.warning("%s", _first_line(result))
    return [str(result) or type(result).__name__]


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
