"""A flow's slots: one task run each, here or on a cluster, followed by counting commit records."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from prefect.task_runners import ThreadPoolTaskRunner
from semix.data.errors import InputError
from semix.data.label_sets import LabelSet
from semix.data.root import Root, RootProgress
from semix.flows.slots import SlotSettings, environments_here
from semix.flows.slots.slot import Ended, Place, SlotFuture, generate, worker_arguments

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
        settings: that `check_slots` lets through.
        shards: only these, as in `3,7-9`; empty for all.
        labels: make the labels of this set, not images.
        overrides: of a root, for its workers.
    Raises:
        InputError: a cluster that cannot be reached.
    """
    what = "label" if labels else "generate"
    work = generate.with_options(task_run_name=f"{what} slot {{slot}}")
    common = {"device": settings.device, "url": url, "labels": labels, "shards": shards}
    with _place(url, settings) as place:
        futures = []
        for slot, environment in enumerate(place.environments):
            arguments = worker_arguments(
                url,
                slot,
                len(place.environments),
                settings=settings,
                labels=labels,
                overrides=overrides,
            )
            own = {"slot": slot, "arguments": arguments, "environment": environment}
            futures.append(place.submit(work, {**common, **own, "stop": place.stop}))
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
        from semix.flows.slots.dask import dask_slots

        return dask_slots(settings, url)
    if settings.runner == "ray":
        from semix.flows.slots.ray import ray_slots

        return ray_slots(settings, url)
    return local_slots(settings)


@contextmanager
def local_slots(settings: SlotSettings) -> Iterator[Place]:
    """Threads of this process; as many as were asked for, else one a visible GPU, or one."""
    environments = environments_here(settings)
    stop = threading.Event()
    runner: ThreadPoolTaskRunner[Ended] = ThreadPoolTaskRunner(max_workers=len(environments))
    with runner:
        yield Place(runner.submit, environments, stop, stop.set)


def follow(
    futures: Sequence[SlotFuture],
    root: Root | LabelSet,
    *,
    listeners: Sequence[Callable[[RootProgress], None]],
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
