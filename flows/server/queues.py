"""What Prefect sends in the background, log lines and events: sent or dropped at the end."""

import logging
import queue
from contextlib import suppress

DRAIN_TIMEOUT_S = 10.0


def send_rest() -> None:
    """Send what is left, else the last states and lines of a run are lost; not for long."""
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    for service in (APILogWorker, EventsWorker):
        service.drain_all(timeout=DRAIN_TIMEOUT_S, at_exit=False)
    drop_rest()


def drop_rest() -> None:
    """Forget what a lost server did not take.

    The process would wait for it when it ends: Prefect tries every event for ten seconds, every
    batch of lines for longer.
    """
    from prefect._internal.concurrency.services import _active_services

    logging.raiseExceptions = False  # else the lines under way, failing, write to standard error
    for service in tuple(_active_services):
        with suppress(queue.Empty):
            while True:
                service._queue.get_nowait()
                service._queue.task_done()
        service._stop()
