"""Start a flow's slots, here or on a cluster, and show progress from the commit records."""

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
from semix.flows.slots.slot import SlotFuture, SlotPool, SlotResult, generate, worker_arguments

LOOK_EVERY_S = 1.0
END_S = 30.0  # time in which slots on other machines notice that they must end

log = logging.getLogger("semix.build")


@contextmanager
def run_slots(
    url: str,
    settings: SlotSettings,
    *,
    shards: str = "",
    labels: str = "",
    overrides: Sequence[str] = (),
) -> Iterator[list[SlotFuture]]:
    """Start one task run per slot; none outlives the block, even after an exception.

    Args:
        settings: slot settings that passed `check_slots`.
        shards: only these shards, as in `3,7-9`; empty for all.
        labels: make the labels of this set instead of images.
        overrides: settings of the root for its workers.
    Raises:
        InputError: the cluster cannot be reached.
    """
    action = "label" if labels else "generate"
    slot_task = generate.with_options(task_run_name=f"{action} slot {{slot}}")
    common = {"device": settings.device, "url": url, "labels": labels, "shards": shards}
    with _slot_pool(url, settings) as pool:
        futures = []
        for slot, environment in enumerate(pool.environments):
            arguments = worker_arguments(
                url,
                slot,
                len(pool.environments),
                settings=settings,
                labels=labels,
                overrides=overrides,
            )
            slot_parameters = {"slot": slot, "arguments": arguments, "environment": environment}
            futures.append(pool.submit(slot_task, {**common, **slot_parameters, "stop": pool.stop}))
        try:
            yield futures
        finally:
            pool.end()  # also after an interrupt; the flow ends after its workers
            deadline = time.monotonic() + END_S
            for future in futures:
                future.wait(max(0.0, deadline - time.monotonic()))


def _slot_pool(url: str, settings: SlotSettings) -> AbstractContextManager[SlotPool]:
    # Dask and Ray are extras, and take seconds to import.
    if settings.runner == "dask":
        from semix.flows.slots.dask import dask_slots

        return dask_slots(settings, url)
    if settings.runner == "ray":
        from semix.flows.slots.ray import ray_slots

        return ray_slots(settings, url)
    return local_slots(settings)


@contextmanager
def local_slots(settings: SlotSettings) -> Iterator[SlotPool]:
    """Slots on threads of this process: `count`, or one per visible GPU, or one."""
    environments = environments_here(settings)
    stop = threading.Event()
    runner: ThreadPoolTaskRunner[SlotResult] = ThreadPoolTaskRunner(max_workers=len(environments))
    with runner:
        yield SlotPool(runner.submit, environments, stop, stop.set)


def follow(
    futures: Sequence[SlotFuture],
    root: Root | LabelSet,
    *,
    listeners: Sequence[Callable[[RootProgress], None]],
) -> list[str]:
    """Count commit records until every slot has ended, and pass the progress to the listeners.

    If the store does not answer for a while, the slots go on: they may reach it.

    Returns:
        One text per slot that ended with an error.
    """
    ended: queue.SimpleQueue[SlotFuture] = queue.SimpleQueue()
    for future in futures:
        future.add_done_callback(ended.put)
    errors, remaining, pause, store_is_silent = [], len(futures), 0.0, False
    while remaining:
        for future in _ended_futures(ended, remaining, pause):
            remaining -= 1
            errors += _slot_error(future)
        started = time.monotonic()
        try:
            progress = root.progress()
        except (OSError, InputError) as error:
            if not store_is_silent:  # once per outage
                log.warning("progress is not known; the slots go on: %s", _first_line(error))
            store_is_silent, pause = True, LOOK_EVERY_S
            continue
        store_is_silent = False
        # On a large root or a slow store, counting must not take most of the time.
        pause = max(LOOK_EVERY_S, 20 * (time.monotonic() - started))
        for listener in listeners:
            listener(progress)
    return errors


def _ended_futures(
    ended: "queue.SimpleQueue[SlotFuture]", max_futures: int, pause: float
) -> Iterator[SlotFuture]:
    """Futures as they end, for `pause` seconds or until `max_futures` have ended."""
    deadline = time.monotonic() + pause
    for _ in range(max_futures):
        try:
            yield ended.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return


def _slot_error(future: SlotFuture) -> list[str]:
    """A list of the error that a slot ended with; empty if there is none."""
    result: Any
    try:
        result = future.result(raise_on_failure=False)
    except Exception as error:  # of the cluster: the process that supervised the worker died
        result = error
    if not isinstance(result, Exception):
        return []
    log.warning("%s", _first_line(result))
    return [str(result) or type(result).__name__]


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
