"""Slots on this machine: one thread each, which supervises a worker process."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from prefect.task_runners import ThreadPoolTaskRunner

from flows.slots.runners.place import Place, Record
from flows.slots.settings import SlotSettings
from flows.slots.workers_here import environments_here


@contextmanager
def local_slots(settings: SlotSettings) -> Iterator[Place]:
    """As many as were asked for, else one a visible GPU, or one."""
    environments = environments_here(settings)
    stop = threading.Event()
    runner: ThreadPoolTaskRunner[Record] = ThreadPoolTaskRunner(max_workers=len(environments))
    with runner:
        yield Place(runner.submit, len(environments), environments.__getitem__, stop, stop.set)
