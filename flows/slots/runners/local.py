"""Slots on this machine: one thread each, which supervises a worker process."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from prefect.task_runners import ThreadPoolTaskRunner

from flows.gpus import visible_gpus
from flows.slots.runners.place import Place, Record, own_gpu, quiet, shared_threads
from flows.slots.settings import SlotSettings, slots_here


@contextmanager
def local_slots(settings: SlotSettings) -> Iterator[Place]:
    """As many as were asked for, else one a visible GPU, or one."""
    gpus = [] if settings.device == "cpu" else visible_gpus()
    count = slots_here(settings)
    common = quiet() | shared_threads(count)

    def environment(slot: int) -> dict[str, str]:
        return common | own_gpu(slot, gpus)

    stop = threading.Event()
    runner: ThreadPoolTaskRunner[Record] = ThreadPoolTaskRunner(max_workers=count)
    with runner:
        yield Place(runner.submit, count, environment, stop, stop.set)
